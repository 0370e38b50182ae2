#!/usr/bin/env python3
"""What a training step waits for its data: a real step on a GPU, a clock elsewhere.

    python benchmarks/data_loading.py --output runs/data_loading.json
    python benchmarks/data_loading.py --clock 500000     # a step is a pause of this many tokens/s

Writes a dataset of random tokens in documents as long as those of the web, and trains a small model
on it as a run does, with documents kept apart: positions, loss masks and `cu_seqlens` are made for
every micro-batch. Rounds with the loader take turns with rounds on micro-batches that are in memory
already; what a step takes longer, its threads' work beside the launches included, is its stall. The
wait of the loop in the loader is given too. Flags that are not listed are those of
`pretrain_diff.py`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from megadiff.config import load_config, validate
from megadiff.data.indexed_dataset import publish
from megadiff.data.loader import MicroBatch
from megadiff.parallel.mesh import Axis
from megadiff.training.data import Batches, build_data
from megadiff.training.engine import NativeEngine
from megadiff.training.loop import unmasked
from megadiff.training.setup import start

VOCABULARY = 50304
MODEL = (
    "--token-mixer diff_v2 --num-layers 2 --hidden-size 768 --num-attention-heads 12 "
    f"--num-query-groups 4 --vocab-size {VOCABULARY} --seq-length 4096 --micro-batch-size 8 "
    "--global-batch-size 16 --train-iters 100000 --eval-iters 0 --reset-position-ids "
    "--reset-attention-mask --lr 1e-4"
)

Step = Callable[[list[MicroBatch]], None]


def write_dataset(prefix: str, tokens: int) -> None:
    """Random tokens in documents of log-normal length: median 500, mean 1000 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(500), 1.18, size=tokens // 900).astype(np.int32) + 1
    part = Path(f"{prefix}.bin.part")
    rng.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.uint16).tofile(part)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    publish(prefix, part, np.dtype(np.uint16), lengths, documents)


def rounds(
    data: Batches, size: int, step: Step, wait_for_device: Callable[[], None], a: argparse.Namespace
) -> dict[str, Any]:
    """Alternate rounds with and without the loader; prints and returns what was measured."""
    seq_length, consumed = data.seq_length, 0
    loop_waits: list[float] = []  # seconds of each step
    seconds: dict[str, list[float]] = {"loader": [], "memory": []}  # of a step, by round

    def load() -> list[MicroBatch]:
        nonlocal consumed
        began = time.perf_counter()
        batches = data.step(consumed, size)
        loop_waits.append(time.perf_counter() - began)
        consumed += size
        return batches

    def timed(batches: Callable[[int], list[MicroBatch]]) -> float:
        step(batches(0))  # the first one found its batches made ahead
        wait_for_device()
        began = time.perf_counter()
        for number in range(1, a.steps + 1):
            step(batches(number))
        wait_for_device()
        return (time.perf_counter() - began) / a.steps

    ready = [load() for _ in range(a.steps + 1)]
    for batches in ready[: a.warmup]:
        step(batches)
    loop_waits.clear()
    result: dict[str, Any] = {"tokens_per_step": size * seq_length}
    for number in range(a.rounds):
        first = ("loader", "memory") if number % 2 else ("memory", "loader")
        for kind in first:
            take = ready.__getitem__ if kind == "memory" else (lambda _: load())
            seconds[kind].append(timed(take))
        pairs = zip(seconds["loader"], seconds["memory"], strict=True)
        step_seconds = statistics.median(seconds["loader"])
        result |= {
            "rounds": number + 1,
            "tokens_per_second": size * seq_length / step_seconds,
            "stall_percent": 100 * statistics.median(b / m - 1 for b, m in pairs),
            "wait_percent": 100 * statistics.mean(loop_waits) / step_seconds,
            "wait_ms_median": 1e3 * statistics.median(loop_waits),
            "wait_ms_worst": 1e3 * max(loop_waits),
            "seconds": seconds,
        }
        print(
            f"{number + 1} rounds of {a.steps} steps: {result['tokens_per_second']:,.0f} tokens/s, "
            f"stall {result['stall_percent']:.2f} % of a step; the loop waited "
            f"{result['wait_percent']:.2f} %: median {result['wait_ms_median']:.2f} ms, "
            f"worst {result['wait_ms_worst']:.2f} ms",
            flush=True,
        )
        if a.output:
            a.output.write_text(json.dumps(result, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clock", type=int, metavar="TOKENS/S", help="no model: steps are pauses")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of the dataset")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the rounds")
    parser.add_argument("--output", type=Path, help="JSON file")
    a, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/random"
        write_dataset(prefix, a.tokens)
        config = load_config(
            [*MODEL.split(), "--data-path", prefix, "--data-cache-path", folder, "--split", "1"]
            + ([] if a.clock else ["--bf16"])
            + flags
        )
        validate(config, 1)
        size = config.training.global_batch_size
        assert size is not None
        pinned = torch.cuda.is_available() and not a.clock
        config.training.train_iters = (a.steps + 1) * (a.rounds + 1)
        data = build_data(config, Axis(), None, pin_memory=pinned).train
        if a.clock:
            pause = size * data.seq_length / a.clock
            rounds(data, size, lambda _: time.sleep(pause), lambda: None, a)
        else:
            env = start(config)
            engine = NativeEngine(config, env)

            def step(batches: list[MicroBatch]) -> None:
                engine.forward_backward(batches, unmasked(batches))
                engine.step(1e-4, 0.1)

            rounds(data, size, step, torch.cuda.synchronize if pinned else lambda: None, a)
        data.close()


if __name__ == "__main__":
    main()
