#!/usr/bin/env python3
"""Time of a preset's blocks, forward and backward, with linear layers in bfloat16 and in float8.

    python benchmarks/float8.py --presets 2.8B 6.8B 13.1B

Two blocks of each preset, DIFF V2, without embedding and output; medians. A line for each preset
goes to the terminal, and as JSON to --output.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megadiff.config import load_config
from megadiff.models.decoder import Decoder, Stage
from megadiff.parallel.float8 import use_float8

PRESETS = ["125M", "830M", "1.4B", "2.8B", "3B-1T", "6.8B", "13.1B"]
LAYERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS[::-1])
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape = (args.micro_batch_size, args.seq_length)
    for preset in args.presets:
        torch.compiler.reset()  # compiled variants of one function are limited in number
        times = {
            kind: block_ms(preset, shape, args.steps, kind, args.device) for kind in ("bf16", "fp8")
        }
        result = {"preset": preset, "shape": shape, "device": args.device}
        result |= {f"{kind}_ms": ms for kind, ms in times.items()}
        print(
            f"{preset}: {shape[0]} x {shape[1]} tokens | a block, forward and backward: bf16 "
            f"{times['bf16']:.2f} ms, fp8 {times['fp8']:.2f} ms | "
            f"{times['bf16'] / times['fp8']:.3f} times as fast",
            flush=True,
        )
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


def block_ms(preset: str, shape: tuple[int, int], steps: int, kind: str, device: str) -> float:
    """Median milliseconds of one block, forward and backward; the first of four runs warms up."""
    folder = Path(__file__).resolve().parents[1] / "configs"
    config = load_config(["--config", str(folder / preset / "diff_v2.yaml")]).model
    config.vocab_size = 256
    stage = Stage(range(1, 1 + LAYERS), first=False, last=False)
    model = Decoder(config, stage=stage, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if kind == "fp8":
        use_float8(model, emulate=device == "cpu")
    positions = torch.arange(shape[1], device=device).expand(shape)

    def normal() -> Tensor:
        return torch.randn(*shape, config.hidden_size, device=device, dtype=torch.bfloat16)

    x, grad, times = normal().requires_grad_(), normal(), []
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = None
            model(x, positions).backward(grad)
        torch.get_device_module(device).synchronize()
        times.append(1000 * (time.perf_counter() - begin) / steps / LAYERS)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
