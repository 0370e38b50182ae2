"""fla-org's DeltaNet and Gated DeltaNet models: their configurations and names.

`delta_net` and `gated_deltanet` of flash-linear-attention 0.6.0, with or without layers of standard
attention between the delta layers.
"""

import math
from typing import Any

from megadiff.config import MIXER_SYMBOLS, ModelConfig, TokenMixer
from megadiff.interop.tensors import InteropError

MIXERS: dict[str, TokenMixer] = {"delta_net": "delta_net", "gated_deltanet": "gated_delta_net"}
"""Our mixer by fla's model_type."""

_TOP = {
    "embedding.weight": "model.embeddings.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "mixer_norm": "attn_norm",
    "mixer.q": "attn.q_proj",
    "mixer.k": "attn.k_proj",
    "mixer.v": "attn.v_proj",
    "mixer.gate": "attn.g_proj",
    "mixer.beta": "attn.b_proj",
    "mixer.decay": "attn.a_proj",
    "mixer.o": "attn.o_proj",
    "mixer.q_conv": "attn.q_conv1d",
    "mixer.k_conv": "attn.k_conv1d",
    "mixer.v_conv": "attn.v_conv1d",
    "mixer.o_norm": "attn.o_norm",
    "mlp_norm": "mlp_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def fla_name(name: str) -> str:
    """fla's name of our global `name`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    if rest in ("mixer.A_log", "mixer.dt_bias"):
        return f"model.layers.{layer}.attn.{rest.removeprefix('mixer.')}"
    module, parameter = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{_LAYER[module]}.{parameter}"


def obstacles(m: ModelConfig, model_type: str) -> list[str]:
    """The options of the model that fla's `model_type` can not represent."""
    mixer = MIXERS[model_type]
    no = [f"layers of {other}" for other in sorted(m.mixers - {mixer, "standard"})]
    checks = {
        f"no layer of {mixer}": mixer not in m.mixers,
        f"--normalization {m.normalization}": m.normalization != "RMSNorm",
        "--no-swiglu": not m.swiglu,
        "--mlp-bias": m.mlp_bias,
        "--delta-conv-bias": m.delta_conv_bias,
    }
    if mixer == "gated_delta_net":
        checks |= {
            "--no-delta-use-beta": not m.delta_use_beta,
            f"--delta-qk-norm {m.delta_qk_norm}": m.delta_qk_norm != "l2",
            f"--delta-qk-activation {m.delta_qk_activation}": m.delta_qk_activation != "silu",
        }
    if "standard" in m.mixers:
        position = m.position_embedding_type
        width = m.head_width("standard") * m.num_attention_heads
        checks |= {
            f"--position-embedding-type {position}": position != "rope",
            "--use-rope-scaling": m.use_rope_scaling,
            f"attention heads of {width} columns in all": width != m.hidden_size,
        }
    return no + [option for option, present in checks.items() if present]


def to_fla_config(m: ModelConfig, model_type: str) -> dict[str, Any]:
    """What config.json says of the model, for one without `obstacles`."""
    mixer = MIXERS[model_type]
    key_width, value_width = m.delta_widths
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_size,
        "num_hidden_layers": m.num_layers,
        "num_heads": m.delta_heads,
        "use_gate": m.delta_gate(mixer),
        "use_short_conv": m.delta_conv_size > 0,
        "conv_size": m.delta_conv_size or 4,
        "allow_neg_eigval": m.delta_allow_neg_eigval,
        "hidden_act": "swish",
        "norm_eps": m.norm_epsilon,
        "initializer_range": m.init_method_std,
        "tie_word_embeddings": not m.untie_embeddings_and_output_weights,
        "trained_rotary_interleaved": m.rotary_interleaved,
        "attn": None,
    }
    if mixer == "delta_net":
        values |= {
            "expand_k": key_width * m.delta_heads / m.hidden_size,
            "expand_v": value_width * m.delta_heads / m.hidden_size,
            "use_beta": m.delta_use_beta,
            "qk_norm": m.delta_qk_norm,
            "qk_activation": m.delta_qk_activation,
        }
    else:
        values |= {"head_dim": key_width, "expand_v": value_width / key_width}
    if "standard" in m.mixers:
        values["attn"] = {
            "layers": [i for i in range(m.num_layers) if m.mixer_of_layer(i) == "standard"],
            "num_heads": m.num_attention_heads,
            "num_kv_heads": m.query_groups,
            "qkv_bias": False,
            "window_size": None,
            "rope_theta": m.rotary_base,
        }
    return values


