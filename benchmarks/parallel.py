#!/usr/bin/env python3
"""Training speed and peak memory of splits over GPUs of one host, against one GPU in the same run.

    source launch/environment.sh
    python benchmarks/parallel.py --output runs/parallel.json
    python benchmarks/parallel.py --quick            # a tiny model on CPU processes, seconds

Every row trains the same model on random tokens with the engine that training uses: forward,
backward, gradient reduction and the optimizer's step. Rates are tokens/s of each GPU over those of
the row's baseline; a bar that is missed is marked. Beside the measured peak stands the estimate
from the configuration alone. Rows of one GPU that follow one another run at the same time. A row
that fails or hangs costs its own result only; what is measured is written at once.
"""

import argparse
import json
import multiprocessing
import os
import queue
import re
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.step_budget import CLASSES
from megadiff.config import load_config, validate
from megadiff.data.loader import MicroBatch
from megadiff.models.memory import estimate_memory
from megadiff.parallel.failure import let_others_end
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
    steps: tuple[int, int] = (4, 6)  # before the clock starts, and measured
    environment: str = ""
    config: str = "configs/1.4B/diff_v2.yaml"
    profiled: bool = False


BATCH = "--seq-length 4096 --global-batch-size 16"
LONG = "--seq-length 32768 --global-batch-size 2 --micro-batch-size 1"
LARGE = "--seq-length 65536 --global-batch-size 1 --micro-batch-size 1 --recompute-granularity full"
TP = f"{BATCH} --micro-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel"
BATCH_64 = "--seq-length 4096 --global-batch-size 64 --micro-batch-size 4"
TWO_STAGES = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout balanced"
SHARDED = "--use-distributed-optimizer"
LARGE_CONFIG = "configs/6.8B/diff_v2.yaml"
# With one queue to the device kernels start in the order they were issued; several, where NCCL's
# have priority, let a message start as soon as it can.
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS=8 TORCH_NCCL_HIGH_PRIORITY=1"
ROWS = [
    Row("one", 1, f"{BATCH} --micro-batch-size 4", profiled=True),
    Row("one_64", 1, BATCH_64, steps=(2, 4)),
    # half a layer leaves room for twice the micro-batch
    Row("tp2_sp", 2, f"{TP} --tp-comm-overlap", "one", 0.88, profiled=True),
    Row("tp2_sp_nccl", 2, TP, "one", 0.88, profiled=True),
    Row("pp2_1f1b", 2, f"{BATCH_64} {TWO_STAGES}", "one_64", 0.90, steps=(2, 4), profiled=True),
    Row("pp2_interleaved", 2, f"{BATCH_64} {TWO_STAGES} --num-virtual-stages-per-pipeline-rank 2",
        "one_64", 0.90, steps=(2, 4), environment=QUEUES),
    Row("dp2_twice_the_batch", 2, "--seq-length 4096 --global-batch-size 32 --micro-batch-size 4 "
        f"{SHARDED}", "one", 0.97, steps=(2, 4)),
    Row("one_32k", 1, LONG, steps=(2, 4)),
    Row("cp2_32k", 2, f"{LONG} --context-parallel-size 2", "one_32k", 0.85, steps=(2, 4)),
    # trains on two GPUs, and must not fit on one
    Row("6.8B_64k_cp2", 2, f"{LARGE} --context-parallel-size 2 {SHARDED}", steps=(1, 1),
        config=LARGE_CONFIG),
    Row("6.8B_64k_one", 1, LARGE, steps=(1, 1), config=LARGE_CONFIG),
    # the pipeline with one sequence at a time
    Row("pp2_small", 2, f"{BATCH} --micro-batch-size 1 {TWO_STAGES}", "one"),
]  # fmt: skip

