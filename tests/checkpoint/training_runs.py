"""Small real trainings that a test starts, disturbs and starts again."""

import json
import multiprocessing as mp
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.data.indexed_dataset import IndexedDatasetBuilder

SIZES = shlex.split(
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--vocab-size 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --split 90,10,0 "
    "--eval-interval 0 --eval-iters 0 --num-workers 0 --log-interval 1"
)


def write_text(prefix: Path) -> None:
    """A dataset of 80 short documents that a model can learn something from."""
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(prefix), np.dtype(np.uint16)) as builder:
        for _ in range(80):
            first, step = generator.integers(0, 61, 2)
            builder.add_document(((first + step * np.arange(40)) % 61).astype(np.uint16))


def arguments(text: Path, log: Path, steps: int, *flags: str) -> list[str]:
    """The command line of a training of `steps` steps that logs to `log`."""
    files = ["--data-path", str(text), "--log-dir", str(log), "--train-iters", str(steps)]
    return [*SIZES, *files, *flags]


def losses(log: Path) -> dict[int, set[float]]:
    """All losses that were logged for each iteration, by whatever attempt."""
    found: dict[int, set[float]] = {}
    path = log / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if entry["kind"] == "train":
            found.setdefault(entry["iteration"], set()).add(entry["lm_loss"])
    return found


class Training:
    """A training on `world` processes, forked from a server that has imported torch already."""

    def __init__(self, world: int, argv: list[str], output: Path):
        context = mp.get_context("forkserver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.output = output
        self.workers = [
            context.Process(target=_work, args=(rank, world, port, argv, str(output)))
            for rank in range(world)
        ]
        for worker in self.workers:
            worker.start()

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120) -> None:
        """Until `condition()`. Raises AssertionError when the training ends or time is over."""
        deadline = time.monotonic() + seconds
        while not condition():
            alive = all(worker.is_alive() for worker in self.workers)
            assert alive and time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.002)

    def kill(self, *ranks: int) -> None:
        """SIGKILL these ranks, then wait for the others, who must notice by themselves."""
        for rank in ranks:
            self.workers[rank].kill()
        codes = self.join()
        assert all(code != 0 for code in codes), codes

    def join(self, seconds: float = 120) -> list[int | None]:
        """Exit codes of all ranks. Raises AssertionError when one hangs."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.join(max(deadline - time.monotonic(), 0))
        hanging = [rank for rank, worker in enumerate(self.workers) if worker.is_alive()]
        self.close()
        assert not hanging, f"ranks {hanging} hang\n{self.output.read_text()[-4000:]}"
        return [worker.exitcode for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _work(rank: int, world: int, port: int, argv: list[str], output: str) -> None:
    with Path(output).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    from megadiff.training.errors import run
    from megadiff.training.pretrain import main

    run(main, argv)
