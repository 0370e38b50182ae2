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

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from megadiff.config import ModelConfig
from megadiff.interop.tensors import Deferred, InteropError, deferred

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
    width, hidden, heads = m.head_width(m.mixer_of_layer(0)), m.hidden_size, m.num_attention_heads
    for layer in range(m.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        query, output = tensors[f"{prefix}q_proj.weight"], tensors[f"{prefix}o_proj.weight"]
        dtype = query.dtype

        def drawn(
            name: str, shape: tuple[int, ...], std: float, dtype=dtype, prefix=prefix
        ) -> Deferred:
            return Deferred(
                shape, dtype, lambda: _normal(seed, prefix + name, shape, std).to(dtype)
            )

        def doubled(which: str, prefix=prefix, drawn=drawn) -> Deferred:
            first = tensors[f"{prefix}{which}_proj.weight"]
            second = first if exact else drawn(f"{which}_proj.2", first.shape, m.init_method_std)
            return _pairs(first, second, width)

        if variant != "v1_split":
            result[f"{prefix}q_proj.weight"] = doubled("q")
        if variant == "v1_doubled":
            result[f"{prefix}k_proj.weight"] = doubled("k")
        if variant == "v2":
            std = 0.0 if exact else m.init_method_std
            name = "lambda_proj.weight"
            result[prefix + name] = drawn(name, (heads, hidden), std)
            if exact:
                result[f"{prefix}o_proj.weight"] = Deferred(
                    output.shape, output.dtype, lambda output=output: 2 * output.make()
                )
            continue
        for name in VECTORS:
            same = name.replace("2", "1") if exact else name
            result[prefix + name] = drawn(same, (width,), m.diff_lambda_std)
        if m.diff_head_norm == "weight":
            value_width = width * (2 if m.diff_value_width == "2d" else 1)
            result[f"{prefix}subln.weight"] = deferred(torch.ones(value_width, dtype=dtype))
    return result


def _pairs(first: Deferred, second: Deferred, width: int) -> Deferred:
    """Heads 2i from `first` and heads 2i + 1 from `second`."""

    def make() -> Tensor:
        heads = [part.make().unflatten(0, (-1, width)) for part in (first, second)]
        return torch.stack(heads, 1).flatten(0, 2)

    return Deferred((2 * first.shape[0], *first.shape[1:]), first.dtype, make)


def _normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    return std * torch.randn(shape, generator=generator)