QUICK = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 512 --seq-length 64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--row", nargs=4, action="append", default=[], metavar=("NAME", "GPUS", "CONFIG", "FLAGS"),
        help="a row instead of the known ones; a row of one GPU is the baseline of what follows",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="of every row")
    parser.add_argument("--rows", nargs="+", default=None, help="names of rows; all that fit here")
    parser.add_argument("--row-seconds", type=float, default=150, help="after these a row is lost")
    parser.add_argument("--quick", action="store_true", help="a tiny model on CPU processes")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    choice = list(given_rows(args.row)) or ROWS
    here = max(row.gpus for row in choice) if args.quick else torch.cuda.device_count()
    known = {row.name for row in choice}
    if unknown := set(args.rows or []) - known:
        parser.error(f"unknown rows {sorted(unknown)}; there are {', '.join(sorted(known))}")
    rows = [row for row in choice if row.gpus <= here and row.name in (args.rows or known)]
    if args.profile:
        rows = [replace(row, profiled=True) for row in rows]
    if args.quick:
        rows = [replace(row, steps=(1, 2)) for row in rows]
    results: dict[str, dict[str, Any]] = {}
    device = "cpu" if args.quick else torch.cuda.get_device_name()
    print(f"{here} x {device}, torch {torch.__version__}")
    print(
        f"{'row':20} {'tokens/s/GPU':>12} {'of one':>7} {'bar':>5} {'peak GB':>8} {'estimate':>8}"
    )
    rounds = list(together(rows, here))
    coming = [Workers(row, gpu, args) for row, gpu in rounds[0]] if rounds else []
    for number in range(len(rounds)):
        running = coming
        for workers in running:
            workers.go.set()
        following = rounds[number + 1] if number + 1 < len(rounds) else []
        coming = [Workers(row, gpu, args) for row, gpu in following]  # they import meanwhile
        for workers in running:
            row, result = workers.row, workers.result(args.row_seconds)
            results[row.name] = result
            print(line(row, result, results.get(row.baseline or ""), args.quick), flush=True)
            for told in result.get("profiles", {}).values():
                print(f"    {told['rank']}: {told['summary']}", flush=True)
            if args.output:
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps({"device": device, "rows": results}, indent=1))


def given_rows(given: list[list[str]]) -> Iterator[Row]:
    baseline = None
    for name, gpus, config, flags in given:
        yield Row(name, int(gpus), flags, baseline if int(gpus) > 1 else None, config=config)
        baseline = name if int(gpus) == 1 else baseline


def together(rows: list[Row], gpus: int) -> Iterator[list[tuple[Row, int]]]:
    """Rounds of rows that run at the same time, each with its first GPU."""
    waiting: list[tuple[Row, int]] = []
    for row in rows:
        if waiting and (row.gpus > 1 or len(waiting) == gpus):
            yield waiting
            waiting = []
        waiting.append((row, len(waiting)))
        if row.gpus > 1:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def line(row: Row, result: dict[str, Any], baseline: dict[str, Any] | None, quick: bool) -> str:
    if "error" in result:
        return f"{row.name:20} {result['error']}"
    share, verdict = "", ""
    if baseline and "rate" in baseline:
        result["of_baseline"] = result["rate"] / baseline["rate"]
        share = f"{result['of_baseline']:.3f}"
        verdict = "" if quick or result["of_baseline"] >= row.bar else "  missed"
    bar = f"{row.bar:.2f}" if row.bar else ""
    return (
        f"{row.name:20} {result['rate']:12.0f} {share:>7} {bar:>5} "
        f"{result['peak'] / 1e9:8.2f} {result['estimate'] / 1e9:8.2f}{verdict}"
    )


def flags_of(row: Row, args: argparse.Namespace) -> list[str]:
    flags = [*row.flags.split(), "--train-iters", "100000"]
    if args.quick:  # the split of the row, with the sizes of a toy
        flags = [flag for flag in flags if flag != "--tp-comm-overlap"]  # which needs GPUs
        return [*flags, *QUICK.split(), "--device", "cpu"]
    return ["--config", row.config, *flags, "--bf16"]


