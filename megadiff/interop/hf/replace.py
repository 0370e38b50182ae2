"""A Hugging Face Llama made differential in place."""

from typing import Any, Literal

import torch
from transformers import LlamaForCausalLM

from megadiff.config import ModelConfig
from megadiff.interop.hf.architecture import from_hf_config, to_hf_config
from megadiff.interop.hf.modeling_megadiff import (
    LlamaDiffAttention,
    MegadiffConfig,
    MegadiffForCausalLM,
    MegadiffRotary,
)
from megadiff.interop.hf.start import Variant, differential_config, differential_start
from megadiff.interop.tensors import InteropError, deferred


def replace_attention_layers(
    model: LlamaForCausalLM,
    attention_class: type[LlamaDiffAttention] = LlamaDiffAttention,
    *,
    variant: Variant = "v2",
    exact: bool = False,
    head_norm: Literal["weight", "no_weight", "none"] | None = None,
    seed: int = 1234,
) -> MegadiffForCausalLM:
    """Turn `model` into a differential one in place, and return it.

    `variant`, `exact` and `head_norm` are explained in `start`. The model becomes a
    MegadiffForCausalLM, with the parameters that it had outside of attention: generation, Trainer
    and `save_pretrained` work as before, and `MegadiffForCausalLM.from_pretrained` (or
    AutoModelForCausalLM with `trust_remote_code=True`) reads it again. Make the optimizer
    afterwards.

    Raises InteropError, before anything changes, for models that are no plain Llama and for an
    exact start where there is none.
    """
    if type(model) is not LlamaForCausalLM:
        raise InteropError(f"a LlamaForCausalLM is needed, not {type(model).__name__}")
    _, llama = from_hf_config(model.config.to_dict(), "the model's configuration")
    m = differential_config(llama, variant, exact=exact, head_norm=head_norm)
    weights = model.state_dict()
    start = differential_start(
        {name: deferred(tensor) for name, tensor in weights.items()},
        m,
        variant,
        exact=exact,
        seed=seed,
    )
    config = _new_config(model.config, m)
    with torch.device("meta"):
        new = MegadiffForCausalLM(config)
        layers: Any = new.model.layers
        for index, layer in enumerate(layers):
            layer.self_attn = attention_class(config, index)
    state = {
        name: tensor.make().to(weights[_neighbour(name, weights)].device)
        for name, tensor in start.items()
    }
    new.load_state_dict(state, assign=True)
    device = model.model.embed_tokens.weight.device
    new.model.rotary_emb = MegadiffRotary(config).to(device)  # type: ignore[assignment]
    new.tie_weights()
    new.generation_config = model.generation_config
    new.train(model.training)
    model.__class__, model.__dict__ = MegadiffForCausalLM, new.__dict__
    return model  # type: ignore[return-value]


def _neighbour(name: str, weights: dict[str, torch.Tensor]) -> str:
    """A tensor of the same layer for one that is new."""
    return name if name in weights else f"{name.split('.self_attn.')[0]}.self_attn.q_proj.weight"


def _new_config(old: Any, m: ModelConfig) -> MegadiffConfig:
    """Our options, and the old configuration's token ids and the like."""
    options = to_hf_config(m, "megadiff", old.max_position_embeddings, "float32")
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "use_cache")
    values = {k: v for k, v in options.items() if k not in (*kept, "auto_map", "model_type")}
    known = old.to_dict()
    values |= {key: known[key] for key in kept if key in known}
    config = MegadiffConfig(**values)
    config._attn_implementation = old._attn_implementation
    return config