def from_fla_config(values: dict[str, Any], source: str) -> ModelConfig:
    """The options that a config.json of fla describes.

    Raises InteropError, beginning with `source`, naming what we can not represent, and various
    errors where a value is missing or of another type.
    """
    mixer = MIXERS[values["model_type"]]
    hidden, heads, layers = (
        int(values[key]) for key in ("hidden_size", "num_heads", "num_hidden_layers")
    )
    attention = values.get("attn") or None
    specifications = attention if isinstance(attention, list) else [attention]
    attention = specifications[0] or {}
    standard = set(attention.get("layers") or ())
    qk_norm, qk_activation = values.get("qk_norm", "l2"), values.get("qk_activation", "silu")
    no = {
        "several kinds of attention": len(specifications) > 1,
        "hidden_act": values.get("hidden_act", "swish") != "swish",
        "use_output_norm": not values.get("use_output_norm", True),
        "attnres_block_size": values.get("attnres_block_size") is not None,
        "num_v_heads": values.get("num_v_heads") not in (None, heads),
        "output_gate_activation": values.get("output_gate_activation", "swish")
        not in ("swish", "silu"),
        "window_size": attention.get("window_size") is not None,
        "qkv_bias": bool(attention.get("qkv_bias", False)),
        "attn": bool(attention) and not ("layers" in attention and standard <= set(range(layers))),
    }
    if mixer == "delta_net":
        no |= {
            "qk_norm": qk_norm not in ("l2", "sum"),
            "qk_activation": qk_activation not in ("silu", "relu", "elu", "identity"),
        }
    if any(no.values()):
        found = [key for key, present in no.items() if present]
        told = [f"{key} {(values | attention).get(key, '')}".strip() for key in found]
        raise InteropError(f"{source}: {', '.join(told)} can not be represented")
    if mixer == "delta_net":
        expand_k, expand_v = values.get("expand_k", 1.0), values.get("expand_v", 1.0)
    else:
        expand_k = heads * values.get("head_dim", 256) / hidden
        expand_v = expand_k * values.get("expand_v", 2.0)
    ffn = values.get("intermediate_size")
    if ffn is None:
        ffn = math.ceil(int(hidden * (values.get("hidden_ratio") or 4) * 2 / 3) / 256) * 256
    m = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=int(attention.get("num_heads") or heads),
        num_query_groups=attention.get("num_kv_heads"),
        ffn_hidden_size=int(ffn),
        token_mixer=mixer,
        norm_epsilon=float(values.get("norm_eps", 1e-6)),
        init_method_std=float(values.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", False),
        vocab_size=int(values.get("vocab_size", 32000)),
        rotary_base=float(attention.get("rope_theta") or 10000.0),
        rotary_interleaved=bool(values.get("trained_rotary_interleaved")),
        delta_num_heads=heads,
        delta_expand_k=float(expand_k),
        delta_expand_v=float(expand_v),
        delta_use_gate=bool(values.get("use_gate", mixer == "gated_delta_net")),
        delta_allow_neg_eigval=bool(values.get("allow_neg_eigval", False)),
        delta_conv_size=int(values.get("conv_size", 4))
        if values.get("use_short_conv", True)
        else 0,
    )
    if mixer == "delta_net":
        m.delta_use_beta = bool(values.get("use_beta", True))
        m.delta_qk_norm, m.delta_qk_activation = qk_norm, qk_activation
    if standard:
        symbols = {name: symbol for symbol, name in MIXER_SYMBOLS.items()}
        m.hybrid_layer_pattern = "".join(
            symbols["standard" if layer in standard else mixer] for layer in range(layers)
        )
    return m
