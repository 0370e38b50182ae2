#!/usr/bin/env python3
"""How long training waits for a save, and how fast checkpoints move against the disk's own speed.

The state is that of a model in bfloat16 with float32 main weights and two moments: 14 bytes per
parameter, on one process, filled with random numbers. Prints one JSON object at the end.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megadiff.checkpoint.directory import checkpoint_path, damage
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors
from megadiff.checkpoint.storage import load

WIDTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.3e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark_checkpoint"))
    parser.add_argument("--saves", type=int, default=3)
    arguments = parser.parse_args()
    device, folder = torch.device(arguments.device), arguments.directory
    tensors = state(int(arguments.parameters), device)
    size = sum(piece.data.nbytes for t in tensors.values() for piece in t.pieces)
    result: dict[str, object] = {"device": name_of(device), "bytes": size}
    print(f"{size / 1e9:.2f} GB in {len(tensors)} tensors on {name_of(device)}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    result["disk_write"], result["disk_read"] = disk_speed(folder, min(size, 8 << 30))
    print(
        f"disk: writes {result['disk_write']:.2f} GB/s, reads {result['disk_read']:.2f} GB/s",
        flush=True,
    )

    start = time.perf_counter()
    CheckpointManager(folder, keep_last=1).save(1, tensors, {})
    result["save"] = size / (time.perf_counter() - start) / 1e9
    print(f"save: {result['save']:.2f} GB/s", flush=True)

    with CheckpointManager(folder, keep_last=1, background=True) as manager:
        start = time.perf_counter()
        manager.reserve(tensors)
        result["reserve_seconds"] = time.perf_counter() - start
        step_seconds(device)  # the first is slower
        stalls, writes, steps = [], [], [step_seconds(device)]
        for step in range(2, 2 + arguments.saves):
            stalls.append(manager.save(step, tensors, {}))
            start = time.perf_counter()
            steps.append(step_seconds(device))
            manager.wait()
            writes.append(time.perf_counter() - start)
        result["stall_seconds"], result["background_seconds"] = stalls, writes
        result["step_seconds"] = {"alone": steps[0], "beside a save": steps[1:]}
    print(
        f"in the background: training waits {max(stalls):.3f} s at most (buffers reserved in "
        f"{result['reserve_seconds']:.1f} s), written after {max(writes):.1f} s; a step takes "
        f"{steps[0]:.3f} s alone and {max(steps[1:]):.3f} s beside it",
        flush=True,
    )

    path = checkpoint_path(folder, 1 + arguments.saves)
    forget(path)
    start = time.perf_counter()
    assert damage(path) == []
    result["verify"] = size / (time.perf_counter() - start) / 1e9
    forget(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    load(path, tensors)
    torch.get_device_module(device).synchronize()
    result["load"] = size / (time.perf_counter() - start) / 1e9
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    result["load_more_memory_bytes"] = 1024 * grown
    print(
        f"verify: {result['verify']:.2f} GB/s; load: {result['load']:.2f} GB/s, "
        f"{grown / 1024:.0f} MiB more host memory than ever before"
    )
    shutil.rmtree(folder)
    print(json.dumps(result))


def state(parameters: int, device: torch.device) -> Tensors:
    """Matrices of up to 4 * WIDTH rows, each as weight, main weight and moments."""
    tensors: Tensors = {}
    rows = parameters // WIDTH
    for number, first in enumerate(range(0, rows, 4 * WIDTH)):
        shape = (min(4 * WIDTH, rows - first), WIDTH)
        name = f"layers.{number}.weight"
        for prefix, dtype in [
            ("", torch.bfloat16),
            ("optimizer.main_weight.", torch.float32),
            ("optimizer.exp_avg.", torch.float32),
            ("optimizer.exp_avg_sq.", torch.float32),
        ]:
            data = torch.rand(shape, device=device).to(dtype)
            tensors[prefix + name] = ShardedTensor(shape, dtype, [Piece((0, 0), data)])
    return tensors


def step_seconds(device: torch.device) -> float:
    """Seconds of some fixed work on the device, started from Python as a training step is."""
    a = torch.rand(1024, 1024, device=device)
    start = time.perf_counter()
    for _ in range(2000 if device.type == "cuda" else 5):
        a = (a @ a).tanh()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def disk_speed(folder: Path, size: int) -> tuple[float, float]:
    """GB/s of plain writing (until it is on disk) and of plain reading (not from memory)."""
    path, block = folder / "plain", memoryview(os.urandom(8 << 20))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    write = time.perf_counter() - start
    forget(folder)
    target = bytearray(len(block))
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(target):
            pass
    read = time.perf_counter() - start
    path.unlink()
    return size / write / 1e9, size / read / 1e9


def forget(folder: Path) -> None:
    """Let the system drop what it keeps of these files in memory."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
