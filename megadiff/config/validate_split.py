"""Which splits over ranks a model and its batch allow."""

from megadiff.config.options import DELTA_MIXERS, Config, ModelConfig, ParallelConfig
from megadiff.config.require import require, require_positive


def validate_split(config: Config, world_size: int) -> None:
    m, p = config.model, config.parallel
    require_positive(
        p, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "num_virtual_stages_per_pipeline_rank", "recompute_num_layers",
        "distributed_timeout_minutes",
    )  # fmt: skip
    require(
        p.distributed_timeout_minutes <= 525_600,
        f"--distributed-timeout-minutes {p.distributed_timeout_minutes} is more than a year",
    )
    tp, pp, cp = (
        p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    )  # fmt: skip
    require(
        world_size % (tp * pp * cp) == 0,
        f"the world size {world_size} is not a multiple of --tensor-model-parallel-size {tp} x "
        f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp}",
    )
    attends = not m.mixers.issubset(DELTA_MIXERS)
    require(
        not attends or m.num_attention_heads % tp == 0,
        f"--num-attention-heads {m.num_attention_heads} is not a multiple of "
        f"--tensor-model-parallel-size {tp}",
    )
    require(
        m.mixers.isdisjoint(DELTA_MIXERS) or m.delta_heads % (tp * cp) == 0,
        f"the delta layers' {m.delta_heads} heads are not a multiple of "
        f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} = {tp * cp}; set "
        "--delta-num-heads",
    )
    groups = m.query_groups
    require(
        not attends or groups % tp == 0 or tp % groups == 0,
        f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the "
        "other",
    )
    require(
        m.ffn_size % tp == 0,
        f"the MLP's width {m.ffn_size} is not a multiple of --tensor-model-parallel-size {tp}",
    )
    seq_length = config.training.seq_length
    require(
        cp == 1 or seq_length % (2 * cp) == 0,
        f"--seq-length {seq_length} is not a multiple of 2 x --context-parallel-size {cp} = "
        f"{2 * cp}: each rank takes one part of the head and one of the tail",
    )
    require(
        not p.sequence_parallel or seq_length // cp % tp == 0,
        f"--seq-length {seq_length} is not a multiple of --context-parallel-size {cp} x "
        f"--tensor-model-parallel-size {tp} = {cp * tp}, as --sequence-parallel needs",
    )
    require(
        not p.tp_comm_overlap or (p.sequence_parallel and tp > 1),
        "--tp-comm-overlap is for the messages of --sequence-parallel; add that, with "
        "--tensor-model-parallel-size of 2 or more",
    )
    _validate_pipeline(m, p)
    require(
        p.recompute_granularity == "full" or p.recompute_method is None,
        f"--recompute-method {p.recompute_method} needs --recompute-granularity full",
    )
    require(
        p.recompute_granularity == "selective"
        or p.recompute_modules == ParallelConfig().recompute_modules,
        f"--recompute-modules {' '.join(p.recompute_modules)} needs --recompute-granularity "
        "selective",
    )
    strange = set(p.recompute_modules) - {"core_attn", "layernorm", "mlp_act"}
    require(
        not strange,
        f"--recompute-modules may hold core_attn, layernorm and mlp_act, not {' '.join(strange)}",
    )
    require(
        p.recompute_granularity == "full" or p.recompute_num_layers == 1,
        f"--recompute-num-layers {p.recompute_num_layers} needs --recompute-granularity full",
    )
    require(
        p.recompute_num_layers <= m.num_layers,
        f"--recompute-num-layers {p.recompute_num_layers} is more than --num-layers {m.num_layers}",
    )


def _validate_pipeline(m: ModelConfig, p: ParallelConfig) -> None:
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    stages = pp * virtual
    require(
        pp > 1 or virtual == 1,
        f"--num-virtual-stages-per-pipeline-rank {virtual} needs --pipeline-model-parallel-size "
        f"above 1",
    )
    require(
        virtual == 1 or p.pipeline_schedule in (None, "interleaved_1f1b"),
        f"--pipeline-schedule {p.pipeline_schedule} runs one stage on each rank, and "
        f"--num-virtual-stages-per-pipeline-rank is {virtual}",
    )
    require(
        virtual > 1 or p.pipeline_schedule != "interleaved_1f1b",
        "--pipeline-schedule interleaved_1f1b needs --num-virtual-stages-per-pipeline-rank above 1",
    )
    require(
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
        require(
            num_layers % stages == 0,
            f"--num-layers {num_layers} do not divide evenly among {stages} pipeline stages; give "
            "--pipeline-model-parallel-layout balanced, or the number of layers of each stage",
        )
        return [num_layers // stages] * stages
    parts = [part.strip() for part in layout.split(",")]
    require(
        all(part.isdecimal() and int(part) > 0 for part in parts),
        f"--pipeline-model-parallel-layout {layout!r} is neither even, balanced nor a list of "
        "numbers of layers such as 5,6,6,5",
    )
    sizes = [int(part) for part in parts]
    require(
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


def validate_micro_batches(p: ParallelConfig, micro_batches: int) -> None:
    pp, virtual = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    require(
        pp == 1 or p.pipeline_schedule == "gpipe" or micro_batches >= pp,
        f"a step has {micro_batches} micro-batches, fewer than --pipeline-model-parallel-size {pp}:"
        " raise --global-batch-size or lower --micro-batch-size",
    )
    require(
        virtual == 1 or micro_batches % pp == 0,
        f"the interleaved schedule needs micro-batches in multiples of "
        f"--pipeline-model-parallel-size {pp}, and a step has {micro_batches}",
    )
