"""How a trained Llama becomes differential: the first weights of each attention layer.

    v1_split     DIFF V1 in the projections as they are: each head of width d splits into two
                 branches of width d / 2 that share the head's value.
    v1_doubled   DIFF V1 with twice the query and key heads; values keep their width d.
    v2           DIFF V2: twice the query heads and a lambda projection.

A random start keeps what fits and draws the second branch and lambda as for a new model. An exact
start has the logits of the original, and gradients that let the second branch grow: both branches
begin as copies, in V2 with lambda 1/2 (a lambda projection of zeros) and a doubled output
projection, in V1 with lambda 0 from equal, non-zero lambda vectors. V1's per-head norm destroys the
scale of each head's output, so with it nothing is exact; nor is it with split heads, whose branches
see half of each query and key.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from megadiff.config import ModelConfig
from megadiff.interop.tensors import Deferred, InteropError, deferred
from megadiff.parallel.parameter import generator_of

Variant = Literal["v1_split", "v1_doubled", "v2"]
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def differential_config(
    llama: ModelConfig,
    variant: Variant,
    *,
    exact: bool = False,
    head_norm: Literal["weight", "no_weight", "none"] | None = None,
) -> ModelConfig:
    """The options of a standard model made differential.

    `head_norm` of V1 is "weight" by default, and "none" for an exact start. Raises InteropError
    when an exact start is asked for where there is none.
    """
    if variant not in get_args(Variant):
        raise InteropError(f"{variant!r} is none of {', '.join(get_args(Variant))}")
    if llama.mixers != {"standard"}:
        raise InteropError(
            "only a model with standard attention in all layers becomes differential"
        )
    m = replace(llama)
    if variant == "v2":
        if head_norm is not None:
            raise InteropError("DIFF V2 has no per-head norm")
        m.token_mixer = "diff_v2"
        return m
    if exact and variant == "v1_split":
        raise InteropError(
            "v1_split has no exact start: its branches see half of each query and key, so that no "
            "branch has the original's attention; use v1_doubled or v2"
        )
    norm = head_norm or ("none" if exact else "weight")
    if exact and norm != "none":
        raise InteropError(
            f"v1_doubled with the per-head norm ({norm}) has no exact start: the norm destroys the "
            "scale of each head's output; leave the norm out or use v2"
        )
    m.token_mixer, m.diff_head_norm = "diff_v1", norm
    if exact:
        m.diff_lambda_init = 0.0
    width = llama.head_width("standard")
    if variant == "v1_split":
        if width % 4:
            raise InteropError(
                f"heads of width {width} do not split into two branches with rotary positions, "
                "which need an even width each"
            )
        m.kv_channels, m.diff_value_width = width // 2, "2d"
    else:
        m.kv_channels, m.diff_value_width = width, "d"
    return m


def differential_start(
    tensors: Mapping[str, Deferred],
    m: ModelConfig,
    variant: Variant,
    *,
    exact: bool = False,
    seed: int = 1234,
) -> dict[str, Deferred]:
    """The tensors of a LlamaForCausalLM as those of a MegadiffForCausalLM with the options `m`.

    `m` is from `differential_config`. What is drawn depends on `seed` and the tensor's name only.
    """
    result = dict(tensors)
    for layer in range(m.num_layers):
        result |= _attention(tensors, f"model.layers.{layer}.self_attn.", m, variant, exact, seed)
    return result


def _attention(
    tensors: Mapping[str, Deferred],
    prefix: str,
    m: ModelConfig,
    variant: Variant,
    exact: bool,
    seed: int,
) -> dict[str, Deferred]:
    """What is new or another in the attention whose names begin with `prefix`."""
    width, heads = m.head_width(m.token_mixer), m.num_attention_heads
    query, output = tensors[f"{prefix}q_proj.weight"], tensors[f"{prefix}o_proj.weight"]

    def drawn(name: str, shape: tuple[int, ...], std: float) -> Deferred:
        def make() -> Tensor:
            values = torch.randn(shape, generator=generator_of(f"{seed}/{prefix}{name}"))
            return (std * values).to(query.dtype)

        return Deferred(shape, query.dtype, make)

    def doubled(which: str) -> Deferred:
        first = tensors[f"{prefix}{which}_proj.weight"]
        second = first if exact else drawn(f"{which}_proj.2", first.shape, m.init_method_std)
        return _pairs(first, second, width)

    new: dict[str, Deferred] = {}
    if variant != "v1_split":
        new["q_proj.weight"] = doubled("q")
    if variant == "v1_doubled":
        new["k_proj.weight"] = doubled("k")
    if variant == "v2":
        std, name = 0.0 if exact else m.init_method_std, "lambda_proj.weight"
        new[name] = drawn(name, (heads, m.hidden_size), std)
        if exact:
            twice = Deferred(output.shape, output.dtype, lambda: 2 * output.make())
            new["o_proj.weight"] = twice
    else:
        for name in VECTORS:
            same = name.replace("2", "1") if exact else name
            new[name] = drawn(same, (width,), m.diff_lambda_std)
        if m.diff_head_norm == "weight":
            value_width = width * (2 if m.diff_value_width == "2d" else 1)
            new["subln.weight"] = deferred(torch.ones(value_width, dtype=query.dtype))
    return {prefix + name: tensor for name, tensor in new.items()}


def _pairs(first: Deferred, second: Deferred, width: int) -> Deferred:
    """Heads 2i from `first` and heads 2i + 1 from `second`."""

    def make() -> Tensor:
        heads = [part.make().unflatten(0, (-1, width)) for part in (first, second)]
        return torch.stack(heads, 1).flatten(0, 2)

    return Deferred((2 * first.shape[0], *first.shape[1:]), first.dtype, make)
