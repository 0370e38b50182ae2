#!/usr/bin/env python3
"""A precision's cost in loss: one model trained in each, from the same weights on the same text.

    python benchmarks/precision.py --modes float32 bf16 fp8 --steps 200 --output precision.jsonl
    python benchmarks/precision.py --report precision.jsonl --plot precision.png

The model is the preset configs/125M/diff_v2.yaml on bytes, the text Python's own library, a
fortieth of which is kept for validation. The learning rate stays constant after its warmup, so that
the first steps of a longer run are those of a shorter one. One line of JSON for each run.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megadiff.config import OptimizerConfig, load_config
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.parameter import initialize

PRESET = Path(__file__).resolve().parents[1] / "configs/125M/diff_v2.yaml"


@dataclass(frozen=True)
class Mode:
    dtype: torch.dtype = torch.bfloat16
    optimizer: dict[str, Any] = field(default_factory=dict)
    float8: bool = False


MODES = {
    "float32": Mode(torch.float32),
    "bf16": Mode(),
    "fp16": Mode(torch.float16, {"initial_loss_scale": 2.0**16}),
    "kahan": Mode(optimizer={"main_weights": "kahan"}),
    "stochastic": Mode(optimizer={"main_weights": "stochastic"}),
    "pure": Mode(  # 8 bytes a parameter: weights, moments and gradients in bfloat16
        optimizer={
            "main_weights": "stochastic",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
            "accumulate_allreduce_grads_in_fp32": False,
        }
    ),
    "bf16_gradients": Mode(optimizer={"accumulate_allreduce_grads_in_fp32": False}),
    "fp8": Mode(float8=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order of text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600, help="stop training a mode then")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("precision.jsonl"))
    parser.add_argument("--report", type=Path, nargs="+", help="only compare the runs in FILES")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.report is None:
        text = corpus().to(args.device)
        for mode in args.modes:
            result = train(args, mode, text)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        args.report = [args.output]
    runs = [json.loads(line) for path in args.report for line in path.read_text().splitlines()]
    report(runs)
    if args.plot is not None:
        plot(runs, args.plot)


def corpus(size: int = 40_000_000) -> Tensor:
    """The first `size` bytes of Python's library, in the order of its files' names."""
    data, folder = bytearray(), Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if len(data) >= size:
            break
        if "site-packages" not in path.parts:
            data += path.read_bytes() + b"\0"
    return torch.frombuffer(data, dtype=torch.uint8)


def train(args: argparse.Namespace, name: str, text: Tensor) -> dict[str, Any]:
    """Losses of every step, and on the validation text after 200 steps and at the end."""
    mode = MODES[name]
    config = load_config(["--config", str(PRESET)])
    config.model.vocab_size = 256
    if args.num_layers is not None:
        config.model.num_layers = args.num_layers
    model = Decoder(config.model, dtype=mode.dtype, device=args.device)
    initialize(model, args.seed)
    if mode.float8:
        from megadiff.parallel.float8 import use_float8

        use_float8(model, emulate=args.device == "cpu")
    o = config.optimizer
    settings = {"adam_beta1": o.adam_beta1, "adam_beta2": o.adam_beta2, **mode.optimizer}
    optimizer = Optimizer(model, OptimizerConfig(**settings))
    held_out = len(text) // 40
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.seq_length + 1, device=args.device)
    positions = offsets[:-1].expand(args.batch_size, -1)

    def loss_of(starts: Tensor) -> Tensor:
        tokens = text[starts.to(args.device)[:, None] + offsets].long()
        return model(tokens[:, :-1], positions, tokens[:, 1:]).mean()

    @torch.no_grad()
    def validate() -> float:
        last = len(text) - args.seq_length - 1
        starts = torch.linspace(len(text) - held_out, last, 8 * args.batch_size).long()
        return sum(loss_of(part).item() for part in starts.split(args.batch_size)) / 8

    losses: list[Tensor] = []
    skipped: list[Tensor] = []
    validation: dict[int, float] = {}
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        last = len(text) - held_out - args.seq_length - 1
        optimizer.zero_grad()
        loss = loss_of(torch.randint(last, (args.batch_size,), generator=generator))
        optimizer.scale_loss(loss).backward()
        result = optimizer.step(args.lr * min(1.0, step / args.warmup))
        losses.append(loss.detach())
        skipped.append(result.skipped)
        if step in (200, args.steps):
            validation[step] = validate()
        if step % 20 == 0:
            seconds = time.perf_counter() - begin
            print(f"{name} seed {args.seed}: step {step}, loss {loss.item():.4f}, {seconds:.1f} s")
            sys.stdout.flush()
            if seconds > args.seconds:
                break
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {
        "mode": name,
        "seed": args.seed,
        "device": device,
        "tokens_per_step": args.batch_size * args.seq_length,
        "losses": torch.stack(losses).tolist(),
        "skipped": int(torch.stack(skipped).sum()),
        "validation": validation,
    }


def report(runs: list[dict[str, Any]], window: int = 50) -> None:
    """Differences to float32 and, in longer runs, to bf16 with the same seed.

    Of the training loss, step by step over the last `window` steps that both have (mean, standard
    deviation of a step), and of the validation loss.
    """
    by_seed: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        by_seed[run["seed"]][run["mode"]] = run
    for seed, modes in sorted(by_seed.items()):
        for reference in ("float32", "bf16"):
            for name, run in modes.items():
                if reference not in modes or name == reference:
                    continue
                base = modes[reference]
                steps = min(len(run["losses"]), len(base["losses"]))
                if reference == "bf16" and steps <= len(
                    modes.get("float32", {"losses": []})["losses"]
                ):
                    continue
                pairs = zip(run["losses"][:steps], base["losses"][:steps], strict=True)
                differences = [a - b for a, b in pairs][-window:]
                deviation = torch.tensor(differences).std().item()
                line = (
                    f"seed {seed}, {steps} steps, {name} - {reference}: training loss "
                    f"{statistics.mean(differences):+.4f} +- {deviation:.4f}"
                )
                if (step := str(steps)) in run["validation"] and step in base["validation"]:
                    line += f", validation loss {run['validation'][step]:.4f} "
                    line += f"({run['validation'][step] - base['validation'][step]:+.4f})"
                print(line + (f", {run['skipped']} steps skipped" if run["skipped"] else ""))


def plot(runs: list[dict[str, Any]], path: Path, window: int = 10) -> None:
    """Loss curves, means over `window` steps, and their differences to float32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def smooth(values: list[float]) -> list[float]:
        return [statistics.mean(values[max(0, i - window) : i + 1]) for i in range(len(values))]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    base = {r["seed"]: r["losses"] for r in runs if r["mode"] == "float32"}
    for run in runs:
        if run["seed"] != min(base, default=run["seed"]):
            continue
        left.plot(smooth(run["losses"]), label=run["mode"], linewidth=1)
        pairs = zip(run["losses"], base.get(run["seed"], []), strict=False)
        right.plot(smooth([a - b for a, b in pairs]), label=run["mode"], linewidth=1)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="loss - float32's", ylim=(-0.1, 0.1))
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
