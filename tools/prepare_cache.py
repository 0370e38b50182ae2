#!/usr/bin/env python3
"""Make the sample indices of a run before it starts, so that no rank waits for them.

Takes the flags of the run (`--config FILE`, `--data-path`, ...); `--data-cache-path` must be given
and `--global-batch-size`, `--train-iters`, `--seq-length` and `--seed` must be those of the run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.config import load_config
from megadiff.data.errors import DataError
from megadiff.parallel.mesh import Axis
from megadiff.training.data import RunData, build_data, set_vocabulary


def prepare(run_flags: list[str]) -> RunData:
    config = load_config(run_flags)
    if config.data.data_cache_path is None:
        raise DataError(
            "give --data-cache-path, the folder that the run will read the indices from"
        )
    if config.training.global_batch_size is None or config.training.train_iters is None:
        raise DataError("give --global-batch-size and --train-iters as in the run")
    return build_data(config, Axis(), set_vocabulary(config))


def main(words: list[str] | None = None) -> int:
    try:
        data = prepare(sys.argv[1:] if words is None else words)
    except ValueError as error:  # DataError and the configuration's errors
        print(f"prepare_cache: error: {error}", file=sys.stderr)
        return 1
    for name, batches in (("train", data.train), ("valid", data.valid), ("test", data.test)):
        print(f"{name}: {'none' if batches is None else f'{len(batches.dataset)} samples'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
