#!/usr/bin/env python3
"""The optimizer's share of a training step, and the bytes that it keeps for a parameter.

    python benchmarks/optimizer.py --hidden-size 2048 --num-layers 12

One process trains a decoder on random tokens with each way to update; forward and backward are
timed apart from the step. A line for each goes to the terminal, and as JSON to --output. With
--data-parallel-size N the process is one rank of N whose messages go nowhere, with the sharded
optimizer: this shows its memory, and the time of its own work.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megadiff.config import ModelConfig, OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.apex import NOT_INSTALLED, find_apex_adam
from megadiff.parallel.parameter import initialize

WAYS: dict[str, dict[str, Any]] = {
    "adam": {"adam_kernel": "torch"},
    "adam_one_pass": {},
    "adam_bf16_gradients": {"accumulate_allreduce_grads_in_fp32": False},
    "adam_kahan": {"main_weights": "kahan"},
    "adam_stochastic": {"main_weights": "stochastic"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "adam_apex": {"adam_kernel": "apex"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.data_parallel_size > 1:
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=args.data_parallel_size)
    for way in args.ways:
        if way == "adam_apex" and find_apex_adam() is None:
            print(f"adam_apex: {NOT_INSTALLED}")
            continue
        sharded = {"use_distributed_optimizer": args.data_parallel_size > 1}
        result = {"way": way, **measure(args, OptimizerConfig(**WAYS[way], **sharded))}
        print(
            f"{way}: {result['parameters'] / 1e6:.1f} M parameters | forward and backward "
            f"{result['backward_ms']:.2f} ms | step {result['step_ms']:.2f} ms, "
            f"{100 * result['share']:.1f} % of both | {result['bytes_per_parameter']:.2f} bytes "
            f"a parameter, {result['allocated_bytes_per_parameter']:.2f} allocated | "
            f"{result['step_ns_per_parameter']:.4f} ns a parameter",
            flush=True,
        )
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                told = {key: value for key, value in vars(args).items() if key != "output"}
                file.write(json.dumps({**told, **result}) + "\n")


def measure(args: argparse.Namespace, config: OptimizerConfig) -> dict[str, float]:
    """Medians over the steps; the first three are warm-up."""
    device = torch.device(args.device)
    before = allocated(device)
    model_config = ModelConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=args.vocab_size,
        token_mixer="diff_v2",
    )
    model = Decoder(model_config, dtype=getattr(torch, args.dtype), device=device)
    initialize(model, 1)
    group = dist.group.WORLD if args.data_parallel_size > 1 else None
    optimizer = Optimizer(model, config, data_parallel_group=group)
    shape = (args.micro_batch_size, args.seq_length + 1)
    tokens = torch.randint(0, args.vocab_size, shape, device=device)
    positions = torch.arange(args.seq_length, device=device).expand(args.micro_batch_size, -1)

    def backward() -> None:
        optimizer.zero_grad(args.micro_batches)
        for _ in range(args.micro_batches):
            losses = model(tokens[:, :-1], positions, tokens[:, 1:])
            optimizer.scale_loss(losses.mean() / args.micro_batches).backward()

    times = [
        (timed(backward, device), timed(lambda: optimizer.step(1e-4), device))
        for _ in range(args.steps + 3)
    ][3:]
    backward_ms, step_ms = (statistics.median(column) for column in zip(*times, strict=True))
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "backward_ms": backward_ms,
        "step_ms": step_ms,
        "share": step_ms / (step_ms + backward_ms),
        "bytes_per_parameter": kept_bytes(optimizer) / parameters,
        "allocated_bytes_per_parameter": (allocated(device) - before) / parameters,
        "step_ns_per_parameter": step_ms * 1e6 / parameters,
    }


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that `function` takes, its work on the device included."""
    synchronize = partial(torch.get_device_module(device).synchronize, device)
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated on a GPU, garbage collected; 0 elsewhere."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def kept_bytes(optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state between two steps."""
    total = 0
    for shard in optimizer.shards:
        tensors = [shard.bucket.parameters, shard.bucket.gradients, *shard.main.state().values()]
        tensors += [tensor for r in shard.ranges for tensor in r.state.values()]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


if __name__ == "__main__":
    main()
