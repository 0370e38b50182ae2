"""Our model's options and Hugging Face's config.json, both ways, and what either can not say.

LlamaForCausalLM (standard attention), DiffLlamaForCausalLM (DIFF V1 as transformers has it),
fla-org's DeltaNetForCausalLM and GatedDeltaNetForCausalLM (`fla`), and MegadiffForCausalLM (any of
our attention mixers; its code travels along).
"""

from typing import Any, Literal

from megadiff.config import DELTA_MIXERS, MIXER_SYMBOLS, ModelConfig, TokenMixer
from megadiff.interop.hf import fla
from megadiff.interop.tensors import InteropError
from megadiff.kernels.rotary import LLAMA3_CONTEXT

Architecture = Literal["llama", "diffllama", "delta_net", "gated_deltanet", "megadiff"]

CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "diffllama": "DiffLlamaForCausalLM",
    "delta_net": "DeltaNetForCausalLM",
    "gated_deltanet": "GatedDeltaNetForCausalLM",
    "megadiff": "MegadiffForCausalLM",
}
MODELING_FILES = ("modeling_megadiff.py", "modeling_megadiff_delta.py")
_DIFF_OPTIONS = (
    "diff_value_width", "diff_head_norm", "diff_lambda_per_head", "diff_lambda_init",
    "diff_lambda_std",
)  # fmt: skip
_DELTA_OPTIONS = (
    "delta_use_gate", "delta_use_beta", "delta_allow_neg_eigval", "delta_conv_size",
    "delta_conv_bias", "delta_qk_activation", "delta_qk_norm",
)  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LLAMA3_CONTEXT,
}


def natural_architecture(m: ModelConfig) -> Architecture:
    """Where the model's mixers are at home."""
    homes: dict[frozenset[TokenMixer], Architecture] = {
        frozenset({"standard"}): "llama",
        frozenset({"diff_v1"}): "diffllama",
        frozenset({"delta_net"}): "delta_net",
        frozenset({"delta_net", "standard"}): "delta_net",
        frozenset({"gated_delta_net"}): "gated_deltanet",
        frozenset({"gated_delta_net", "standard"}): "gated_deltanet",
    }
    return homes.get(frozenset(m.mixers), "megadiff")


def obstacles(m: ModelConfig, architecture: Architecture) -> list[str]:
    """The options of the model that `architecture` can not represent."""
    if architecture in fla.MIXERS:
        return fla.obstacles(m, architecture)
    only = {"llama": {"standard"}, "diffllama": {"diff_v1"}}.get(architecture, m.mixers)
    no = [f"layers of {mixer}" for mixer in sorted(m.mixers - only)]
    position = m.position_embedding_type
    positions = ("rope", "none") if architecture == "megadiff" else ("rope",)
    checks = {
        f"--normalization {m.normalization}": m.normalization != "RMSNorm",
        "--no-swiglu": not m.swiglu,
        f"--position-embedding-type {position}": position not in positions,
    }
    if architecture == "diffllama":
        checks |= {
            "--mlp-bias": m.mlp_bias,
            f"--diff-lambda-init {m.diff_lambda_init}": m.diff_lambda_init is not None,
            "--diff-lambda-per-head": m.diff_lambda_per_head,
            "--diff-head-norm none": m.diff_head_norm == "none",
            "--diff-value-width d": m.diff_value_width == "d",
        }
    return no + [option for option, present in checks.items() if present]


