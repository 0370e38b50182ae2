#!/usr/bin/env python3
"""Time and memory of the operators that mix tokens, forward and backward, by sequence length.

    python benchmarks/token_mixing.py --lengths 4096 16384 65536

All have the same heads and width: the delta rule, plain and gated, as it runs on this device and in
torch; differential attention, whose heads have two branches; standard attention. A line for each
measurement goes to the terminal, and as JSON to --output.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels import attention, delta_rule, diff_attention
from megadiff.kernels.delta_rule_chunks import chunk_delta_rule

Operator = Callable[..., Any]


def operators(
    batch: int, length: int, heads: int, width: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Operator, list[Tensor]]]:
    """Operators by name, each with inputs that need a gradient."""

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    per_head = (batch, length, heads)
    q, k, v = (normal(*per_head, width) for _ in range(3))
    queries = normal(batch, length, 2 * heads, width)
    lam = normal(*per_head, dtype=torch.float32).sigmoid()
    unit_q, unit_k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = normal(*per_head, dtype=torch.float32).sigmoid()
    g = F.logsigmoid(normal(*per_head, dtype=torch.float32) + 3)

    def torch_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Any:
        return chunk_delta_rule(q, k, v, beta, None, width**-0.5, None, None, False)

    return {
        "delta_rule": (delta_rule, [unit_q, unit_k, v, beta]),
        "gated_delta_rule": (delta_rule, [unit_q, unit_k, v, beta, g]),
        "delta_rule_torch": (torch_delta_rule, [unit_q, unit_k, v, beta]),
        "diff_attention": (diff_attention, [queries, k, v, lam]),
        "attention": (attention, [q, k, v]),
    }


def measure(operator: Operator, inputs: list[Tensor], repeat: int) -> tuple[float, float]:
    """Median seconds of forward and backward, and the peak of memory in GiB (of a GPU)."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    device = inputs[0].device
    synchronize = partial(torch.get_device_module(device).synchronize, device)

    def once() -> float:
        for x in inputs:
            x.grad = None
        synchronize()
        begin = time.perf_counter()
        result = operator(*inputs)
        out = result[0] if isinstance(result, tuple) else result
        out.backward(torch.ones_like(out))
        synchronize()
        return time.perf_counter() - begin

    once()  # compiles and tunes
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(once() for _ in range(repeat))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--tokens", type=int, default=65536, help="of a batch, at least a sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", help="names of operators")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--output", help="file that gets a JSON object for each measurement")
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which kernels run, and why
    for length in a.lengths:
        batch = max(1, a.tokens // length)
        made = operators(batch, length, a.heads, a.width, getattr(torch, a.dtype), a.device)
        for name, (operator, inputs) in made.items():
            if a.only and name not in a.only:
                continue
            try:
                seconds, peak = measure(operator, inputs, a.repeat)
            except torch.OutOfMemoryError:
                print(f"{name:18} {batch:4} x {length:6}: out of memory")
                continue
            rate = batch * length / seconds
            print(
                f"{name:18} {batch:4} x {length:6}: {1e3 * seconds:9.3f} ms {rate:12,.0f} tokens/s"
                f" {peak:7.2f} GiB",
                flush=True,
            )
            row = {"operator": name, "batch": batch, "length": length, "seconds": seconds}
            row |= {"tokens_per_second": rate, "peak_gib": peak}
            row |= {key: value for key, value in vars(a).items() if key != "output"}
            if a.output is not None:
                with Path(a.output).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
