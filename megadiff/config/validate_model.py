"""What a model cannot be."""

import math
from dataclasses import fields

from megadiff.config.options import DELTA_MIXERS, MIXER_SYMBOLS, ModelConfig
from megadiff.config.require import flag, require, require_positive


def validate_model(m: ModelConfig, seq_length: int) -> None:
    require_positive(
        m, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "ffn_hidden_size", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by",
        "norm_epsilon", "rotary_base", "rope_scaling_factor",
    )  # fmt: skip
    require(
        m.attention_dropout == 0 and m.hidden_dropout == 0,
        f"dropout is not offered: --attention-dropout is {m.attention_dropout} and "
        f"--hidden-dropout {m.hidden_dropout}; both must be 0",
    )
    require(
        m.num_attention_heads % m.query_groups == 0,
        f"--num-attention-heads {m.num_attention_heads} is not a multiple of "
        f"--num-query-groups {m.query_groups}",
    )
    pattern = m.hybrid_layer_pattern
    if pattern is not None:
        strange = set(pattern) - set(MIXER_SYMBOLS)
        require(
            bool(pattern) and not strange,
            f"--hybrid-layer-pattern {pattern!r} may only hold {' '.join(MIXER_SYMBOLS)}",
        )
        require(
            m.num_layers % len(pattern) == 0,
            f"--hybrid-layer-pattern has {len(pattern)} symbols, which do not divide "
            f"--num-layers {m.num_layers}",
        )
    _validate_delta(m)
    if "diff_v1" not in m.mixers:
        _require_defaults(m, "diff_", "diff_v1")
    for mixer in m.mixers.difference(DELTA_MIXERS):
        heads = m.num_attention_heads * (2 if mixer == "diff_v1" else 1)
        require(
            m.kv_channels is not None or m.hidden_size % heads == 0,
            f"--hidden-size {m.hidden_size} is not a multiple of the {heads} query widths of "
            f"{mixer} with --num-attention-heads {m.num_attention_heads}; set --kv-channels",
        )
        require(
            m.position_embedding_type != "rope" or m.head_width(mixer) % 2 == 0,
            f"rotary positions need an even head width, and {mixer} has {m.head_width(mixer)}",
        )
    require(
        m.use_rope_scaling or m.rope_scaling_factor == ModelConfig.rope_scaling_factor,
        f"--rope-scaling-factor {m.rope_scaling_factor} needs --use-rope-scaling",
    )
    if m.position_embedding_type == "learned_absolute":
        positions = m.max_position_embeddings or seq_length
        require(
            seq_length <= positions,
            f"--seq-length {seq_length} is longer than --max-position-embeddings {positions}",
        )


def _require_defaults(m: ModelConfig, prefix: str, layers: str) -> None:
    """The options of `layers`, of which there are none, are not set."""
    for f in fields(m):
        require(
            not f.name.startswith(prefix) or getattr(m, f.name) == f.default,
            f"{flag(f.name)} is set, but no layer is {layers}",
        )


def _validate_delta(m: ModelConfig) -> None:
    if m.mixers.isdisjoint(DELTA_MIXERS):
        _require_defaults(m, "delta_", f"one of {', '.join(DELTA_MIXERS)}")
        return
    require_positive(m, "delta_num_heads", "delta_expand_k", "delta_expand_v")
    heads = m.delta_heads
    for name, head_width in zip(("delta_expand_k", "delta_expand_v"), m.delta_widths, strict=True):
        width = m.hidden_size * getattr(m, name)
        require(
            head_width > 0 and math.isclose(head_width * heads, width),
            f"{flag(name)} {getattr(m, name)} x --hidden-size {m.hidden_size} = "
            f"{width} is not a multiple of the {heads} heads of the delta layers",
        )
    require(m.delta_conv_size >= 0, f"--delta-conv-size is {m.delta_conv_size}, must be 0 or more")
    require(
        m.delta_conv_size > 0 or not m.delta_conv_bias,
        "--delta-conv-bias needs a convolution, and --delta-conv-size is 0",
    )
    require(
        m.delta_qk_norm != "sum" or m.delta_qk_activation in ("relu", "elu"),
        "--delta-qk-norm sum divides by the sum of the entries, which must not be negative: use it "
        f"with --delta-qk-activation relu or elu, not {m.delta_qk_activation}",
    )