def to_hf_config(
    m: ModelConfig, architecture: Architecture, max_positions: int, dtype: str
) -> dict[str, Any]:
    """config.json of the model. Raises InteropError naming the options that it can not represent.

    `dtype` is torch's name of the weights' type. Token ids (`bos_token_id`, ...) are None.
    """
    if no := obstacles(m, architecture):
        hint = ""
        if architecture != "megadiff" and not obstacles(m, "megadiff"):
            hint = "; --architecture megadiff can, with a modeling file of its own"
        raise InteropError(f"{CLASSES[architecture]} can not represent {', '.join(no)}{hint}")
    common = {
        "architectures": [CLASSES[architecture]],
        "max_position_embeddings": m.max_position_embeddings or max_positions,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
    }
    if architecture in fla.MIXERS:
        return fla.to_fla_config(m, architecture) | common
    v1 = architecture == "diffllama"
    branches = 2 if v1 else 1  # DiffLlama counts branches as heads
    rope: dict[str, Any] = {"rope_theta": m.rotary_base, "rope_type": "default"}
    if m.use_rope_scaling:
        rope |= _LLAMA3 | {"factor": m.rope_scaling_factor}
    values: dict[str, Any] = common | {
        "model_type": architecture,
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": branches * m.num_attention_heads,
        "num_key_value_heads": branches * m.query_groups,
        "head_dim": m.head_width("diff_v1" if v1 else "standard"),
        "hidden_act": "silu",
        "initializer_range": m.init_method_std,
        "rms_norm_eps": m.norm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": not m.untie_embeddings_and_output_weights,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "trained_rotary_interleaved": m.rotary_interleaved,
    }
    if not v1:
        values["mlp_bias"] = m.mlp_bias
    else:
        values["lambda_std_dev"] = m.diff_lambda_std
    if architecture == "megadiff":
        module = MODELING_FILES[0].removesuffix(".py")
        values |= {
            "auto_map": {
                "AutoConfig": f"{module}.MegadiffConfig",
                "AutoModelForCausalLM": f"{module}.MegadiffForCausalLM",
            },
            "layer_mixers": [m.mixer_of_layer(layer) for layer in range(m.num_layers)],
            "diff_v1_head_dim": m.head_width("diff_v1") if "diff_v1" in m.mixers else None,
            **{name: getattr(m, name) for name in _DIFF_OPTIONS},
            "rotary": m.position_embedding_type == "rope",
        }
    if architecture == "megadiff" and not m.mixers.isdisjoint(DELTA_MIXERS):
        key_width, value_width = m.delta_widths
        values |= {name: getattr(m, name) for name in _DELTA_OPTIONS} | {
            "delta_num_heads": m.delta_heads,
            "delta_key_dim": key_width,
            "delta_value_dim": value_width,
        }
    return values


def from_hf_config(values: dict[str, Any], source: str) -> tuple[Architecture, ModelConfig]:
    """The architecture and options that a config.json describes.

    Raises InteropError, beginning with `source`, naming what we can not represent.
    """
    try:
        return _read_config(values, source)
    except InteropError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise InteropError(f"{source}: not a model's configuration ({reason})") from None


