#!/usr/bin/env python3
"""How to split a configuration over GPUs: the fastest split that fits, and the memory it takes.

    python tools/plan.py --config configs/6.8B/diff_v2.yaml --gpus 8 64 --memory 80

Every split of the configuration's global batch is tried, in the order of `cost`, until one leaves a
tenth of the memory free on the fullest rank. Nothing is allocated; flags of pretrain_diff.py change
the model and the batch.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.config import Config, ConfigError, load_config, validate
from megadiff.models.memory import Memory, estimate_memory

FREE = 0.1  # of the memory, for fragments, NCCL and the context


@dataclass(frozen=True)
class Split:
    """One way to run: sizes, recomputation and micro-batch."""

    tensor: int
    pipeline: int
    recompute: str | None
    micro_batch: int

    def flags(self) -> str:
        """As pretrain_diff.py takes them, those that differ from its defaults."""
        words = [f"--micro-batch-size {self.micro_batch}"]
        if self.tensor > 1:
            words += [f"--tensor-model-parallel-size {self.tensor} --sequence-parallel"]
        if self.pipeline > 1:
            words += [f"--pipeline-model-parallel-size {self.pipeline}"]
            words += ["--pipeline-model-parallel-layout balanced"]
        if self.recompute is not None:
            words += [f"--recompute-granularity {self.recompute}"]
        return " ".join(words)

    def __str__(self) -> str:
        sizes = {"tp": self.tensor, "pp": self.pipeline}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += [f"micro-batch {self.micro_batch}"]
        words += [f"{self.recompute} recomputation"] if self.recompute else []
        return ", ".join(words)

    def cost(self, config: Config, gpus: int) -> float:
        """Roughly the time of a step, in units of the same without any of these.

        Tensor parallelism moves activations in every layer, full recomputation runs the forward
        once more, selective its attention; a pipeline idles (pp - 1) / micro-batches; smaller
        micro-batches make smaller matrices.
        """
        assert config.training.global_batch_size is not None
        context = config.parallel.context_parallel_size
        data = gpus // (self.tensor * self.pipeline * context)
        micro_batches = config.training.global_batch_size // (self.micro_batch * data)
        tokens = self.micro_batch * config.training.seq_length / (self.tensor * context)
        return (
            (1 + 0.1 * (self.tensor > 1) + 0.03 * self.tensor * (self.tensor > 1))
            * {None: 1.0, "selective": 1.1, "full": 1.33}[self.recompute]
            * (1 + (self.pipeline - 1) / micro_batches)
            * (1 + 256 / tokens)
        )


def apply(split: Split, config: Config, gpus: int) -> Config:
    """A valid configuration with this split. Raises ConfigError."""
    config = copy.deepcopy(config)
    p = config.parallel
    p.tensor_model_parallel_size, p.pipeline_model_parallel_size = split.tensor, split.pipeline
    p.sequence_parallel = split.tensor > 1
    p.pipeline_model_parallel_layout = "balanced" if split.pipeline > 1 else "even"
    p.recompute_granularity = split.recompute  # type: ignore[assignment]
    config.training.micro_batch_size = split.micro_batch
    validate(config, gpus)
    return config


def splits(config: Config, gpus: int) -> Iterator[Split]:
    """The valid splits, the cheapest first. Tensor parallelism stays within a node of eight.

    Raises ConfigError when there is none, for the simplest one's reason.
    """
    found, refused = [], None
    micro = [2**i for i in range(config.training.micro_batch_size.bit_length())]
    for sizes in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (None, "selective", "full"), micro):
        split = Split(*sizes)
        try:
            apply(split, config, gpus)
        except ConfigError as error:
            refused = refused or error
            continue
        found.append(split)
    if not found and refused is not None:
        raise refused
    yield from sorted(found, key=lambda split: split.cost(config, gpus))


def plan(config: Config, gpus: int, memory: float) -> tuple[Split, Memory] | None:
    """The cheapest split whose fullest rank takes less than `memory` bytes, and what it takes."""
    for split in splits(config, gpus):
        fullest = peak(split, config, gpus)
        if fullest.total <= (1 - FREE) * memory:
            return split, fullest
    return None


def peak(split: Split, config: Config, gpus: int) -> Memory:
    """What the fullest rank takes."""
    estimates = estimate_memory(apply(split, config, gpus), gpus)
    return max(estimates, key=lambda estimate: estimate.total)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--memory", type=float, default=80, help="GB of one GPU [80]")
    arguments, flags = parser.parse_known_args(words)
    if min(arguments.gpus) < 1 or not arguments.memory > 0:
        parser.error("--gpus and --memory must be positive")
    try:
        config = load_config(flags)
        if config.training.train_samples is None:
            config.training.train_iters = config.training.train_iters or 1
        if config.training.deepspeed:
            raise ConfigError("the estimate is of the native engine: leave out --deepspeed")
        if config.training.global_batch_size is None or config.training.micro_batch_size < 1:
            raise ConfigError("splits need a --global-batch-size and a positive --micro-batch-size")
    except ConfigError as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 1
    status = 0
    for gpus in arguments.gpus:
        try:
            found = plan(config, gpus, arguments.memory * 1e9)
            told = f"{found[1]}\n  {found[0].flags()}" if found else "no split fits"
        except ConfigError as error:
            told, status = f"no split is valid: {error}", 1
        print(f"{gpus} GPUs: {told}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
