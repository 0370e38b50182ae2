#!/usr/bin/env python3
"""Losses, speed and peak memory of DeepSpeed's engine beside the native one, on the same batches.

    torchrun --nproc-per-node 2 benchmarks/engines.py --output runs/engines.json

Every engine pretrains the same model from the same weights on the same random text. Rates are the
median of the second half of the steps. `--quick` is a tiny model on the CPU.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from megadiff.config import load_config, validate
from megadiff.data.indexed_dataset import IndexedDatasetBuilder
from megadiff.training.pretrain import pretrain
from megadiff.training.setup import world_size

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ["native", "zero1", "zero2", "zero3"]
QUICK = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64 "
    "--global-batch-size 4 --micro-batch-size 1 --device cpu --bf16"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--config", default="configs/125M/diff_v2.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU")
    arguments, flags = parser.parse_known_args()
    model = QUICK.split() if arguments.quick else ["--config", arguments.config]
    main_rank = os.environ.get("RANK", "0") == "0"
    rows: dict[str, Any] = {}
    for engine in arguments.engines:
        try:
            with tempfile.TemporaryDirectory() as folder:
                rows[engine] = measure(engine, [*model, *flags], arguments.steps, Path(folder))
        except Exception:
            rows[engine] = {"error": traceback.format_exc()}
        if main_rank:
            print(engine, json.dumps(rows[engine]), flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()


def measure(engine: str, flags: list[str], steps: int, folder: Path) -> dict[str, Any]:
    """Pretrain on one engine, and what its log tells."""
    config = load_config([
        *flags, "--train-iters", str(steps), "--lr-warmup-iters", "0", "--eval-iters", "0",
        "--log-interval", "1", "--log-dir", str(folder), "--split", "100,0,0", "--data-path",
        str(folder / "text"),
    ])  # fmt: skip
    if engine != "native":
        config.training.deepspeed = True
        config.training.deepspeed_config = str(ROOT / f"configs/deepspeed/{engine}.json")
        config.optimizer.use_distributed_optimizer = False
    validate(config, world_size())
    t = config.training
    assert t.global_batch_size is not None and config.model.vocab_size is not None
    write_text(folder / "text", config.model.vocab_size, t.total_samples * (t.seq_length + 1))
    before = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what the last engine has left
    begin = time.monotonic()
    pretrain(config)
    seconds = time.monotonic() - begin
    if os.environ.get("RANK", "0") != "0":
        return {}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_logged = [line for line in lines if "lm_loss" in line]
    rates = [line["tokens_per_second_per_device"] for line in steps_logged[len(lines) // 2 :]]
    return {
        "lm_loss": [line["lm_loss"] for line in steps_logged],
        "grad_norm": [line["grad_norm"] for line in steps_logged],
        "tokens_per_second_per_device": statistics.median(rates),
        "peak_memory_gb": (torch.cuda.max_memory_allocated() - before) / 1e9
        if torch.cuda.is_available()
        else None,
        "seconds": seconds,
    }


def write_text(prefix: Path, vocab_size: int, tokens: int) -> None:
    """Documents in which tokens are the more frequent the smaller they are: something to learn."""
    draws = np.random.default_rng(1).random(tokens + 4096) ** 4
    text = (draws * vocab_size).astype(np.int32)
    with IndexedDatasetBuilder(str(prefix), np.int32) as builder:
        for start in range(0, len(text), 4096):
            builder.add_document(text[start : start + 4096])


if __name__ == "__main__":
    main()
