"""What contradicts itself is refused before anything starts, with the numbers in the message."""

import math
from dataclasses import fields
from pathlib import Path

from megadiff.config.options import (
    CheckpointConfig,
    Config,
    OptimizerConfig,
    TrainingConfig,
    sections,
)
from megadiff.config.require import flag, require, require_at_least_zero, require_positive
from megadiff.config.validate_model import validate_model
from megadiff.config.validate_split import (
    data_parallel_size,
    validate_micro_batches,
    validate_split,
)


def validate(config: Config, world_size: int) -> None:
    """Refuse contradictions, with the numbers; fill `global_batch_size`. Starts no process group.

    Raises ConfigError.
    """
    for section in sections(config).values():
        for f in fields(section):
            value = getattr(section, f.name)
            require(
                not isinstance(value, float) or math.isfinite(value),
                f"{flag(f.name)} is {value}, must be a finite number",
            )
    validate_model(config.model, config.training.seq_length)
    validate_split(config, world_size)
    _validate_training(config, world_size)
    if config.training.deepspeed:
        _validate_deepspeed(config)


def _validate_rampup(t: TrainingConfig, multiple: int) -> None:
    """`multiple`: sequences that all data-parallel ranks take in one micro-batch."""
    require(
        len(t.rampup_batch_size) == 3,
        f"--rampup-batch-size takes START INCREMENT SAMPLES, not {len(t.rampup_batch_size)} "
        "numbers",
    )
    start, increment, samples = t.rampup_batch_size
    full = t.global_batch_size or 0
    require(
        start > 0 and increment > 0 and samples > 0 and start <= full,
        f"--rampup-batch-size {start} {increment} {samples} must be positive and start at no more "
        f"than --global-batch-size {full}",
    )
    require(
        (full - start) % increment == 0,
        f"--rampup-batch-size: {full} - {start} is not a multiple of the increment {increment}",
    )
    require(
        start % multiple == 0 and increment % multiple == 0,
        f"--rampup-batch-size: {start} and {increment} must be multiples of --micro-batch-size x "
        f"data-parallel size = {multiple}",
    )
    require(
        t.train_samples is not None,
        "--rampup-batch-size needs --train-samples: steps have different sizes",
    )


def iterations(t: TrainingConfig) -> int:
    """Steps in `train_samples`; what would not fill a last step is left out."""
    assert t.train_samples is not None and t.global_batch_size is not None
    consumed = steps = 0
    while (size := t.batch_size(consumed)) < t.global_batch_size:
        if consumed + size > t.train_samples:
            return steps
        consumed += size
        steps += 1
    return steps + (t.train_samples - consumed) // t.global_batch_size


def _validate_float8(config: Config) -> None:
    t, cp = config.training, config.parallel.context_parallel_size
    require(t.bf16, f"--fp8 is for models in bfloat16, not {t.dtype}: give --bf16")
    require(not t.deepspeed, "--fp8 is for the native engine, not for --deepspeed")
    require(not config.parallel.tp_comm_overlap, "--fp8 does not go with --tp-comm-overlap")
    tokens = t.micro_batch_size * t.seq_length // cp
    require(
        tokens % 16 == 0,
        f"--fp8 needs a multiple of 16 tokens in a micro-batch; --micro-batch-size "
        f"{t.micro_batch_size} x --seq-length {t.seq_length} / context-parallel size {cp} = "
        f"{tokens}",
    )


