"""The options of a run: dataclasses, each field with its default and its help text."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that can not run; the message says what to change."""


def _option(default: Any, text: str, *, aliases: dict[str, Any] | None = None) -> Any:
    """A field with its help text. `aliases` are further flags that set it to a constant."""
    metadata = {"help": text, "aliases": aliases or {}}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


TokenMixer = Literal["standard", "diff_v1", "diff_v2", "delta_net", "gated_delta_net"]
MIXER_SYMBOLS: dict[str, TokenMixer] = {
    "*": "standard",
    "1": "diff_v1",
    "2": "diff_v2",
    "D": "delta_net",
    "G": "gated_delta_net",
}
DELTA_MIXERS = ("delta_net", "gated_delta_net")


@dataclass
class ModelConfig:
    """Model"""

    num_layers: int = _option(12, "number of blocks")
    hidden_size: int = _option(768, "width of the residual stream")
    num_attention_heads: int = _option(
        12, "output heads; a differential head is one output head with two query heads"
    )
    num_query_groups: int | None = _option(
        None, "key/value groups, each shared by heads / groups output heads; all heads by default"
    )
    kv_channels: int | None = _option(
        None, "width of a query head; hidden / heads by default, half of it for diff_v1"
    )
    ffn_hidden_size: int | None = _option(
        None, "width of the MLP; 4 x hidden by default, 8/3 x hidden rounded up to 64 with SwiGLU"
    )
    token_mixer: TokenMixer = _option("diff_v2", "token mixer of every layer")
    hybrid_layer_pattern: str | None = _option(
        None,
        "one symbol a layer, repeated to all: * standard, 1 diff_v1, 2 diff_v2, D delta_net, "
        "G gated_delta_net; DDD2 makes every fourth layer an attention",
    )
    swiglu: bool = _option(True, "gated MLP with SiLU instead of GELU")
    mlp_bias: bool = _option(False, "biases in the MLP", aliases={"--disable-bias-linear": False})
    normalization: Literal["RMSNorm", "LayerNorm"] = _option("RMSNorm", "norm of the blocks")
    norm_epsilon: float = _option(1e-5, "epsilon of all norms")
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = _option(
        "rope", "how positions enter the model"
    )
    rotary_base: float = _option(10000.0, "base of the rotary frequencies")
    use_rope_scaling: bool = _option(
        False, "stretch the rotary frequencies as Llama 3.1 does, from a context of 8192"
    )
    rope_scaling_factor: float = _option(8.0, "by how much; 8 for Llama 3.1 and 32 for Llama 3.2")
    rotary_interleaved: bool = _option(
        True, "rotate pairs (2i, 2i + 1), as published for DIFF, instead of the two halves"
    )
    max_position_embeddings: int | None = _option(
        None, "length of the learned positions; the sequence length by default"
    )
    untie_embeddings_and_output_weights: bool = _option(False, "output matrix of its own")
    vocab_size: int | None = _option(None, "vocabulary; the tokenizer's by default")
    make_vocab_size_divisible_by: int = _option(
        128, "the vocabulary is padded in memory to a multiple of this times the tensor size"
    )
    init_method_std: float = _option(0.02, "standard deviation of initial weights")
    diff_lambda_init: float | None = _option(
        None, "diff_v1: constant lambda_init; 0.8 - 0.6 exp(-0.3 layer) by default, layer from 0"
    )
    diff_lambda_std: float = _option(0.1, "diff_v1: standard deviation of the lambda vectors")
    diff_lambda_per_head: bool = _option(False, "diff_v1: lambda vectors of its own for each head")
    diff_head_norm: Literal["weight", "no_weight", "none"] = _option(
        "weight", "diff_v1: per-head RMSNorm with a weight, without one, or no norm"
    )
    diff_value_width: Literal["2d", "d"] = _option(
        "2d", "diff_v1: width of a value head in units of the query head's width d"
    )
    delta_num_heads: int | None = _option(
        None, "heads of a delta layer; --num-attention-heads by default"
    )
    delta_expand_k: float = _option(1.0, "delta layers: width of all keys in units of hidden")
    delta_expand_v: float = _option(1.0, "delta layers: width of all values in units of hidden")
    delta_use_beta: bool = _option(True, "delta layers: learned writing strength instead of 1")
    delta_allow_neg_eigval: bool = _option(False, "delta layers: writing strength up to 2, not 1")
    delta_use_gate: bool | None = _option(
        None, "delta layers: SiLU gate on the output; only gated_delta_net has it by default"
    )
    delta_conv_size: int = _option(4, "delta layers: width of the short convolution; 0 for none")
    delta_conv_bias: bool = _option(False, "delta layers: bias in the short convolution")
    delta_qk_activation: Literal["silu", "relu", "elu", "identity"] = _option(
        "silu", "delta layers: activation of q and k (elu is elu(x) + 1)"
    )
    delta_qk_norm: Literal["l2", "sum"] = _option("l2", "delta layers: norm of q and k")
    attention_dropout: float = _option(0.0, "accepted at 0 for Megatron's scripts; not offered")
    hidden_dropout: float = _option(0.0, "accepted at 0 for Megatron's scripts; not offered")

    def mixer_of_layer(self, layer: int) -> TokenMixer:
        """The token mixer of a global 0-based layer."""
        if self.hybrid_layer_pattern is None:
            return self.token_mixer
        pattern = self.hybrid_layer_pattern
        return MIXER_SYMBOLS[pattern[layer % len(pattern)]]

    def head_width(self, mixer: TokenMixer) -> int:
        """Width d of a query head. DIFF V1 has half as many heads, and its pairs are 2d wide."""
        if self.kv_channels is not None:
            return self.kv_channels
        return self.hidden_size // (self.num_attention_heads * (2 if mixer == "diff_v1" else 1))

    @property
    def mixers(self) -> set[TokenMixer]:
        """The token mixers of all layers, of a valid pattern."""
        if self.hybrid_layer_pattern is None:
            return {self.token_mixer}
        return {MIXER_SYMBOLS[symbol] for symbol in self.hybrid_layer_pattern}

    @property
    def delta_heads(self) -> int:
        return self.delta_num_heads or self.num_attention_heads

    def delta_gate(self, mixer: TokenMixer) -> bool:
        """Whether a delta layer has an output gate."""
        return mixer == "gated_delta_net" if self.delta_use_gate is None else self.delta_use_gate

    @property
    def delta_widths(self) -> tuple[int, int]:
        """Widths of a key and of a value head of the delta layers."""
        hidden, heads = self.hidden_size, self.delta_heads
        widths = (hidden * self.delta_expand_k / heads, hidden * self.delta_expand_v / heads)
        return round(widths[0]), round(widths[1])

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return math.ceil(self.hidden_size * 8 / 3 / 64) * 64
        return 4 * self.hidden_size