class Workers:
    """The processes of a row, which import at once and wait for `go`."""

    def __init__(self, row: Row, first_gpu: int, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.row, self.go, self.results = row, context.Event(), context.Queue()
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        job = (row, first_gpu, flags_of(row, args), port, self.go, self.results)
        self.processes = [
            context.Process(target=work, args=(rank, *job), daemon=True) for rank in range(row.gpus)
        ]
        for process in self.processes:
            process.start()

    def result(self, seconds: float) -> dict[str, Any]:
        """The slowest rank's rate and the fullest rank's peak, or the first error."""
        end, reports = time.monotonic() + seconds, []
        while len(reports) < self.row.gpus and not any("error" in report for report in reports):
            try:
                reports.append(self.results.get(timeout=1))
            except queue.Empty:
                lost = [p.exitcode for p in self.processes if p.exitcode]
                if lost and self.results.empty():
                    reports.append({"error": f"a rank ended with code {lost[0]}"})
                elif time.monotonic() > end:
                    reports.append({"error": f"no result after {seconds:.0f} s"})
        failed = [report for report in reports if "error" in report]
        for process in self.processes:
            process.join(0 if failed else 10)
            process.kill()
            process.join()
        if failed:
            return failed[0]
        slowest = max(report["seconds"] for report in reports)
        return {
            "rate": reports[0]["tokens"] / slowest / self.row.gpus,
            "seconds": slowest,
            "times": {report["rank"]: report["times"] for report in reports},
            "peak": max(report["peak"] for report in reports),
            "peaks": {report["rank"]: report["peak"] for report in reports},
            "estimate": reports[0]["estimate"],
            "estimates": reports[0]["estimates"],
            "started": max(report["started"] for report in reports),
            "profiles": {
                report["rank"]: {"rank": f"rank {report['rank']}", **report["profile"]}
                for report in sorted(reports, key=lambda report: report["rank"])
                if report["profile"]
            },
        }


def launcher_variables(rank: int, gpus: int, first_gpu: int) -> dict[str, str]:
    """What torchrun would tell a rank of a row, were the rows before it on this host its own."""
    local, of = first_gpu + rank, first_gpu + gpus
    places = {"RANK": rank, "WORLD_SIZE": gpus, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of}
    return {name: str(place) for name, place in places.items()}


def work(
    rank: int, row: Row, first_gpu: int, flags: list[str], port: int, go: Any, out: Any
) -> None:
    os.environ.update(launcher_variables(rank, row.gpus, first_gpu))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.update(pair.split("=") for pair in row.environment.split())
    torch.set_num_threads(1)
    go.wait()
    try:
        out.put({"rank": rank, **train(row, flags)})
    except torch.OutOfMemoryError as error:
        out.put({"error": f"does not fit: {str(error).splitlines()[0]}"})
    except BaseException:
        out.put({"error": f"rank {rank}: {traceback.format_exc()}"})
    out.close()
    out.join_thread()
    os._exit(0)  # without a farewell among ranks, of which one may have failed


def train(row: Row, flags: list[str]) -> dict[str, Any]:
    begin = time.perf_counter()
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
        torch.get_device_module(env.device).synchronize()

    before, measured = row.steps
    for _ in range(before):  # compilation, communicators, the allocator
        step()
    started = time.perf_counter() - begin
    times = []
    for _ in range(measured):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    let_others_end()  # a profile takes each rank its own time
    peak = peak_memory(env.device)
    estimates = [memory.total for memory in estimate_memory(config, row.gpus)]
    return {
        "seconds": statistics.median(times),
        "times": times,
        "started": started,
        "tokens": tokens,
        "peak": peak,
        "estimate": max(estimates),
        "estimates": estimates,  # of each pipeline stage
        "profile": profile(step, env.device) if row.profiled else {},
    }


KINDS = {
    "messages": r"nccl|memcpy (dtod|ptop)",
    "optimizer": CLASSES["optimizer"],
    "attention": CLASSES["attention"],
    "products": CLASSES["matrix products"],
    "copies": r"memcpy|memset|copy|cat",
}


def kind_of(kernel: str) -> str:
    return next((k for k, r in KINDS.items() if re.search(r, kernel, re.IGNORECASE)), "other")


def profile(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """One step's milliseconds on the device by kind, and of messages those that nothing hides."""
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        step()
    kernels = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device == cuda and event.duration_ns() > 0:
            begin = event.start_ns()
            kernels.append((begin, begin + event.duration_ns(), event.name()))
    if not kernels:
        return {"summary": "no kernels were recorded"}
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    compute = []
    for begin, end, name in kernels:
        kind = kind_of(name)
        kinds[kind] = kinds.get(kind, 0.0) + (end - begin) / 1e6
        if kind != "messages":
            compute.append((begin, end, name))
        names[name[:100]] = names.get(name[:100], 0.0) + (end - begin) / 1e6
    window = (max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)) / 1e6
    kinds["messages alone"] = covered(kernels) - covered(compute)
    kinds["idle"] = window - covered(kernels)
    told = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items())
    largest = sorted(names.items(), key=lambda item: -item[1])[:40]
    return {"summary": f"{window:.1f} ms: {told}", "kinds": kinds, "kernels": dict(largest)}


def covered(kernels: list[tuple[int, int, str]]) -> float:
    """Milliseconds in which at least one of `kernels` runs."""
    total, until = 0, 0
    for begin, end, _ in sorted(kernels):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total / 1e6


if __name__ == "__main__":
    main()
