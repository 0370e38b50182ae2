"""The configuration of a run: dataclasses, read from YAML and flags, validated once.

Every field is a flag, under Megatron-LM's name where it has one (`num_layers` is `--num-layers`),
and a key of its section in a YAML file; a flag wins over the file. Nothing here imports torch.
"""

import argparse
import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml


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
        """The token mixers of all layers."""
        return {self.mixer_of_layer(layer) for layer in range(self.num_layers)}

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
    pipeline_model_parallel_size: int = _option(1, "ranks that share the layers among them")
    num_virtual_stages_per_pipeline_rank: int = _option(
        1, "runs of layers on each pipeline rank; more than one needs the interleaved schedule"
    )
    pipeline_model_parallel_layout: str = _option(
        "even", "layers of each stage: even, balanced (by cost), or their numbers, such as 5,6,6,5"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] | None = _option(
        None, "order of micro-batches; 1f1b by default, interleaved_1f1b with virtual stages"
    )
    context_parallel_size: int = _option(1, "ranks that share every sequence")
    recompute_granularity: Literal["full", "selective"] | None = _option(
        None,
        "compute again in backward instead of keeping: whole layers, or attention alone",
        aliases={"--recompute-activations": "selective"},
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
        10.0, "a collective that waits longer ends the run"
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
    fp64: bool = _option(False, "everything in float64, to compare splits exactly")
    device: Literal["cpu", "cuda"] | None = _option(None, "cuda where there is one by default")
    deepspeed: bool = _option(False, "train on DeepSpeed's engine: ZeRO 0 to 3, offload")
    deepspeed_config: str | None = _option(None, "JSON file of DeepSpeed, as in configs/deepspeed/")
    deterministic_mode: bool = _option(False, "bitwise repeatable kernels on GPUs")
    check_weight_hash_across_dp_replicas_interval: int | None = _option(
        None, "steps between checks that all copies of a parameter are bitwise equal"
    )
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
        False,
        "resume with this schedule where the checkpoint has another",
    )
    use_checkpoint_opt_param_scheduler: bool = _option(
        False,
        "resume with the checkpoint's schedule where this one differs",
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
    adam_kernel: Literal["torch", "apex"] = _option(
        "torch", "fused AdamW of torch, or of NVIDIA Apex if it is installed"
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
        None, "steps between saves to --non-persistent-global-ckpt-dir, which holds only the last"
    )
    non_persistent_global_ckpt_dir: str | None = _option(
        None,
        "second, faster folder that all ranks see, such as a memory disk; a run also resumes "
        "from here",
    )
    load: str | None = _option(None, "folder to resume from")
    ckpt_step: int | None = _option(None, "step to load; the newest by default")
    finetune: bool = _option(False, "load weights only and start at step 0")
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
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


# ------------------------------------------------------------------------------- reading


def load_config(argv: list[str]) -> Config:
    """The configuration of the command line `argv`: defaults, then `--config` files, then flags.

    Raises ConfigError for unknown keys, values of a wrong type and unreadable files. `--help`
    prints the flags and exits.
    """
    parser = _parser()
    flags, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    if unknown:
        known = [o for action in parser._actions for o in action.option_strings]
        flag = next((u for u in unknown if u.startswith("-")), unknown[0])
        raise ConfigError(f"unknown flag {flag}{_nearest(flag.split('=')[0], known)}")
    config = Config()
    for path in flags.config or []:
        read_config_file(config, path)
    for name, section in sections(config).items():
        for f in dataclasses.fields(section):
            value = getattr(flags, f"{name}.{f.name}", None)
            if value is not None:
                setattr(section, f.name, value)
    return config


def _with_dashes(word: str) -> str:
    """A flag written with underscores (`--deepspeed_config`, `--override-opt_param-scheduler`)."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def read_config_file(config: Config, path: str) -> None:
    """Set the fields that the YAML file `path` names, after those of its `base` file, if any.

    `base` is a path relative to the file itself.
    """
    values = read_yaml(path)
    base = values.pop("base", None)
    if base is not None:
        read_config_file(config, str(Path(path).parent / base))
    update_config(config, values, source=path)


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected sections such as `model:`, found {type(values).__name__}"
        )
    return values


def update_config(config: Config, values: dict[str, Any], source: str) -> None:
    """Set the fields named in nested `values`; `source` names their origin in error messages."""
    known = sections(config)
    for name, entries in values.items():
        if name not in known:
            raise ConfigError(f"{source}: unknown section {name!r}{_nearest(str(name), known)}")
        hints = get_type_hints(type(known[name]))
        for key, value in (entries or {}).items():
            key = str(key).replace("-", "_")
            if key not in hints:
                raise ConfigError(f"{source}: unknown key {name}.{key}{_nearest(key, hints)}")
            setattr(known[name], key, _convert(value, hints[key], f"{source}: {name}.{key}"))


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as `update_config` takes them."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s [--config FILE] [flags]",
        description="Pretrain a Differential Transformer.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
    )
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="YAML file; may be repeated"
    )
    for name, section in sections(Config()).items():
        group = parser.add_argument_group(type(section).__doc__ or name)
        hints = get_type_hints(type(section))
        for f in dataclasses.fields(section):
            _add_flag(group, f"{name}.{f.name}", f, hints[f.name])
    return parser


def _add_flag(group: Any, dest: str, f: dataclasses.Field, hint: Any) -> None:
    default = f.default if f.default is not dataclasses.MISSING else None
    text = f.metadata["help"] + ("" if default is None else f" [{default}]")
    flag = "--" + f.name.replace("_", "-")
    hint = _without_none(hint)
    if hint is bool:
        group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(hint) is list:
        group.add_argument(
            flag,
            dest=dest,
            type=get_args(hint)[0],
            nargs="+",
            metavar=f.name.split("_")[-1].upper(),
            help=text,
        )
    elif get_origin(hint) is Literal:
        group.add_argument(flag, dest=dest, choices=get_args(hint), help=text)
    else:
        metavar = {int: "N", float: "X"}.get(hint, f.name.split("_")[-1].upper())
        group.add_argument(flag, dest=dest, type=hint, metavar=metavar, help=text)
    for alias, constant in f.metadata["aliases"].items():
        group.add_argument(
            alias, dest=dest, action="store_const", const=constant, help=f"{f.name} {constant}"
        )


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union:
        return next(h for h in get_args(hint) if h is not type(None))
    return hint


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` from YAML as `hint` says. YAML reads 1e-4 as text, so text is parsed for numbers."""
    optional = hint is not _without_none(hint)
    hint = _without_none(hint)
    if value is None and optional:
        return None
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, get_args(hint)))}")
    if get_origin(hint) is list:
        if isinstance(value, list):
            return [_convert(v, get_args(hint)[0], where) for v in value]
        raise ConfigError(f"{where}: expected a list, found {value!r}")
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is bool and isinstance(value, bool):
        return value
    if (
        hint in (int, float)
        and isinstance(value, (int, float, str))
        and not isinstance(value, bool)
    ):
        try:
            if hint is float:
                return float(value)
            if isinstance(value, int) or float(value).is_integer():
                return int(value) if isinstance(value, int) else int(float(value))
        except (ValueError, OverflowError):
            pass
    raise ConfigError(f"{where}: expected {hint.__name__}, found {value!r}")


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