@dataclass
class ParallelConfig:
    """Parallelism"""

    tensor_model_parallel_size: int = _option(1, "ranks that share every layer")
    sequence_parallel: bool = _option(
        False, "shard the norms' activations along the sequence over the tensor-parallel ranks"
    )
    tp_comm_overlap: bool = _option(
        False,
        "under --sequence-parallel the copy engines of a host's GPUs carry the messages of linear "
        "layers beside products, instead of NCCL",
    )
    pipeline_model_parallel_size: int = _option(1, "ranks that share the layers among them")
    num_virtual_stages_per_pipeline_rank: int = _option(
        1, "runs of layers on each pipeline rank; more than one needs the interleaved schedule"
    )
    pipeline_model_parallel_layout: str = _option(
        "even", "layers of each stage: even, balanced (by cost), or their numbers, such as 5,6,6,5"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] | None = _option(
        None,
        "order of micro-batches; 1f1b by default, interleaved_1f1b with virtual stages; there are "
        "no zero-bubble schedules, which would not be exact",
    )
    context_parallel_size: int = _option(1, "ranks that share every sequence")
    recompute_granularity: Literal["full", "selective"] | None = _option(
        None,
        "compute again in backward instead of keeping: whole layers, or --recompute-modules",
        aliases={"--recompute-activations": "selective"},
    )
    recompute_modules: list[str] = _option(
        ["core_attn"],
        "what selective recomputation computes again: core_attn, the attention operator; "
        "layernorm, the norms of blocks and of DIFF V1's heads; mlp_act, the MLP's activation",
    )
    recompute_method: Literal["uniform", "block"] | None = _option(
        None,
        "full recomputation: all layers in runs of --recompute-num-layers (uniform, the default), "
        "or that many layers of each stage one by one (block)",
    )
    recompute_num_layers: int = _option(1, "see --recompute-method")

    @property
    def schedule(self) -> Literal["gpipe", "1f1b", "interleaved_1f1b"]:
        """The pipeline schedule, given or implied."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        return "1f1b" if self.num_virtual_stages_per_pipeline_rank == 1 else "interleaved_1f1b"

    distributed_backend: Literal["nccl", "gloo"] | None = _option(
        None, "nccl on GPUs and gloo on CPUs by default"
    )
    distributed_timeout_minutes: float = _option(
        10.0,
        "a collective that waits longer ends the run; a rank waits an hour at least for a save",
    )


@dataclass
class TrainingConfig:
    """Training"""

    seq_length: int = _option(1024, "tokens in a sequence")
    micro_batch_size: int = _option(1, "sequences in one forward pass of one data-parallel rank")
    global_batch_size: int | None = _option(
        None, "sequences in one step; micro-batch x data-parallel size by default"
    )
    rampup_batch_size: list[int] = _option(
        [], "START INCREMENT SAMPLES: grow the global batch from START over SAMPLES samples"
    )
    train_iters: int | None = _option(None, "steps to train")
    train_samples: int | None = _option(None, "sequences to train on, instead of --train-iters")
    seed: int = _option(1234, "seed of the weights and of the sample order")
    bf16: bool = _option(False, "parameters in bfloat16, with float32 main weights")
    fp16: bool = _option(False, "parameters in float16, with float32 main weights and loss scaling")
    fp8: bool = _option(
        False, "with --bf16, on Hopper: linear layers of the blocks computed in float8 by torchao"
    )
    fp64: bool = _option(False, "everything in float64, to compare splits exactly")
    device: Literal["cpu", "cuda"] | None = _option(None, "cuda where there is one by default")
    deepspeed: bool = _option(False, "train on DeepSpeed's engine: ZeRO 0 to 3, offload")
    deepspeed_config: str | None = _option(None, "JSON file of DeepSpeed, as in configs/deepspeed/")
    deterministic_mode: bool = _option(False, "bitwise repeatable kernels on GPUs")
    check_weight_hash_across_dp_replicas_interval: int | None = _option(
        None, "steps between checks that all copies of a parameter are bitwise equal"
    )
    max_consecutive_skipped_iters: int = _option(
        10,
        "end the run after this many steps in a row whose loss or gradient is not finite, beyond "
        "the search of fp16's loss scale",
    )
    loss_spike_sigma_factor: float | None = _option(
        None,
        "report losses this many robust standard deviations above the median of the last "
        "--loss-spike-window steps; 6 is a usual value",
    )
    loss_spike_window: int = _option(128, "steps that a loss is compared with")
    loss_spike_skip_iters: int | None = _option(
        None,
        "on a loss spike go back to the last checkpoint before it, and pass over the data of this "
        "many steps, beginning with the step before the spike",
    )
    iterations_to_skip: list[int] = _option([], "steps to pass over, with their data")
    eval_interval: int | None = _option(1000, "steps between evaluations; 0 only at the end")
    eval_iters: int = _option(100, "global batches in one evaluation; 0 for none")
    exit_interval: int | None = _option(None, "save and exit at steps divisible by this")
    exit_duration_in_mins: float | None = _option(None, "save and exit after this many minutes")

    @property
    def dtype(self) -> str:
        """torch's name of the parameters' type."""
        if self.bf16:
            return "bfloat16"
        if self.fp16:
            return "float16"
        return "float64" if self.fp64 else "float32"

    def batch_size(self, consumed_samples: int) -> int:
        """Sequences in the step that begins after `consumed_samples`, of a valid configuration.

        As in Megatron-LM, a ramp-up stays equally long at each size below the global batch.
        """
        assert self.global_batch_size is not None
        if not self.rampup_batch_size:
            return self.global_batch_size
        start, increment, samples = self.rampup_batch_size
        increments = (self.global_batch_size - start) // increment
        if consumed_samples > samples or not increments or not samples:
            return self.global_batch_size
        done = int(consumed_samples / (samples / increments))
        return start + min(done, increments) * increment

    @property
    def total_samples(self) -> int:
        """Sequences of the whole training, of a valid configuration."""
        assert self.train_iters is not None and self.global_batch_size is not None
        return self.train_samples or self.train_iters * self.global_batch_size


@dataclass
class OptimizerConfig:
    """Optimizer and schedule"""

    optimizer: Literal["adam", "sgd", "muon"] = _option(
        "adam", "AdamW, SGD with momentum, or Muon for matrices and AdamW for the rest"
    )
    lr: float = _option(3e-4, "peak learning rate")
    min_lr: float = _option(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = _option(
        "cosine", "shape of the decay"
    )
    lr_decay_iters: int | None = _option(None, "steps to decay over; all by default")
    lr_decay_samples: int | None = _option(None, "the same in samples")
    lr_warmup_iters: int = _option(0, "steps of linear warmup")
    lr_warmup_samples: int = _option(0, "the same in samples")
    lr_warmup_fraction: float | None = _option(None, "the same as a share of the decay's length")
    lr_warmup_init: float = _option(0.0, "learning rate at the start of the warmup")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = _option(
        "exponential", "WSD: shape of the decay at the end"
    )
    lr_wsd_decay_iters: int | None = _option(None, "WSD: steps of the decay at the end")
    lr_wsd_decay_samples: int | None = _option(None, "the same in samples")
    override_opt_param_scheduler: bool = _option(
        False, "resume with this schedule where the checkpoint has another"
    )
    use_checkpoint_opt_param_scheduler: bool = _option(
        False, "resume with the checkpoint's schedule where this one differs"
    )
    weight_decay: float = _option(0.1, "decoupled weight decay of matrices and embeddings")
    start_weight_decay: float | None = _option(None, "decay at the start, if it changes")
    end_weight_decay: float | None = _option(None, "decay at the end, if it changes")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = _option(
        "constant", "how the decay goes from start to end over the run"
    )
    clip_grad: float = _option(1.0, "largest global gradient norm; 0 does not clip")
    adam_beta1: float = _option(0.9, "decay of the first moment")
    adam_beta2: float = _option(0.95, "decay of the second moment")
    adam_eps: float = _option(1e-8, "added to the root of the second moment")
    adam_kernel: Literal["auto", "torch", "apex"] = _option(
        "auto",
        "fused AdamW: torch's, NVIDIA Apex's, or the best: 16-bit parameters on GPUs in one pass, "
        "others by the faster of the installed ones",
    )
    sgd_momentum: float = _option(0.9, "momentum of SGD; 0 keeps no state")
    muon_momentum: float = _option(0.95, "decay of Muon's Nesterov momentum")
    muon_num_ns_steps: int = _option(5, "Newton-Schulz steps of Muon")
    muon_extra_scale_factor: float = _option(
        0.2, "Muon's update in units of sqrt(larger side); 0.2 is the size of AdamW's"
    )
    lambda_lr_multiplier: float = _option(
        1.0, "diff_v1: learning rate of the lambda vectors in units of the others'"
    )
    loss_scale: float | None = _option(None, "fp16: constant loss scale; dynamic by default")
    initial_loss_scale: float = _option(2.0**32, "fp16: first dynamic loss scale")
    min_loss_scale: float = _option(1.0, "fp16: smallest dynamic loss scale")
    loss_scale_window: int = _option(1000, "fp16: steps without overflow that double the scale")
    hysteresis: int = _option(2, "fp16: overflows before the scale is halved")
    main_weights: Literal["float32", "kahan", "stochastic"] = _option(
        "float32",
        "bf16: float32 main weights, or none and the rounding error in 16 bits, or random rounding",
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = _option(
        "fp32", "AdamW's first moments of bf16 parameters; bf16 is rounded at random"
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = _option("fp32", "the second moments likewise")
    use_distributed_optimizer: bool = _option(
        False, "shard main weights and moments over the data-parallel ranks"
    )
    overlap_grad_reduce: bool = _option(
        True, "reduce gradients over data-parallel ranks while backward runs"
    )
    overlap_param_gather: bool = _option(
        False, "gather the updated parameters of the sharded optimizer while forward runs"
    )
    accumulate_allreduce_grads_in_fp32: bool = _option(
        True, "accumulate and reduce gradients in float32, else in the parameters' type"
    )


@dataclass
class DataConfig:
    """Data"""

    data_path: list[str] = _option([], "prefixes of .bin/.idx files, or weight prefix pairs")
    train_data_path: list[str] = _option([], "as --data-path, for training alone")
    valid_data_path: list[str] = _option([], "as --data-path, for validation alone")
    valid_data_sets: list[str] = _option(
        [], "more validation sets, each logged by its name: name=prefix, or name=0.3,a,0.7,b"
    )
    test_data_path: list[str] = _option([], "as --data-path, for the test at the end alone")
    data_args_path: str | None = _option(None, "file that holds the words of --data-path")
    per_split_data_args_path: str | None = _option(
        None, "JSON file with the lists for train, valid and test"
    )
    split: str = _option("969,30,1", "shares of --data-path for training, validation and test")
    packing: Literal["concat", "best-fit"] = _option(
        "concat", "documents one after another, or whole ones packed into samples"
    )
    mmap_bin_files: bool = _option(True, "memory-map the tokens, else read them where needed")
    data_cache_path: str | None = _option(None, "folder of the sample indices")
    tokenizer_type: str = _option("SentencePieceTokenizer", "kind of tokenizer")
    tokenizer_model: str | None = _option(None, "file of the tokenizer")
    vocab_file: str | None = _option(None, "vocabulary of a GPT-2 tokenizer")
    merge_file: str | None = _option(None, "merges of a GPT-2 tokenizer")
    tiktoken_pattern: Literal["cl100k", "o200k"] = _option(
        "cl100k", "how a tiktoken tokenizer cuts text into words"
    )
    reset_position_ids: bool = _option(False, "positions start anew in every document")
    reset_attention_mask: bool = _option(False, "documents do not attend to each other")
    eod_mask_loss: bool = _option(False, "no loss where the input is an end of document")
    num_workers: int = _option(2, "threads that make batches ahead; 0 makes them in the loop")


@dataclass
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = _option(None, "folder to save checkpoints in")
    save_interval: int | None = _option(None, "steps between saves; only at the end by default")
    async_save: bool = _option(False, "write in the background; training waits for a copy only")
    keep_last_n_checkpoints: int | None = _option(None, "how many to keep; all by default")
    save_retain_interval: int | None = _option(
        None, "keep steps divisible by this beyond --keep-last-n-checkpoints"
    )
    non_persistent_save_interval: int | None = _option(
        None, "steps between saves to a second place (the next two), which holds only the last"
    )
    non_persistent_global_ckpt_dir: str | None = _option(
        None,
        "second, faster folder that all ranks see, such as a memory disk; a run also resumes "
        "from here",
    )
    non_persistent_local_ckpt_dir: str | None = _option(
        None,
        "second folder that each node has for itself; ranks resume from here if none of them has "
        "lost its part, and the split is the same",
    )
    load: str | None = _option(None, "folder to resume from")
    ckpt_step: int | None = _option(None, "step to load; the newest by default")
    finetune: bool = _option(False, "load weights only and start at step 0")
    load_optim: bool = _option(
        True, "resume the optimizer's state too; without it, another optimizer can go on"
    )
    allow_data_change: bool = _option(
        False, "resume although the data, or the order of samples, are not the checkpoint's"
    )
    exit_on_missing_checkpoint: bool = _option(
        False, "refuse to start from random weights when --load has no checkpoint"
    )


@dataclass
class LoggingConfig:
    """Logging"""

    log_interval: int = _option(10, "steps between log lines")
    log_straggler: bool = _option(False, "tell the slowest rank and its share of a step")
    log_dir: str | None = _option(None, "folder of log.txt, metrics.jsonl and config.yaml")
    tensorboard_dir: str | None = _option(None, "folder of TensorBoard events")
    wandb_project: str | None = _option(None, "Weights & Biases project to log to")
    wandb_exp_name: str | None = _option(None, "name of the run at Weights & Biases")


@dataclass
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def sections(config: Config) -> dict[str, Any]:
    """The section dataclasses of `config` by name."""
    return {f.name: getattr(config, f.name) for f in fields(config)}
