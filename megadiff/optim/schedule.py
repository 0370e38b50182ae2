"""Learning rate and weight decay as pure functions of the samples consumed so far.

Shapes and edge cases are Megatron-LM's (core/optimizer_param_scheduler.py): it counts samples, a
run that is given in iterations counts `iterations * global_batch_size`, and the step that starts
after `n` samples uses the rate at `n`, so that a warmup from 0 begins with a step of rate 0.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from megadiff.config import ConfigError, OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay of a run; lengths in samples."""

    lr: float
    min_lr: float = 0.0
    lr_warmup_init: float = 0.0
    lr_warmup_samples: int = 0
    lr_decay_style: str = "cosine"
    lr_decay_samples: int = 1
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_samples: int = 0
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_incr_style: str = "constant"
    weight_decay_incr_samples: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.lr_warmup_samples <= self.lr_decay_samples:
            raise ConfigError(
                f"warmup of {self.lr_warmup_samples} samples does not fit into a schedule of "
                f"{self.lr_decay_samples} samples"
            )
        if self.lr_decay_style == "WSD" and not (
            0 < self.lr_wsd_decay_samples <= self.lr_decay_samples - self.lr_warmup_samples
        ):
            raise ConfigError(
                f"the WSD decay of {self.lr_wsd_decay_samples} samples (--lr-wsd-decay-iters or "
                f"-samples) must be positive and fit between the warmup ({self.lr_warmup_samples}) "
                f"and the end of the schedule ({self.lr_decay_samples})"
            )


def make_schedule(
    config: OptimizerConfig, *, train_samples: int, global_batch_size: int
) -> Schedule:
    """The schedule that `config` asks for, for a run over `train_samples` samples.

    Raises ConfigError for lengths that do not fit and for a length given twice.
    """

    def samples(name: str, iterations: int | None, in_samples: int | None) -> int | None:
        if iterations and in_samples:
            raise ConfigError(f"give {name} in iterations or in samples, not both")
        return iterations * global_batch_size if iterations else in_samples

    decay = samples("the decay", config.lr_decay_iters, config.lr_decay_samples) or train_samples
    warmup = samples("the warmup", config.lr_warmup_iters, config.lr_warmup_samples) or 0
    if config.lr_warmup_fraction is not None:
        if warmup:
            raise ConfigError("give the warmup as a length or as a fraction, not both")
        warmup = int(config.lr_warmup_fraction * decay)
    wsd = samples("the WSD decay", config.lr_wsd_decay_iters, config.lr_wsd_decay_samples) or 0
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise ConfigError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear "
                "or cosine"
            )
        start = end = config.weight_decay
    elif start is None or end is None:
        raise ConfigError(
            f"--weight-decay-incr-style {config.weight_decay_incr_style} needs "
            "--start-weight-decay and --end-weight-decay"
        )
    return Schedule(
        lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_init=config.lr_warmup_init,
        lr_warmup_samples=warmup,
        lr_decay_style=config.lr_decay_style,
        lr_decay_samples=decay,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        lr_wsd_decay_samples=wsd,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_incr_style=config.weight_decay_incr_style,
        weight_decay_incr_samples=train_samples,
    )


def learning_rate(schedule: Schedule, consumed_samples: int) -> float:
    """The rate of the step that starts after `consumed_samples`."""
    s, n = schedule, consumed_samples
    if s.lr_warmup_samples > 0 and n <= s.lr_warmup_samples:
        return s.lr_warmup_init + (s.lr - s.lr_warmup_init) * n / s.lr_warmup_samples
    if s.lr_decay_style == "constant":
        return s.lr
    if n > s.lr_decay_samples:
        return s.min_lr
    if s.lr_decay_style == "inverse-square-root":
        return max(s.min_lr, s.lr * math.sqrt(max(s.lr_warmup_samples, 1) / max(n, 1)))
    if s.lr_decay_style == "WSD":
        share = _wsd_share(s, n)
    else:
        length = s.lr_decay_samples - s.lr_warmup_samples
        progress = (n - s.lr_warmup_samples) / length if length else 1.0
        share = _cosine(progress) if s.lr_decay_style == "cosine" else 1.0 - progress
    return s.min_lr + share * (s.lr - s.min_lr)


def _wsd_share(s: Schedule, n: int) -> float:
    """Warmup, stable, decay (arXiv 2404.06395): the share of the peak that is left in the decay."""
    progress = (n - (s.lr_decay_samples - s.lr_wsd_decay_samples)) / s.lr_wsd_decay_samples
    if progress <= 0:
        return 1.0
    if s.lr_wsd_decay_style == "linear":
        return 1.0 - progress
    if s.lr_wsd_decay_style == "cosine":
        return _cosine(progress)
    if s.lr_wsd_decay_style == "exponential":
        return 2.0 * 0.5**progress - 1.0
    return 1.0 - math.sqrt(progress)


def _cosine(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


def weight_decay(schedule: Schedule, consumed_samples: int) -> float:
    """The decay of the step that starts after `consumed_samples`."""
    s = schedule
    if s.weight_decay_incr_style == "constant" or consumed_samples > s.weight_decay_incr_samples:
        return s.end_weight_decay
    progress = consumed_samples / s.weight_decay_incr_samples
    share = progress if s.weight_decay_incr_style == "linear" else 1.0 - _cosine(progress)
    return s.start_weight_decay + share * (s.end_weight_decay - s.start_weight_decay)


def resume_schedule(
    configured: Schedule, saved: dict[str, Any], config: OptimizerConfig
) -> Schedule:
    """The schedule to go on with, by Megatron-LM's rules.

    Override takes what is configured, use-checkpoint what was saved; without either they must
    agree, and a ValueError names what does not.
    """
    if config.override_opt_param_scheduler and config.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
            "other"
        )
    if config.override_opt_param_scheduler:
        return configured
    known = asdict(configured)
    loaded = {key: value for key, value in saved.items() if key in known}
    if config.use_checkpoint_opt_param_scheduler:
        return replace(configured, **loaded)
    ignored = _without_effect(known) & _without_effect(known | loaded)
    differing = [
        f"{key} {known[key]} (checkpoint: {value})"
        for key, value in loaded.items()
        if known[key] != value and key not in ignored
    ]
    if differing:
        raise ValueError(
            f"the schedule differs from the checkpoint's: {', '.join(differing)}. Give "
            "--override-opt_param-scheduler to use the new one or "
            "--use-checkpoint-opt_param-scheduler to keep the old one"
        )
    return configured


def _without_effect(schedule: dict[str, Any]) -> set[str]:
    """Fields that a schedule's styles make idle: a longer run need not override them."""
    names: set[str] = set()
    if schedule["weight_decay_incr_style"] == "constant":
        names |= {"start_weight_decay", "weight_decay_incr_samples"}
    if schedule["lr_decay_style"] == "constant":
        names |= {"min_lr", "lr_decay_samples"}
    if schedule["lr_decay_style"] != "WSD":
        names |= {"lr_wsd_decay_style", "lr_wsd_decay_samples"}
    if schedule["lr_warmup_samples"] == 0:
        names.add("lr_warmup_init")
    return names