# ------------------------------------------------------------------------------ validation


def validate(config: Config, world_size: int) -> None:
    """Refuse contradictions, with the numbers; fill `global_batch_size`. Starts no process group.

    Raises ConfigError.
    """
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
    if m.position_embedding_type == "learned_absolute":
        positions = m.max_position_embeddings or seq_length
        _require(
            seq_length <= positions,
            f"--seq-length {seq_length} is longer than --max-position-embeddings {positions}",
        )


def _validate_delta(m: ModelConfig) -> None:
    if m.mixers.isdisjoint(DELTA_MIXERS):
        for f in dataclasses.fields(m):
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


def _validate_training(config: Config, world_size: int) -> None:
    t, o = config.training, config.optimizer
    _require_positive(t, "seq_length", "micro_batch_size", "global_batch_size")
    _require_positive(t, "train_iters", "train_samples")
    _require(t.bf16 + t.fp16 + t.fp64 <= 1, "give at most one of --bf16, --fp16 and --fp64")
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
    _require(0 <= o.min_lr <= o.lr, f"--min-lr {o.min_lr} must lie between 0 and --lr {o.lr}")
    decay = o.lr_decay_iters or t.train_iters or 0
    _require(
        0 <= o.lr_warmup_iters <= decay,
        f"--lr-warmup-iters {o.lr_warmup_iters} is longer than the schedule of {decay} steps",
    )
    _require(
        o.main_weights == "float32" or t.bf16,
        f"--main-weights {o.main_weights} is a way to round bfloat16 parameters: give --bf16",
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
    c = config.checkpoint
    _require_positive(
        c,
        "save_interval",
        "keep_last_n_checkpoints",
        "save_retain_interval",
        "non_persistent_save_interval",
    )
    _require_positive(config.logging, "log_interval")
    _require(
        c.save_interval is None or c.save is not None,
        "--save-interval is given without --save: where should checkpoints go?",
    )
    _require(
        c.non_persistent_save_interval is None
        or (c.save is not None and c.non_persistent_global_ckpt_dir is not None),
        "--non-persistent-save-interval needs --non-persistent-global-ckpt-dir, and --save too",
    )


def _validate_deepspeed(config: Config) -> None:
    p, t, o = config.parallel, config.training, config.optimizer
    for name, used in {
        f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}": (
            p.pipeline_model_parallel_size > 1
        ),
        f"--context-parallel-size {p.context_parallel_size}": p.context_parallel_size > 1,
        "--fp64": t.fp64,
        "--optimizer muon": o.optimizer == "muon",
        f"--main-weights {o.main_weights}": o.main_weights != "float32",
        "--use-distributed-optimizer (ZeRO 1 is its like)": o.use_distributed_optimizer,
    }.items():
        _require(not used, f"--deepspeed does not go with {name}; train without --deepspeed")
    groups, tp = config.model.query_groups, p.tensor_model_parallel_size
    _require(
        groups % tp == 0,
        f"--deepspeed would count the gradients of copied key/value groups more than once: "
        f"--num-query-groups {groups} is not a multiple of --tensor-model-parallel-size {tp}",
    )
