#!/usr/bin/env python3
"""Training speed and peak memory of splits over GPUs of one host, against one GPU in the same run.

    python benchmarks/parallel.py --output runs/parallel.json --profile runs/parallel
    python benchmarks/parallel.py --quick            # a tiny model on CPU processes, seconds

Every row trains the same model on random tokens with the engine that training uses: forward,
backward, gradient reduction and the optimizer's step. Rates are tokens/s of each GPU over those of
the row's baseline; a bar that is missed is marked. Beside the measured peak stands the estimate
from the configuration alone.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megadiff.config import load_config, validate
from megadiff.data.loader import MicroBatch
from megadiff.models.memory import estimate_memory
from megadiff.training.engine import NativeEngine
from megadiff.training.metrics import peak_memory
from megadiff.training.setup import start


@dataclass(frozen=True)
class Row:
    """`flags` of one run; `baseline` names the row of one GPU that it is compared with."""

    name: str
    gpus: int
    flags: str
    baseline: str | None = None
    bar: float = 0.0  # share of the baseline's rate per GPU


BATCH = "--seq-length 4096 --global-batch-size 16"
LONG = "--seq-length 32768 --global-batch-size 2 --micro-batch-size 1"
SHARDED = "--use-distributed-optimizer"
ROWS = [
    Row("one", 1, f"{BATCH} --micro-batch-size 4"),
    Row("tp2_sp", 2, f"{BATCH} --micro-batch-size 4 --tensor-model-parallel-size 2 "
        "--sequence-parallel", "one", 0.88),
    Row("pp2_16_micro_batches", 2, f"{BATCH} --micro-batch-size 1 "
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout balanced", "one", 0.90),
    Row("pp2_interleaved", 2, f"{BATCH} --micro-batch-size 1 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout balanced",
        "one", 0.90),
    Row("dp2_twice_the_batch", 2, "--seq-length 4096 --global-batch-size 32 --micro-batch-size 4 "
        f"{SHARDED}", "one", 0.97),
    Row("one_32k", 1, LONG),
    Row("cp2_32k", 2, f"{LONG} --context-parallel-size 2", "one_32k", 0.85),
]  # fmt: skip

# The 6.8B model at 64K tokens: with these it trains on two GPUs, and on one it must not fit.
LARGE = "--seq-length 65536 --global-batch-size 1 --micro-batch-size 1 --recompute-granularity full"
LARGE_ROWS = [
    Row("6.8B_64k_cp2", 2, f"{LARGE} --context-parallel-size 2 {SHARDED}"),
    Row("6.8B_64k_one", 1, LARGE),
]

QUICK = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 128 "
    "--global-batch-size 4 --micro-batch-size 1"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/1.4B/diff_v2.yaml")
    parser.add_argument("--large-config", default="configs/6.8B/diff_v2.yaml")
    parser.add_argument("--rows", nargs="+", default=None, help="names of rows; all that fit here")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a tiny model on CPU processes")
    parser.add_argument("--profile", type=Path, help="folder for a profile of each row")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    here = 2 if args.quick else torch.cuda.device_count()
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'row':24} {'tokens/s/GPU':>12} {'of one':>7} {'bar':>5} {'peak GB':>8} {'estimate':>8}"
    )
    for row in [*ROWS, *([] if args.quick else LARGE_ROWS)]:
        if (args.rows and row.name not in args.rows) or row.gpus > here:
            continue
        result = results[row.name] = measure(row, args)
        print(line(row, result, results.get(row.baseline or ""), args.quick), flush=True)
    if args.output:
        device = "cpu" if args.quick else torch.cuda.get_device_name()
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"device": device, "rows": results}, indent=1))


def line(row: Row, result: dict[str, Any], baseline: dict[str, Any] | None, quick: bool) -> str:
    if "error" in result:
        return f"{row.name:24} {result['error']}"
    share, verdict = "", ""
    if baseline and "rate" in baseline:
        result["of_baseline"] = result["rate"] / baseline["rate"]
        share = f"{result['of_baseline']:.3f}"
        verdict = "" if quick or result["of_baseline"] >= row.bar else "  missed"
    bar = f"{row.bar:.2f}" if row.bar else ""
    return (
        f"{row.name:24} {result['rate']:12.0f} {share:>7} {bar:>5} "
        f"{result['peak'] / 1e9:8.2f} {result['estimate'] / 1e9:8.2f}{verdict}"
    )


def flags_of(row: Row, args: argparse.Namespace) -> list[str]:
    flags = [*row.flags.split(), "--train-iters", "100000"]
    if args.quick:  # the split of the row, with the sizes of a toy
        return [*flags, *QUICK.split(), "--device", "cpu"]
    large = row in LARGE_ROWS
    return ["--config", args.large_config if large else args.config, *flags, "--bf16"]


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Run a row on processes of its own; the slowest rank's rate and the fullest rank's peak."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = (row, flags_of(row, args), args.steps, args.profile, port, results)
    workers = [context.Process(target=work, args=(rank, *job)) for rank in range(row.gpus)]
    for worker in workers:
        worker.start()
    reports = [results.get()]
    if "error" not in reports[0]:
        reports += [results.get() for _ in range(row.gpus - 1)]
    for worker in workers:
        worker.join(10)
        worker.kill()
    failed = [report for report in reports if "error" in report]
    if failed:
        return failed[0]
    seconds = max(report["seconds"] for report in reports)
    return {
        "rate": reports[0]["tokens"] / seconds / row.gpus,
        "seconds": seconds,
        "peak": max(report["peak"] for report in reports),
        "peaks": {report["rank"]: report["peak"] for report in reports},
        "estimate": reports[0]["estimate"],
    }


def work(
    rank: int, row: Row, flags: list[str], steps: int, profile: Path | None, port: int, out: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.gpus))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    try:
        out.put({"rank": rank, **train(row, flags, steps, profile)})
    except torch.OutOfMemoryError:
        out.put({"error": "does not fit: out of memory"})
    except BaseException:
        out.put({"error": f"rank {rank}: {traceback.format_exc()}"})


def train(row: Row, flags: list[str], steps: int, profile: Path | None) -> dict[str, Any]:
    config = load_config(flags)
    validate(config, row.gpus)
    env = start(config)
    engine = NativeEngine(config, env)
    t = config.training
    assert t.global_batch_size is not None and config.model.vocab_size is not None
    generator = torch.Generator().manual_seed(env.mesh.dp.rank)
    batches = []
    for _ in range(t.global_batch_size // env.mesh.dp.size // t.micro_batch_size):
        shape = (t.micro_batch_size, t.seq_length + 1)
        text = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        positions = torch.arange(t.seq_length).expand(t.micro_batch_size, -1)
        batches.append(
            MicroBatch(text[:, :-1], text[:, 1:], torch.ones(positions.shape), positions)
        )
    tokens = t.global_batch_size * t.seq_length

    def step() -> None:
        engine.forward_backward(batches, tokens)
        engine.step(1e-4, 0.1)
        if env.device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for number in range(3 + steps):
        begin = time.perf_counter()
        step()
        if number >= 3:  # compilation, communicators, the allocator
            times.append(time.perf_counter() - begin)
    peak = peak_memory(env.device)
    if profile is not None:
        _profile(step, profile / f"{row.name}_rank{env.mesh.rank}.txt", env.device)
    estimate = estimate_memory(config, row.gpus)
    return {
        "seconds": statistics.median(times),
        "tokens": tokens,
        "peak": peak,
        "estimate": max(memory.total for memory in estimate),
    }


def _profile(step: Any, path: Path, device: torch.device) -> None:
    """Where the time of a step goes, by operation, as text."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
    by = "cuda_time_total" if device.type == "cuda" else "cpu_time_total"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profiler.key_averages().table(sort_by=by, row_limit=40))


if __name__ == "__main__":
    main()
