#!/usr/bin/env python3
"""Tokens per second and memory of whole training steps: our mixers and Hugging Face's models.

    python benchmarks/train.py --models standard diff_v1 diff_v2 hf_llama_compiled hf_diffllama
    python benchmarks/train.py --models diff_v1 --profile --main-weights stochastic
    python benchmarks/train.py --quick

Our models train in the loop of pretrain_diff.py, on random tokens. Flags that are not listed here
are pretrain_diff.py's and win over the shape of 1.345B parameters (24 layers of 2048, 16 heads of
128, MLP 5504, vocabulary 32000, 4 x 4096 tokens a step); its peers take the same shape. Model
FLOPs are counted alike for all, as megadiff/models/flops.py says. A line for each model goes to
the terminal, and as JSON to --output.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.step_budget import Budget, budget_of_step
from megadiff.config import MIXER_SYMBOLS, Config, load_config, validate
from megadiff.data.gpt_dataset import Sample
from megadiff.models.flops import model_size
from megadiff.optim.schedule import make_schedule
from megadiff.training.checkpointing import Progress
from megadiff.training.data import Batches, RunData
from megadiff.training.engine import NativeEngine
from megadiff.training.faults import StepWatch
from megadiff.training.loop import Run, train
from megadiff.training.metrics import peak_memory
from megadiff.training.setup import start
from megadiff.training.stop import StopRequests
from megadiff.training.straggler import OwnTime

PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 and H200 by their datasheet
SHAPE = """--num-layers 24 --hidden-size 2048 --kv-channels 128 --ffn-hidden-size 5504
    --vocab-size 32000 --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 4
    --bf16 --lr-decay-style constant --lr 1e-4 --eval-iters 0 --log-interval 1000000"""
QUICK = """--num-layers 2 --hidden-size 64 --kv-channels 16 --ffn-hidden-size 128 --vocab-size 256
    --seq-length 64 --micro-batch-size 2"""
OURS = {  # pattern of layers; output heads and key/value groups, in units of hidden / head width
    "standard": ("*", 1, 1),
    "diff_v1": ("1", 1 / 2, 1 / 2),
    "diff_v2": ("2", 1, 1 / 4),
    "standard_matched": ("*", 3 / 2, 1 / 4),  # DIFF V2's parameters but for its lambda rows
    "delta_net": ("D", 1, 1),
    "gated_delta_net": ("G", 1, 1),
    "hybrid": ("DDD2", 1, 1 / 4),
}
PEERS = {"hf_llama": "standard", "hf_diffllama": "diff_v1"}  # and the model of ours that it is
COMPILED = "_compiled"
MODELS = [*OURS, *PEERS, *(name + COMPILED for name in PEERS)]


@dataclass
class Result:
    model: str
    precision: str
    parameters: int
    tokens_per_step: int
    seconds_per_step: float
    flops_per_token: float
    peak_bytes: int
    loss: float
    budget: Budget | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    @property
    def flops_per_second(self) -> float:
        return self.tokens_per_second * self.flops_per_token

    def __str__(self) -> str:
        return (
            f"{self.model:22} {self.parameters / 1e9:.3f}B | {self.tokens_per_second:9,.0f} "
            f"tokens/s | {1e3 * self.seconds_per_step:8.1f} ms/step | "
            f"{self.flops_per_second / 1e12:6.1f} TFLOP/s, {self.flops_per_second / PEAK:.3f} of "
            f"989 | peak {self.peak_bytes / 2**30:6.2f} GiB | loss {self.loss:.2f} | "
            f"{self.precision}"
        )

    def json(self) -> dict[str, Any]:
        rates = {
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "share_of_989": self.flops_per_second / PEAK,
        }
        values = vars(self) | rates
        return values | {"budget": self.budget and vars(self.budget)}


class RandomTokens:
    """Samples of uniformly random tokens, each a function of its number."""

    def __init__(self, config: Config) -> None:
        self.length, self.vocab_size = config.training.seq_length + 1, config.model.vocab_size

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(self.vocab_size, size=self.length)
        return Sample(tokens, np.zeros(1, np.int32))


class Records:
    """Takes the place of the run's log: keeps the numbers, prints nothing but what kernels run."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def line(self, text: str) -> None:
        pass

    def record(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        self.last = values


def configuration(model: str, flags: list[str]) -> Config:
    """What pretrain_diff.py would run: the shape, the user's flags, the model's heads."""
    config = load_config([*SHAPE.split(), *flags])
    m = config.model
    assert m.kv_channels is not None
    pattern, *shares = OURS[model]
    if len(pattern) == 1:
        m.token_mixer = MIXER_SYMBOLS[pattern]
    else:
        m.hybrid_layer_pattern = pattern
    units = m.hidden_size // m.kv_channels
    m.num_attention_heads, m.num_query_groups = (round(units * share) for share in shares)
    config.training.train_iters = 1
    validate(config, 1)
    return config


def measure_ours(model: str, a: argparse.Namespace, flags: list[str]) -> Result:
    config = configuration(model, flags)
    t = config.training
    assert t.global_batch_size is not None
    env = start(config)
    size = model_size(config.model, t.seq_length)
    pin = env.device.type == "cuda"
    batches = Batches(RandomTokens(config), "random", config, env.mesh.dp, None, pin)
    data = RunData(batches, {}, None, {})
    schedule = make_schedule(
        config.optimizer, train_samples=1 << 40, global_batch_size=t.global_batch_size
    )
    records, progress = Records(), Progress()
    with StopRequests.install(t) as requests:
        engine = NativeEngine(config, env)
        run = Run(
            config, env, engine, size, data, schedule, records, requests,
            save=lambda *_: None, check_save=lambda: None, go_back=lambda _: None,
            watch=StepWatch(config), own_time=OwnTime(env.device, False),
        )  # fmt: skip

        def steps(number: int) -> None:
            t.train_iters = progress.iteration + number
            if train(run, progress) != "finished":
                raise SystemExit("stopped by a signal")

        steps(a.warmup)
        reset_peak(env.device)
        steps(a.steps)
        values, peak = records.last, peak_memory(env.device)
        budget = None
        if a.profile:
            budget = budget_of_step(lambda: steps(3), 3, config, size)
    batches.close()
    return Result(
        model,
        precision(config),
        size.parameters,
        t.global_batch_size * t.seq_length,
        values["iteration_ms"] / 1e3,
        size.training_flops_per_token,
        peak,
        values["lm_loss"],
        budget,
    )


def precision(config: Config) -> str:
    o, dtype = config.optimizer, config.training.dtype
    main = f", {o.main_weights} main weights" if dtype == "bfloat16" else ""
    gradients = "float32" if o.accumulate_allreduce_grads_in_fp32 else dtype
    moments = " and ".join(dict.fromkeys((o.exp_avg_dtype, o.exp_avg_sq_dtype)))
    p = config.parallel
    again = p.recompute_granularity
    if again == "selective":
        again += f" ({', '.join(p.recompute_modules)})"
    return f"{dtype} parameters{main}, {gradients} gradients, {moments} moments" + (
        f", {again} recomputation" if again else ""
    )


def measure_peer(model: str, a: argparse.Namespace, flags: list[str]) -> Result:
    """Hugging Face's model of the same shape, all in the parameters' type, torch's fused AdamW."""
    import transformers

    compiled, name = model.endswith(COMPILED), model.removesuffix(COMPILED)
    alike = configuration(PEERS[name], flags)
    m, t = alike.model, alike.training
    device, dtype = start(alike).device, getattr(torch, t.dtype)
    heads = m.num_attention_heads * (2 if name == "hf_diffllama" else 1)
    kind = transformers.LlamaConfig if name == "hf_llama" else transformers.DiffLlamaConfig
    settings = kind(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=m.kv_channels,
        max_position_embeddings=t.seq_length,
        tie_word_embeddings=not m.untie_embeddings_and_output_weights,
        use_cache=False,
    )
    with device:
        network = transformers.AutoModelForCausalLM.from_config(
            settings, dtype=dtype, attn_implementation="sdpa"
        )
    network.train()
    parameters = sum(p.numel() for p in network.parameters())
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    forward: Callable[..., Any] = torch.compile(network) if compiled else network
    shape = (t.micro_batch_size, t.seq_length)
    tokens = torch.randint(0, m.vocab_size or 0, shape, device=device)
    loss = torch.zeros(())

    def steps(number: int) -> float:
        nonlocal loss
        torch.get_device_module(device).synchronize(device)
        begin = time.perf_counter()
        for _ in range(number):
            loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.get_device_module(device).synchronize(device)
        return (time.perf_counter() - begin) / number

    steps(a.warmup)
    reset_peak(device)
    seconds = steps(a.steps)
    size = model_size(m, t.seq_length)
    return Result(
        model,
        f"{t.dtype} parameters, gradients and moments, sdpa attention",
        parameters,
        tokens.numel(),
        seconds,
        size.training_flops_per_token,
        peak_memory(device),
        loss.item(),
    )


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--profile", action="store_true", help="the budget of a step of ours")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to try the program")
    parser.add_argument("--output", type=Path, help="file that gets a JSON object for each model")
    a, flags = parser.parse_known_args()
    if a.quick:
        a.steps, a.warmup, flags = 2, 1, [*QUICK.split(), *flags]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{where}, torch {torch.__version__}; model FLOPs of a step = 3 x tokens x (2 x weights of "
        "matrix products + (s + 1) x query heads x (d + d_v) x layers), the causal half once",
        flush=True,
    )
    for model in a.models:
        ours = model in OURS
        if not ours and find_spec("transformers") is None:
            print(f"{model:22} needs transformers: pip install 'megadiff[hf]'")
            continue
        torch.compiler.reset()  # what the last model left
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            result = (measure_ours if ours else measure_peer)(model, a, flags)
        except torch.OutOfMemoryError:
            print(f"{model:22} out of memory", flush=True)
            continue
        print(result, flush=True)
        if result.budget is not None:
            print(result.budget, flush=True)
        if a.output is not None:
            with a.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"device": where, "flags": flags, **result.json()}) + "\n")


if __name__ == "__main__":
    main()