def _validate_training(config: Config, world_size: int) -> None:
    t, o = config.training, config.optimizer
    require_positive(
        t, "seq_length", "micro_batch_size", "global_batch_size", "train_iters", "train_samples",
        "exit_interval", "exit_duration_in_mins", "max_consecutive_skipped_iters",
        "loss_spike_sigma_factor",
    )  # fmt: skip
    require(t.bf16 + t.fp16 + t.fp64 <= 1, "give at most one of --bf16, --fp16 and --fp64")
    if t.fp8:
        _validate_float8(config)
    dp = data_parallel_size(config, world_size)
    if t.global_batch_size is None:
        t.global_batch_size = t.micro_batch_size * dp
    require(
        t.global_batch_size % (t.micro_batch_size * dp) == 0,
        f"--global-batch-size {t.global_batch_size} is not a multiple of --micro-batch-size "
        f"{t.micro_batch_size} x data-parallel size {dp} = {t.micro_batch_size * dp}",
    )
    sizes = [t.global_batch_size]
    if t.rampup_batch_size:
        _validate_rampup(t, t.micro_batch_size * dp)
        sizes += range(t.rampup_batch_size[0], t.global_batch_size, t.rampup_batch_size[1])
    for size in sizes:
        validate_micro_batches(config.parallel, size // (t.micro_batch_size * dp))
    if t.train_samples is not None:
        steps = iterations(t)
        require(
            t.train_iters in (None, steps),
            f"--train-iters {t.train_iters} and --train-samples {t.train_samples}, which are "
            f"{steps} steps: give one of them",
        )
        t.train_iters = steps
    require(t.train_iters is not None, "--train-iters is missing: how many steps to train")
    require_at_least_zero(t, "eval_iters", "eval_interval", "seed")
    require_at_least_zero(o, "clip_grad", "weight_decay", "adam_eps")
    require_at_least_zero(config.data, "num_workers")
    require_at_least_zero(config.model, "init_method_std", "diff_lambda_std")
    require(t.seed < 2**32, f"--seed is {t.seed}, must be below 2**32")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"):
        beta = getattr(o, name)
        require(0 <= beta < 1, f"{flag(name)} is {beta}, must be at least 0 and below 1")
    require(
        t.deepspeed or t.deepspeed_config is None,
        f"--deepspeed-config {t.deepspeed_config} is given without --deepspeed",
    )
    require(0 <= o.min_lr <= o.lr, f"--min-lr {o.min_lr} must lie between 0 and --lr {o.lr}")
    decay = o.lr_decay_iters or t.train_iters or 0
    require(
        0 <= o.lr_warmup_iters <= decay or o.lr_decay_samples is not None,
        f"--lr-warmup-iters {o.lr_warmup_iters} is longer than the schedule of {decay} steps; "
        "set it, or --train-iters or --lr-decay-iters",
    )
    require(
        o.main_weights == "float32" or t.bf16,
        f"--main-weights {o.main_weights} is a way to round bfloat16 parameters: give --bf16",
    )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        require(
            getattr(o, name) == "fp32" or (t.bf16 and o.optimizer == "adam"),
            f"{flag(name)} bf16 needs --bf16 and --optimizer adam",
        )
    require(
        o.lambda_lr_multiplier == 1 or "diff_v1" in config.model.mixers,
        f"--lambda-lr-multiplier {o.lambda_lr_multiplier} is set, but no layer is diff_v1",
    )
    require(o.loss_scale is None or t.fp16, f"--loss-scale {o.loss_scale} is for --fp16")
    require_positive(
        o, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    )
    require(
        o.use_distributed_optimizer or not o.overlap_param_gather,
        "--overlap-param-gather needs --use-distributed-optimizer",
    )
    require_positive(config.logging, "log_interval")
    require(
        t.loss_spike_skip_iters is None
        or (t.loss_spike_sigma_factor is not None and config.checkpoint.save is not None),
        "--loss-spike-skip-iters needs --loss-spike-sigma-factor, and --save: without checkpoints "
        "there is nothing to go back to",
    )
    require(
        t.loss_spike_skip_iters is None or t.loss_spike_skip_iters >= 2,
        f"--loss-spike-skip-iters {t.loss_spike_skip_iters} is less than 2, the step before a "
        "spike and the spike's own",
    )
    require(
        t.loss_spike_window >= 4,
        f"--loss-spike-window {t.loss_spike_window} is too few for a median deviation; 4 or more",
    )
    require(
        all(step > 0 for step in t.iterations_to_skip),
        f"--iterations-to-skip {min(t.iterations_to_skip, default=1)}: steps count from 1",
    )
    _validate_checkpoint(config.checkpoint)


def _validate_checkpoint(c: CheckpointConfig) -> None:
    intervals = ("save_interval", "keep_last_n_checkpoints", "save_retain_interval")
    require_positive(c, *intervals, "non_persistent_save_interval")
    for name in (*intervals, "async_save", "non_persistent_save_interval"):
        require(
            not getattr(c, name) or c.save is not None,
            f"{flag(name)} is given without --save: where should checkpoints go?",
        )
    require(
        c.save_retain_interval is None or c.keep_last_n_checkpoints is not None,
        "--save-retain-interval is given without --keep-last-n-checkpoints: everything is kept",
    )
    places = [c.non_persistent_global_ckpt_dir, c.non_persistent_local_ckpt_dir]
    given = [Path(place) for place in places if place is not None]
    require(
        len(given) <= 1,
        "give one of --non-persistent-global-ckpt-dir and --non-persistent-local-ckpt-dir",
    )
    require(
        c.non_persistent_save_interval is None or len(given) == 1,
        "--non-persistent-save-interval needs --non-persistent-global-ckpt-dir or "
        "--non-persistent-local-ckpt-dir",
    )
    require(
        c.save is None or Path(c.save).resolve() not in [place.resolve() for place in given],
        f"--save {c.save} is the second place too, which holds only the last checkpoint",
    )


NATIVE_OPTIONS = {
    "main_weights": "a bf16 run keeps float32 main weights",
    "exp_avg_dtype": "moments are float32",
    "exp_avg_sq_dtype": "moments are float32",
    "use_distributed_optimizer": "ZeRO 1 is its like; give --no-use-distributed-optimizer",
    "overlap_grad_reduce": "zero_optimization.overlap_comm is its like",
    "overlap_param_gather": "zero_optimization.overlap_comm is its like",
    "accumulate_allreduce_grads_in_fp32": "data_types.grad_accum_dtype is its like",
    "adam_kernel": "it runs torch's AdamW",
}
"""Options of the optimizer that only the native engine has, and what to do with DeepSpeed."""


def _validate_deepspeed(config: Config) -> None:
    p, t, o = config.parallel, config.training, config.optimizer
    pp, cp, tp = (
        p.pipeline_model_parallel_size, p.context_parallel_size, p.tensor_model_parallel_size
    )  # fmt: skip
    for name, used in {
        f"--pipeline-model-parallel-size {pp}": pp > 1,
        f"--context-parallel-size {cp}": cp > 1,
        "--fp64": t.fp64,
        "--optimizer muon": o.optimizer == "muon",
        "--loss-spike-skip-iters": t.loss_spike_skip_iters is not None,
        "--tp-comm-overlap": config.parallel.tp_comm_overlap,
        "--check-weight-hash-across-dp-replicas-interval": (
            t.check_weight_hash_across_dp_replicas_interval is not None
        ),
    }.items():
        require(not used, f"--deepspeed does not go with {name}; train without --deepspeed")
    for name, instead in NATIVE_OPTIONS.items():
        value = getattr(o, name)
        require(
            value == getattr(OptimizerConfig(), name),
            f"{flag(name)} ({value}) is the native engine's, and --deepspeed would "
            f"ignore it: {instead}",
        )
    groups = config.model.query_groups
    require(
        groups % tp == 0,
        f"--deepspeed would count the gradients of copied key/value groups more than once: "
        f"--num-query-groups {groups} is not a multiple of --tensor-model-parallel-size {tp}",
    )
