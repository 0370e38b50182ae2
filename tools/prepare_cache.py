#!/usr/bin/env python3
"""Make the sample indices of a run before it starts, so that no rank waits for them.

Takes the flags of the run (`--config FILE`, `--data-path`, ...); `--data-cache-path` must be given
and `--global-batch-size`, `--train-iters`, `--seq-length` and `--seed` must be those of the run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.config import Config, iterations, load_config
from megadiff.data.errors import DataError
from megadiff.parallel.mesh import Axis
from megadiff.training.data import build_data, set_vocabulary
from tools.common import run


def read_run(run_flags: list[str]) -> Config:
    """The configuration of a run, as far as the order of its samples depends on it."""
    config = load_config(run_flags)
    t = config.training
    if t.global_batch_size is None or (t.train_iters is None and t.train_samples is None):
        raise DataError("give --global-batch-size and --train-iters or --train-samples of the run")
    if t.train_samples is not None:
        t.train_iters = iterations(t)
    return config


def prepare(run_flags: list[str]) -> int:
    config = read_run(run_flags)
    if config.data.data_cache_path is None:
        raise DataError("give --data-cache-path, where the run will look for the indices")
    data = build_data(config, Axis(), set_vocabulary(config))
    sets = {"train": (data.train, 0), "valid": data.valid.pop("validation", None)}
    sets |= {"test": data.test}
    sets |= {name.removeprefix("validation/"): found for name, found in data.valid.items()}
    for name, found in sets.items():
        print(f"{name}: {'none' if found is None else f'{len(found[0].dataset)} samples'}")
    return 0


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"{(__doc__ or '').strip()}\n\n`pretrain_diff.py --help` lists the flags.")
        return 0
    return run("prepare_cache", lambda: prepare(words))


if __name__ == "__main__":
    sys.exit(main())
