"""Checkpoints of fla-org's DeltaNet and Gated DeltaNet models: their names and configurations.

`delta_net` and `gated_deltanet` of flash-linear-attention 0.6.0, with or without layers of standard
attention between the delta layers. What one side has and the other has not is refused by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from megadiff.config import MIXER_SYMBOLS, ModelConfig, TokenMixer
from megadiff.interop.checkpoint import global_shapes
from megadiff.interop.tensors import InteropError

MODEL_TYPES: dict[TokenMixer, str] = {
    "delta_net": "delta_net",
    "gated_delta_net": "gated_deltanet",
}

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


def export_weights(
    config: ModelConfig, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """fla's tensors by name, one at a time; `read` gives ours by global name, whole."""
    fla_config(config)  # refuses what has no place there
    for name in global_shapes(config):
        tensor = read(name)
        if config.rotary_interleaved and _rotated(config, name):
            # fla rotates the two halves of a head, we the pairs (2i, 2i + 1)
            heads = tensor.unflatten(0, (-1, config.head_width("standard") // 2, 2))
            tensor = heads.transpose(1, 2).flatten(0, 2)
        yield fla_name(name), tensor


def import_weights(
    config: ModelConfig, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors by global name, one at a time; `read` gives fla's by name.

    `config` comes from `config_from_fla`. Raises InteropError for a tensor of another shape.
    """
    for name, shape in global_shapes(config).items():
        tensor = read(fla_name(name))
        if tuple(tensor.shape) != shape:
            raise InteropError(
                f"{fla_name(name)} is {tuple(tensor.shape)}, and the configuration says {shape}"
            )
        yield name, tensor


def _rotated(config: ModelConfig, name: str) -> bool:
    parts = name.split(".")
    attention = parts[0] == "layers" and config.mixer_of_layer(int(parts[1])) == "standard"
    return attention and parts[2:] in (["mixer", "q", "weight"], ["mixer", "k", "weight"])


def fla_config(m: ModelConfig) -> dict[str, Any]:
    """The config.json of the same model. Raises InteropError where fla has none."""
    kinds = sorted(m.mixers - {"standard"})
    if len(kinds) != 1 or kinds[0] not in MODEL_TYPES:
        raise InteropError(
            "fla's models hold layers of delta_net or of gated_delta_net, beside standard "
            f"attention; this one has {', '.join(sorted(m.mixers))}"
        )
    (kind,) = kinds
    _refuse(m.normalization != "RMSNorm", f"--normalization {m.normalization}")
    _refuse(not m.swiglu or m.mlp_bias, "an MLP without SwiGLU or with biases")
    _refuse(m.delta_conv_bias, "--delta-conv-bias")
    key_width, value_width = m.delta_widths
    values: dict[str, Any] = {
        "architectures": [
            "DeltaNetForCausalLM" if kind == "delta_net" else "GatedDeltaNetForCausalLM"
        ],
        "model_type": MODEL_TYPES[kind],
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_heads": m.delta_heads,
        "use_gate": m.delta_gate(kind),
        "use_short_conv": m.delta_conv_size > 0,
        "conv_size": m.delta_conv_size or 4,
        "allow_neg_eigval": m.delta_allow_neg_eigval,
        "intermediate_size": m.ffn_size,
        "hidden_act": "swish",
        "norm_eps": m.norm_epsilon,
        "initializer_range": m.init_method_std,
        "tie_word_embeddings": not m.untie_embeddings_and_output_weights,
        "vocab_size": m.vocab_size,
        "attn": _attention_layers(m),
    }
    if kind == "delta_net":
        return values | {
            "expand_k": key_width * m.delta_heads / m.hidden_size,
            "expand_v": value_width * m.delta_heads / m.hidden_size,
            "use_beta": m.delta_use_beta,
            "qk_norm": m.delta_qk_norm,
            "qk_activation": m.delta_qk_activation,
        }
    _refuse(not m.delta_use_beta, "a Gated DeltaNet without --delta-use-beta")
    _refuse(m.delta_qk_norm != "l2", f"a Gated DeltaNet with --delta-qk-norm {m.delta_qk_norm}")
    _refuse(
        m.delta_qk_activation != "silu",
        f"a Gated DeltaNet with --delta-qk-activation {m.delta_qk_activation}",
    )
    return values | {"head_dim": key_width, "expand_v": value_width / key_width}


def _attention_layers(m: ModelConfig) -> dict[str, Any] | None:
    layers = [i for i in range(m.num_layers) if m.mixer_of_layer(i) == "standard"]
    if not layers:
        return None
    _refuse(
        m.position_embedding_type != "rope",
        f"standard attention with --position-embedding-type {m.position_embedding_type}",
    )
    _refuse(m.use_rope_scaling, "--use-rope-scaling")
    _refuse(
        m.head_width("standard") * m.num_attention_heads != m.hidden_size,
        f"{m.num_attention_heads} attention heads of --kv-channels {m.kv_channels} in a model of "
        f"--hidden-size {m.hidden_size}",
    )
    return {
        "layers": layers,
        "num_heads": m.num_attention_heads,
        "num_kv_heads": m.query_groups,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": m.rotary_base,
    }


def config_from_fla(values: Mapping[str, Any]) -> ModelConfig:
    """The model that fla's config.json describes. Raises InteropError where we have none."""
    kinds: dict[str, TokenMixer] = {name: kind for kind, name in MODEL_TYPES.items()}
    kind = kinds.get(values.get("model_type", ""))
    if kind is None:
        raise InteropError(f"model_type {values.get('model_type')!r} is none of {', '.join(kinds)}")
    hidden, heads, layers = (
        values[key] for key in ("hidden_size", "num_heads", "num_hidden_layers")
    )
    for key, ours in {
        "hidden_act": "swish",
        "use_output_norm": True,
        "attnres_block_size": None,
        "num_v_heads": None,
    }.items():
        found = values.get(key, ours)
        _refuse(found != ours and (key, found) != ("num_v_heads", heads), f"{key} {found!r}")
    activation = values.get("output_gate_activation", "swish")
    _refuse(activation not in ("swish", "silu"), f"output_gate_activation {activation!r}")
    if kind == "delta_net":
        expand_k, expand_v = values.get("expand_k", 1.0), values.get("expand_v", 1.0)
    else:
        expand_k = heads * values.get("head_dim", 256) / hidden
        expand_v = expand_k * values.get("expand_v", 2.0)
    ffn = values.get("intermediate_size")
    if ffn is None:
        ffn = math.ceil(int(hidden * (values.get("hidden_ratio") or 4) * 2 / 3) / 256) * 256
    config = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        token_mixer=kind,
        norm_epsilon=values.get("norm_eps", 1e-6),
        init_method_std=values.get("initializer_range", 0.02),
        untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", False),
        vocab_size=values.get("vocab_size", 32000),
        rotary_interleaved=False,
        delta_num_heads=heads,
        delta_expand_k=expand_k,
        delta_expand_v=expand_v,
        delta_use_gate=values.get("use_gate", kind == "gated_delta_net"),
        delta_allow_neg_eigval=values.get("allow_neg_eigval", False),
        delta_conv_size=values.get("conv_size", 4) if values.get("use_short_conv", True) else 0,
    )
    if kind == "delta_net":
        config.delta_use_beta = values.get("use_beta", True)
        config.delta_qk_norm = values.get("qk_norm", "l2")
        config.delta_qk_activation = values.get("qk_activation", "silu")
    attention = values.get("attn")
    if isinstance(attention, list):
        _refuse(len(attention) != 1, f"{len(attention)} kinds of attention in attn")
        attention = attention[0]
    if attention is not None:
        window = attention.get("window_size")
        _refuse(window is not None, f"attn with window_size {window}")
        _refuse(bool(attention.get("qkv_bias", False)), "attn with qkv_bias")
        _refuse(bool(attention.get("qk_norm", False)), "attn with qk_norm")
        symbols = {mixer: symbol for symbol, mixer in MIXER_SYMBOLS.items()}
        config.num_attention_heads = attention["num_heads"]
        config.num_query_groups = attention.get("num_kv_heads") or attention["num_heads"]
        config.rotary_base = attention.get("rope_theta", 10000.0)
        config.hybrid_layer_pattern = "".join(
            symbols["standard" if layer in attention["layers"] else kind] for layer in range(layers)
        )
    return config


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise InteropError(f"there is no counterpart for {what}")
