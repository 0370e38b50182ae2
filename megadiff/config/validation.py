"""What contradicts itself is refused before anything starts, with the numbers in the message."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from megadiff.config.options import (
    DELTA_MIXERS,
    MIXER_SYMBOLS,
    CheckpointConfig,
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    sections,
)


def validate(config: Config, world_size: int) -> None:
    """Refuse contradictions, with the numbers; fill `global_batch_size`. Starts no process group.

    Raises ConfigError.
    """
    for section in sections(config).values():
        for f in fields(section):
            value = getattr(section, f.name)
            _require(
                not isinstance(value, float) or math.isfinite(value),
                f"--{f.name.replace('_', '-')} is {value}, must be a finite number",
            )
    _validate_model(config.model, config.training.seq_length)
    _validate_split(config, world_size)
    _validate_training(config, world_size)
    if config.training.deepspeed:
        _validate_deepspeed(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(
            value is None or value > 0, f"--{name.replace('_', '-')} is {value}, must be positive"
        )


def _require_at_least_zero(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(
            value is None or value >= 0,
            f"--{name.replace('_', '-')} is {value}, must not be negative",
        )


def _validate_model(m: ModelConfig, seq_length: int) -> None:
    _require_positive(
        m, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "ffn_hidden_size", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by",
        "norm_epsilon", "rotary_base", "rope_scaling_factor",
    )  # fmt: skip
    _require(
        m.attention_dropout == 0 and m.hidden_dropout == 0,
        f"dropout is not offered: --attention-dropout is {m.attention_dropout} and "
        f"--hidden-dropout {m.hidden_dropout}; both must be 0",
    )
    _require(
        m.num_attention_heads % m.query_groups == 0,
        f"--num-attention-heads {m.num_attention_heads} is not a multiple of "
        f"--num-query-groups {m.query_groups}",
    )
    pattern = m.hybrid_layer_pattern
    if pattern is not None:
        strange = set(pattern) - set(MIXER_SYMBOLS)
        _require(
            bool(pattern) and not strange,
            f"--hybrid-layer-pattern {pattern!r} may only hold {' '.join(MIXER_SYMBOLS)}",
        )
        _require(
            m.num_layers % len(pattern) == 0,
            f"--hybrid-layer-pattern has {len(pattern)} symbols, which do not divide "
            f"--num-layers {m.num_layers}",
        )
    _validate_delta(m)
    if m.mixers.isdisjoint(("diff_v1",)):
        for f in fields(m):
            _require(
                not f.name.startswith("diff_") or getattr(m, f.name) == f.default,
                f"--{f.name.replace('_', '-')} is set, but no layer is diff_v1",
            )
    for mixer in m.mixers.difference(DELTA_MIXERS):
        heads = m.num_attention_heads * (2 if mixer == "diff_v1" else 1)
        _require(
            m.kv_channels is not None or m.hidden_size % heads == 0,
            f"--hidden-size {m.hidden_size} is not a multiple of the {heads} query widths of "
            f"{mixer} with --num-attention-heads {m.num_attention_heads}; set --kv-channels",
        )
        _require(
            m.position_embedding_type != "rope" or m.head_width(mixer) % 2 == 0,
            f"rotary positions need an even head width, and {mixer} has {m.head_width(mixer)}",
        )
    _require(
        m.use_rope_scaling or m.rope_scaling_factor == ModelConfig.rope_scaling_factor,
        f"--rope-scaling-factor {m.rope_scaling_factor} needs --use-rope-scaling",
    )
    if m.position_embedding_type == "learned_absolute":
        positions = m.max_position_embeddings or seq_length
        _require(
            seq_length <= positions,
            f"--seq-length {seq_length} is longer than --max-position-embeddings {positions}",
        )


def _validate_delta(m: ModelConfig) -> None:
    if m.mixers.isdisjoint(DELTA_MIXERS):
        for f in fields(m):
            _require(
                not f.name.startswith("delta_") or getattr(m, f.name) == f.default,
                f"--{f.name.replace('_', '-')} is set, but no layer is one of "
                f"{', '.join(DELTA_MIXERS)}",
            )
        return
    _require_positive(m, "delta_num_heads", "delta_expand_k", "delta_expand_v")
    heads = m.delta_heads
    for name, head_width in zip(("delta_expand_k", "delta_expand_v"), m.delta_widths, strict=True):
        width = m.hidden_size * getattr(m, name)
        _require(
            head_width > 0 and math.isclose(head_width * heads, width),
            f"--{name.replace('_', '-')} {getattr(m, name)} x --hidden-size {m.hidden_size} = "
            f"{width} is not a multiple of the {heads} heads of the delta layers",
        )
    _require(m.delta_conv_size >= 0, f"--delta-conv-size is {m.delta_conv_size}, must be 0 or more")
    _require(
        m.delta_conv_size > 0 or not m.delta_conv_bias,
        "--delta-conv-bias needs a convolution, and --delta-conv-size is 0",
    )
    _require(
        m.delta_qk_norm != "sum" or m.delta_qk_activation in ("relu", "elu"),
        "--delta-qk-norm sum divides by the sum of the entries, which must not be negative: use it "
        f"with --delta-qk-activation relu or elu, not {m.delta_qk_activation}",
    )


def _validate_split(config: Config, world_size: int) -> None:
    m, p = config.model, config.parallel
    _require_positive(
        p, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "num_virtual_stages_per_pipeline_rank", "recompute_num_layers",
        "distributed_timeout_minutes",
    )  # fmt: skip
    tp, pp, cp = (
        p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    )  # fmt: skip
    _require(
        world_size % (tp * pp * cp) == 0,
        f"the world size {world_size} is not a multiple of --tensor-model-parallel-size {tp} x "
        f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp}",
    )
    attends = not m.mixers.issubset(DELTA_MIXERS)
    _require(
        not attends or m.num_attention_heads % tp == 0,
        f"--num-attention-heads {m.num_attention_heads} is not a multiple of "
        f"--tensor-model-parallel-size {tp}",
    )
    _require(
        m.mixers.isdisjoint(DELTA_MIXERS) or m.delta_heads % (tp * cp) == 0,
        f"the delta layers' {m.delta_heads} heads are not a multiple of "
        f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} = {tp * cp}; set "
        "--delta-num-heads",
    )
    groups = m.query_groups
    _require(
        not attends or groups % tp == 0 or tp % groups == 0,
        f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the "
        "other",
    )
    _require(
        m.ffn_size % tp == 0,
        f"the MLP's width {m.ffn_size} is not a multiple of --tensor-model-parallel-size {tp}",
    )
    seq_length = config.training.seq_length
    _require(
        cp == 1 or seq_length % (2 * cp) == 0,
        f"--seq-length {seq_length} is not a multiple of 2 x --context-parallel-size {cp} = "
        f"{2 * cp}: each rank takes one part of the head and one of the tail",
    )
    _require(
        not p.sequence_parallel or seq_length // cp % tp == 0,
        f"--seq-length {seq_length} is not a multiple of --context-parallel-size {cp} x "
        f"--tensor-model-parallel-size {tp} = {cp * tp}, as --sequence-parallel needs",
    )
    _validate_pipeline(m, p)
    _require(
        p.recompute_granularity == "full" or p.recompute_method is None,
        f"--recompute-method {p.recompute_method} needs --recompute-granularity full",
    )
    strange = set(p.recompute_modules) - {"core_attn", "layernorm", "mlp_act"}
    _require(
        not strange,
        f"--recompute-modules may hold core_attn, layernorm and mlp_act, not {' '.join(strange)}",
    )
    _require(
        p.recompute_granularity == "full" or p.recompute_num_layers == 1,
        f"--recompute-num-layers {p.recompute_num_layers} needs --recompute-granularity full",
    )
    _require(
        p.recompute_num_layers <= m.num_layers,
        f"--recompute-num-layers {p.recompute_num_layers} is more than --num-layers {m.num_layers}",
    )


def _validate_pipeline(m: ModelConfig, p: ParallelConfig) -> None:
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    stages = pp * virtual
    _require(
        pp > 1 or virtual == 1,
        f"--num-virtual-stages-per-pipeline-rank {virtual} needs --pipeline-model-parallel-size "
        f"above 1",
    )
    _require(
        virtual == 1 or p.pipeline_schedule in (None, "interleaved_1f1b"),
        f"--pipeline-schedule {p.pipeline_schedule} runs one stage on each rank, and "
        f"--num-virtual-stages-per-pipeline-rank is {virtual}",
    )
    _require(
        virtual > 1 or p.pipeline_schedule != "interleaved_1f1b",
        "--pipeline-schedule interleaved_1f1b needs --num-virtual-stages-per-pipeline-rank above 1",
    )
    _require(
        m.num_layers >= stages,
        f"--num-layers {m.num_layers} are fewer than the {stages} stages of "
        f"--pipeline-model-parallel-size {pp} x --num-virtual-stages-per-pipeline-rank {virtual}",
    )
    if p.pipeline_model_parallel_layout != "balanced":
        stage_sizes(m.num_layers, p)


def stage_sizes(num_layers: int, p: ParallelConfig) -> list[int]:
    """The number of layers of every pipeline stage, for an even or a given layout.

    Raises ConfigError when the layers do not divide or the layout does not add up.
    """
    stages = p.pipeline_model_parallel_size * p.num_virtual_stages_per_pipeline_rank
    layout = p.pipeline_model_parallel_layout
    if layout == "even":
        _require(
            num_layers % stages == 0,
            f"--num-layers {num_layers} do not divide evenly among {stages} pipeline stages; give "
            "--pipeline-model-parallel-layout balanced, or the number of layers of each stage",
        )
        return [num_layers // stages] * stages
    parts = [part.strip() for part in layout.split(",")]
    _require(
        all(part.isdecimal() and int(part) > 0 for part in parts),
        f"--pipeline-model-parallel-layout {layout!r} is neither even, balanced nor a list of "
        "numbers of layers such as 5,6,6,5",
    )
    sizes = [int(part) for part in parts]
    _require(
        len(sizes) == stages and sum(sizes) == num_layers,
        f"--pipeline-model-parallel-layout {layout} has {len(sizes)} stages with {sum(sizes)} "
        f"layers in all, and the model has {stages} stages with {num_layers}",
    )
    return sizes


def data_parallel_size(config: Config, world_size: int) -> int:
    """The number of data-parallel replicas."""
    p = config.parallel
    ranks = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    return world_size // ranks


def _validate_micro_batches(p: ParallelConfig, micro_batches: int) -> None:
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    _require(
        pp == 1 or p.pipeline_schedule == "gpipe" or micro_batches >= pp,
        f"a step has {micro_batches} micro-batches, fewer than --pipeline-model-parallel-size {pp}:"
        " raise --global-batch-size or lower --micro-batch-size",
    )
    _require(
        virtual == 1 or micro_batches % pp == 0,
        f"the interleaved schedule needs micro-batches in multiples of "
        f"--pipeline-model-parallel-size {pp}, and a step has {micro_batches}",
    )


def _validate_rampup(t: TrainingConfig, multiple: int) -> None:
    """`multiple`: sequences that all data-parallel ranks take in one micro-batch."""
    _require(
        len(t.rampup_batch_size) == 3,
        f"--rampup-batch-size takes START INCREMENT SAMPLES, not {len(t.rampup_batch_size)} "
        "numbers",
    )
    start, increment, samples = t.rampup_batch_size
    full = t.global_batch_size or 0
    _require(
        start > 0 and increment > 0 and samples > 0 and start <= full,
        f"--rampup-batch-size {start} {increment} {samples} must be positive and start at no more "
        f"than --global-batch-size {full}",
    )
    _require(
        (full - start) % increment == 0,
        f"--rampup-batch-size: {full} - {start} is not a multiple of the increment {increment}",
    )
    _require(
        start % multiple == 0 and increment % multiple == 0,
        f"--rampup-batch-size: {start} and {increment} must be multiples of --micro-batch-size x "
        f"data-parallel size = {multiple}",
    )
    _require(
        t.train_samples is not None,
        "--rampup-batch-size needs --train-samples: steps have different sizes",
    )


def _iterations(t: TrainingConfig) -> int:
    """Steps in `train_samples`; what would not fill a last step is left out."""
    assert t.train_samples is not None and t.global_batch_size is not None
    consumed = iterations = 0
    while (size := t.batch_size(consumed)) < t.global_batch_size:
        if consumed + size > t.train_samples:
            return iterations
        consumed += size
        iterations += 1
    return iterations + (t.train_samples - consumed) // t.global_batch_size


def _validate_float8(config: Config) -> None:
    t, cp = config.training, config.parallel.context_parallel_size
    _require(t.bf16, f"--fp8 is for models in bfloat16, not {t.dtype}: give --bf16")
    _require(not t.deepspeed, "--fp8 is for the native engine, not for --deepspeed")
    tokens = t.micro_batch_size * t.seq_length // cp
    _require(
        tokens % 16 == 0,
        f"--fp8 needs a multiple of 16 tokens in a micro-batch; --micro-batch-size "
        f"{t.micro_batch_size} x --seq-length {t.seq_length} / context-parallel size {cp} = "
        f"{tokens}",
    )


def _validate_training(config: Config, world_size: int) -> None:
    t, o = config.training, config.optimizer
    _require_positive(t, "seq_length", "micro_batch_size", "global_batch_size")
    _require_positive(t, "train_iters", "train_samples")
    _require(t.bf16 + t.fp16 + t.fp64 <= 1, "give at most one of --bf16, --fp16 and --fp64")
    if t.fp8:
        _validate_float8(config)
    dp = data_parallel_size(config, world_size)
    if t.global_batch_size is None:
        t.global_batch_size = t.micro_batch_size * dp
    _require(
        t.global_batch_size % (t.micro_batch_size * dp) == 0,
        f"--global-batch-size {t.global_batch_size} is not a multiple of --micro-batch-size "
        f"{t.micro_batch_size} x data-parallel size {dp} = {t.micro_batch_size * dp}",
    )
    sizes = [t.global_batch_size]
    if t.rampup_batch_size:
        _validate_rampup(t, t.micro_batch_size * dp)
        sizes += range(t.rampup_batch_size[0], t.global_batch_size, t.rampup_batch_size[1])
    for size in sizes:
        _validate_micro_batches(config.parallel, size // (t.micro_batch_size * dp))
    if t.train_samples is not None:
        iterations = _iterations(t)
        _require(
            t.train_iters in (None, iterations),
            f"--train-iters {t.train_iters} and --train-samples {t.train_samples}, which are "
            f"{iterations} steps: give one of them",
        )
        t.train_iters = iterations
    _require(t.train_iters is not None, "--train-iters is missing: how many steps to train")
    _require_at_least_zero(t, "eval_iters", "eval_interval", "seed")
    _require_at_least_zero(o, "clip_grad", "weight_decay", "adam_eps", "sgd_momentum")
    _require_at_least_zero(config.data, "num_workers")
    _require_at_least_zero(config.model, "init_method_std", "diff_lambda_std")
    _require(t.seed < 2**32, f"--seed is {t.seed}, must be below 2**32")
    _require_positive(t, "exit_interval", "exit_duration_in_mins")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"):
        beta = getattr(o, name)
        _require(
            0 <= beta < 1, f"--{name.replace('_', '-')} is {beta}, must be at least 0 and below 1"
        )
    _require(
        t.deepspeed or t.deepspeed_config is None,
        f"--deepspeed-config {t.deepspeed_config} is given without --deepspeed",
    )
    _require(0 <= o.min_lr <= o.lr, f"--min-lr {o.min_lr} must lie between 0 and --lr {o.lr}")
    decay = o.lr_decay_iters or t.train_iters or 0
    _require(
        0 <= o.lr_warmup_iters <= decay or o.lr_decay_samples is not None,
        f"--lr-warmup-iters {o.lr_warmup_iters} is longer than the schedule of {decay} steps",
    )
    _require(
        o.main_weights == "float32" or t.bf16,
        f"--main-weights {o.main_weights} is a way to round bfloat16 parameters: give --bf16",
    )
    _require(
        o.lambda_lr_multiplier == 1 or "diff_v1" in config.model.mixers,
        f"--lambda-lr-multiplier {o.lambda_lr_multiplier} is set, but no layer is diff_v1",
    )
    _require(
        o.loss_scale is None or t.fp16,
        f"--loss-scale {o.loss_scale} is for --fp16",
    )
    _require_positive(
        o, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    )
    _require(
        o.use_distributed_optimizer or not o.overlap_param_gather,
        "--overlap-param-gather needs --use-distributed-optimizer",
    )
    _require_positive(config.logging, "log_interval")
    _require_positive(
        t,
        "max_consecutive_skipped_iters",
        "loss_spike_sigma_factor",
    )
    _require(
        t.loss_spike_skip_iters is None
        or (t.loss_spike_sigma_factor is not None and config.checkpoint.save is not None),
        "--loss-spike-skip-iters needs --loss-spike-sigma-factor, and --save: without checkpoints "
        "there is nothing to go back to",
    )
    _require(
        t.loss_spike_skip_iters is None or t.loss_spike_skip_iters >= 2,
        f"--loss-spike-skip-iters {t.loss_spike_skip_iters} is less than 2, the step before a "
        "spike and the spike's own",
    )
    _require(
        t.loss_spike_window >= 4,
        f"--loss-spike-window {t.loss_spike_window} is too few for a median deviation; 4 or more",
    )
    _require(
        all(step > 0 for step in t.iterations_to_skip),
        f"--iterations-to-skip {min(t.iterations_to_skip, default=1)}: steps count from 1",
    )
    _validate_checkpoint(config.checkpoint)


def _validate_checkpoint(c: CheckpointConfig) -> None:
    intervals = ("save_interval", "keep_last_n_checkpoints", "save_retain_interval")
    _require_positive(c, *intervals, "non_persistent_save_interval")
    for name in (*intervals, "async_save", "non_persistent_save_interval"):
        _require(
            not getattr(c, name) or c.save is not None,
            f"--{name.replace('_', '-')} is given without --save: where should checkpoints go?",
        )
    _require(
        c.save_retain_interval is None or c.keep_last_n_checkpoints is not None,
        "--save-retain-interval is given without --keep-last-n-checkpoints: everything is kept",
    )
    places = [c.non_persistent_global_ckpt_dir, c.non_persistent_local_ckpt_dir]
    given = sum(place is not None for place in places)
    _require(
        given <= 1,
        "give one of --non-persistent-global-ckpt-dir and --non-persistent-local-ckpt-dir",
    )
    _require(
        c.non_persistent_save_interval is None or given == 1,
        "--non-persistent-save-interval needs --non-persistent-global-ckpt-dir or "
        "--non-persistent-local-ckpt-dir",
    )
    _require(
        all(
            c.save is None or p is None or Path(p).resolve() != Path(c.save).resolve()
            for p in places
        ),
        f"--save {c.save} is the second place too, which holds only the last checkpoint",
    )


NATIVE_OPTIONS = {
    "main_weights": "a bf16 run keeps float32 main weights",
    "use_distributed_optimizer": "ZeRO 1 is its like; give --no-use-distributed-optimizer",
    "overlap_grad_reduce": "zero_optimization.overlap_comm is its like",
    "overlap_param_gather": "zero_optimization.overlap_comm is its like",
    "accumulate_allreduce_grads_in_fp32": "data_types.grad_accum_dtype is its like",
    "adam_kernel": "it runs torch's AdamW",
}
"""Options of the optimizer that only the native engine has, and what to do with DeepSpeed."""


def _validate_deepspeed(config: Config) -> None:
    p, t, o = config.parallel, config.training, config.optimizer
    for name, used in {
        f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}": (
            p.pipeline_model_parallel_size > 1
        ),
        f"--context-parallel-size {p.context_parallel_size}": p.context_parallel_size > 1,
        "--fp64": t.fp64,
        "--optimizer muon": o.optimizer == "muon",
        "--loss-spike-skip-iters": t.loss_spike_skip_iters is not None,
        "--check-weight-hash-across-dp-replicas-interval": (
            t.check_weight_hash_across_dp_replicas_interval is not None
        ),
    }.items():
        _require(not used, f"--deepspeed does not go with {name}; train without --deepspeed")
    for name, instead in NATIVE_OPTIONS.items():
        value = getattr(o, name)
        _require(
            value == getattr(OptimizerConfig(), name),
            f"--{name.replace('_', '-')} ({value}) is the native engine's, and --deepspeed would "
            f"ignore it: {instead}",
        )
    groups, tp = config.model.query_groups, p.tensor_model_parallel_size
    _require(
        groups % tp == 0,
        f"--deepspeed would count the gradients of copied key/value groups more than once: "
        f"--num-query-groups {groups} is not a multiple of --tensor-model-parallel-size {tp}",
    )