def _read_config(values: dict[str, Any], source: str) -> tuple[Architecture, ModelConfig]:
    kind = values.get("model_type")
    if kind not in CLASSES:
        raise InteropError(
            f"{source}: model_type is {kind!r}; only {', '.join(CLASSES)} can be read"
        )
    architecture: Architecture = kind
    if architecture in fla.MIXERS:
        return architecture, fla.from_fla_config(values, source)
    no = []
    if values.get("attention_bias"):
        no.append("attention_bias")
    if values.get("attention_dropout"):
        no.append(f"attention_dropout {values['attention_dropout']}")
    if values.get("hidden_act", "silu") != "silu":
        no.append(f"hidden_act {values['hidden_act']!r}")
    base, factor, rope_problems = _read_rope(values)
    if no := no + rope_problems:
        raise InteropError(f"{source}: {', '.join(no)} can not be represented")
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    m = ModelConfig(
        num_layers=int(values["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=int(values["intermediate_size"]),
        vocab_size=int(values["vocab_size"]),
    )
    groups = int(values.get("num_key_value_heads") or heads)
    width = int(values.get("head_dim") or hidden // heads)
    m.norm_epsilon = float(values.get("rms_norm_eps", 1e-5 if kind == "diffllama" else 1e-6))
    m.rotary_base, m.rotary_interleaved = base, bool(values.get("trained_rotary_interleaved"))
    m.use_rope_scaling = factor is not None
    m.rope_scaling_factor = factor if factor is not None else m.rope_scaling_factor
    m.untie_embeddings_and_output_weights = not values.get("tie_word_embeddings", False)
    m.mlp_bias = bool(values.get("mlp_bias", False))
    m.init_method_std = float(values.get("initializer_range", m.init_method_std))
    m.num_attention_heads, m.num_query_groups, m.kv_channels = heads, groups, width
    if kind == "llama":
        m.token_mixer = "standard"
    elif kind == "diffllama":
        if heads % 2 or groups % 2:
            raise InteropError(
                f"{source}: {heads} heads and {groups} key/value heads form no pairs"
            )
        m.num_attention_heads, m.num_query_groups = heads // 2, groups // 2
        m.token_mixer, m.diff_head_norm = "diff_v1", "no_weight"
        m.diff_lambda_std = float(values.get("lambda_std_dev", 0.1))
    else:
        _read_megadiff(m, values, width, source)
    return architecture, m


def _read_megadiff(m: ModelConfig, values: dict[str, Any], width: int, source: str) -> None:
    named = values.get("layer_mixers") or ["standard"] * m.num_layers
    symbols = {mixer: symbol for symbol, mixer in MIXER_SYMBOLS.items()}
    if len(named) != m.num_layers or not set(named) <= symbols.keys():
        raise InteropError(f"{source}: layer_mixers {named} do not fit {m.num_layers} layers")
    pattern = "".join(symbols[mixer] for mixer in named)
    mixers: list[TokenMixer] = [MIXER_SYMBOLS[symbol] for symbol in pattern]
    if len(set(mixers)) == 1:
        m.token_mixer = mixers[0]
    else:
        m.hybrid_layer_pattern = pattern
    m.position_embedding_type = "rope" if values.get("rotary", True) else "none"
    delta = not m.mixers.isdisjoint(DELTA_MIXERS)
    for name in (*_DIFF_OPTIONS, *(_DELTA_OPTIONS if delta else ())):
        setattr(m, name, values.get(name, getattr(m, name)))
    if delta:
        m.delta_num_heads = int(values["delta_num_heads"])
        m.delta_expand_k = values["delta_key_dim"] * m.delta_num_heads / m.hidden_size
        m.delta_expand_v = values["delta_value_dim"] * m.delta_num_heads / m.hidden_size
    mixers = [mixer for mixer in mixers if mixer not in DELTA_MIXERS]
    widths: dict[str, int] = {"diff_v1": int(values.get("diff_v1_head_dim") or width)}
    used = {widths.get(mixer, width) for mixer in mixers or ["standard"]}
    if len(used) == 1:
        m.kv_channels = used.pop()
        return
    m.kv_channels = None  # half the width in V1 layers, if it is what we would choose
    if any(m.head_width(mixer) != widths.get(mixer, width) for mixer in set(mixers)):
        raise InteropError(
            f"{source}: head_dim {width} and diff_v1_head_dim {widths['diff_v1']} can not both be "
            f"represented with {m.num_attention_heads} heads of a hidden size of {m.hidden_size}"
        )


def _read_rope(values: dict[str, Any]) -> tuple[float, float | None, list[str]]:
    """Base, Llama 3 factor and what can not be represented, in the spelling of any transformers."""
    rope = dict(values.get("rope_scaling") or {}) | dict(values.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    problems = []
    if float(rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) != 1:
        problems.append("partial_rotary_factor")
    if kind == "default":
        return base, None, problems
    if kind != "llama3":
        return base, None, [*problems, f"rope_type {kind!r}"]
    problems += [
        f"{key} {rope.get(key)} (only {value})"
        for key, value in _LLAMA3.items()
        if key != "rope_type" and rope.get(key) != value
    ]
    return base, float(rope.get("factor", 8.0)), problems
