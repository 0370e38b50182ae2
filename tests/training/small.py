"""A small run on made-up data, as its command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.config import load_config, validate
from megadiff.data.indexed_dataset import IndexedDatasetBuilder
from megadiff.training.pretrain import pretrain
from megadiff.training.setup import world_size

VOCABULARY = 61
EOD = 60


def write_data(folder: Path, documents: int = 60, seed: int = 0) -> str:
    """A dataset of documents of 5 to 40 tokens that end with EOD; its prefix."""
    rng = np.random.default_rng(seed)
    prefix = str(folder / "data")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            length = int(rng.integers(5, 40))
            tokens = np.cumsum(rng.integers(0, 4, length)) % EOD  # each follows from the last
            builder.add_document([*tokens.tolist(), EOD])
    return prefix


def flags(prefix: str, *more: str) -> list[str]:
    """Six steps of eight samples; later flags win."""
    return [
        "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
        "--num-query-groups", "2", "--make-vocab-size-divisible-by", "8",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(EOD), "--eod-mask-loss",
        "--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "8",
        "--train-iters", "6", "--lr", "0.01", "--lr-warmup-iters", "2", "--device", "cpu",
        "--data-path", prefix, "--split", "80,20,0", "--eval-interval", "3", "--eval-iters", "100",
        "--log-interval", "1", *more,
    ]  # fmt: skip


def train(argv: list[str]) -> str:
    """Run on this rank; why it ended."""
    config = load_config(argv)
    validate(config, world_size())
    return pretrain(config)


def read(log_dir: Path) -> list[dict[str, Any]]:
    """The entries of metrics.jsonl."""
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def losses(log_dir: Path, kind: str = "train") -> dict[int, float]:
    """Loss by iteration, to the last bit."""
    return {e["iteration"]: e["lm_loss"] for e in read(log_dir) if e["kind"] == kind}
