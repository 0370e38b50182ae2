"""Token mixers by attention: standard, DIFF V1 and DIFF V2.

Head `i` of a differential mixer owns the query heads `2i` and `2i + 1`, its two branches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megadiff.config import ModelConfig, TokenMixer
from megadiff.kernels import attention, diff_attention, rms_norm, split_rotary
from megadiff.kernels.reference import wide
from megadiff.models.geometry import Geometry, KeyValueCache
from megadiff.models.mixer import PAD, Mixer, output_init
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.context import attend_documents, attend_in_context
from megadiff.parallel.linear import (
    ColumnParallelLinear,
    Output,
    RowParallelLinear,
    replicated,
    sharded,
)
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init
from megadiff.parallel.recompute import forget, recomputed


class HeadShape(NamedTuple):
    """Of an attention mixer: its heads of q and k, and their widths."""

    branches: int  # heads of q for each of `num_attention_heads`
    key_branches: int  # heads of k for each key/value group
    width: int  # of a head of q and k
    value_width: int


def head_shape(config: ModelConfig, mixer: TokenMixer) -> HeadShape:
    """The heads of `mixer`; DIFF V1 has keys for each branch and values twice as wide."""
    width, v1 = config.head_width(mixer), mixer == "diff_v1"
    value_width = 2 * width if v1 and config.diff_value_width == "2d" else width
    return HeadShape(1 if mixer == "standard" else 2, 2 if v1 else 1, width, value_width)


class _Attention(Mixer):
    """What the three mixers share: fused projection, rotary positions, packing, cache."""

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ParallelMesh, name: str, **factory: Any
    ) -> None:
        super().__init__()
        heads, groups, hidden = config.num_attention_heads, config.query_groups, config.hidden_size
        branches, key_branches, self.width, self.value_width = head_shape(config, self.kind)
        self.rotary = config.position_embedding_type == "rope"
        self.interleaved = config.rotary_interleaved
        init = Init(config.init_method_std)
        outputs = [
            Output("q", branches * heads * self.width, heads, init),
            Output("k", key_branches * groups * self.width, groups, init),
            Output("v", groups * self.value_width, groups, init),
        ]
        if self.kind == "diff_v2":
            outputs.append(Output("lambda", heads, heads, init))
        self.qkv = ColumnParallelLinear(hidden, outputs, mesh, name, pad_to=PAD, **factory)
        factory["init"] = output_init(config)
        self.out = RowParallelLinear(
            heads * self.value_width, hidden, heads, mesh, f"{name}.o", **factory
        )

    def new_cache(self, max_length: int) -> KeyValueCache:
        return KeyValueCache(max_length)

    def heads(self, x: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """q, k and v of x as `[b, s, heads, width]`, with rotary positions on q and k.

        After them what else the fused projection holds.
        """
        y = self.qkv(x)
        if self.rotary:
            tables = geometry.rotary[self.width]
            q, k, v, *rest = split_rotary(y, self.qkv.widths, *tables, self.interleaved)
        else:
            q, k, v, *rest = self.qkv.split(y)
        q = q.unflatten(-1, (-1, self.width))
        k = k.unflatten(-1, (-1, self.width))
        return q, k, v.unflatten(-1, (-1, self.value_width)), *rest

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `_attend`."""
        return recomputed(_attend, *args, **kwargs) if self.recompute else _attend(*args, **kwargs)


def _attend(
    operator: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *lam: Tensor,
    geometry: Geometry,
    cache: KeyValueCache | None,
    **options: Any,
) -> Tensor:
    """`operator` over whole or shared sequences, documents or a cache; `[b, s, heads * width]`."""
    if cache is not None:
        k, v, lengths = cache.append(k, v, geometry.positions)
        y = operator(q, k, v, *lam, seqused_k=lengths, **options)
    elif geometry.context is not None:
        y = attend_in_context(operator, q, k, v, *lam, context=geometry.context, **options)
    else:
        documents = {"cu_seqlens_q": geometry.cu_seqlens, "cu_seqlens_k": geometry.cu_seqlens}
        y = attend_documents(operator, q, k, v, *lam, **documents, **options)
    return y.flatten(2)


class StandardAttention(_Attention):
    """Softmax attention with query groups, the baseline."""

    kind = "standard"

    def forward(self, x: Tensor, geometry: Geometry, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = self.heads(x, geometry)
        return self.out(self.attend(attention, q, k, v, geometry=geometry, cache=cache))


def lambda_init_of_layer(layer: int) -> float:
    """DIFF Transformer, section 2.1, with the 0-based layer of the published code."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class DiffAttentionV1(_Attention):
    """Differential attention as first published (arXiv 2410.05258, section 2.1).

    Each branch has keys of its own, a pair shares values of twice the width, and lambda comes from
    four vectors. Each head is normalised and scaled by 1 - lambda_init; the factor makes up for the
    norm's effect on gradients, so without the norm there is none.
    """

    kind = "diff_v1"

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ParallelMesh, name: str, **factory: Any
    ) -> None:
        super().__init__(config, layer, mesh, name, **factory)
        self.tp = mesh.tp
        init = config.diff_lambda_init
        self.lambda_init = lambda_init_of_layer(layer) if init is None else init
        self.norm_epsilon = config.norm_epsilon if config.diff_head_norm != "none" else None
        self.per_head = config.diff_lambda_per_head
        factory["dtype"] = wide(factory["dtype"])
        heads, normal = config.num_attention_heads, Init(config.diff_lambda_std)

        def vector(which: str) -> nn.Parameter:
            full = f"{name}.lambda_{which}"
            if self.per_head:
                whole = (full, (heads, self.width), heads, "lambda", normal)
                return sharded([whole], mesh.tp, **factory)
            return replicated(full, (self.width,), "lambda", normal, mesh.tp, **factory)

        self.lambda_q1, self.lambda_k1 = vector("q1"), vector("k1")
        self.lambda_q2, self.lambda_k2 = vector("q2"), vector("k2")
        self.subln = None
        if config.diff_head_norm == "weight":
            full, shape, ones = f"{name}.subln.weight", (self.value_width,), Init(mean=1.0)
            self.subln = replicated(full, shape, "vector", ones, mesh.tp, **factory)

    def lambda_and_norm(self) -> tuple[Tensor, Tensor | None]:
        """lambda, a scalar or `[heads]` in at least float32, and the norm's weight.

        What all heads share has only a part of its gradient on each tensor-parallel rank.
        """
        q1, k1, q2, k2 = self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2
        norm: Sequence[Tensor] = () if self.subln is None else (self.subln,)
        if not self.per_head:
            q1, k1, q2, k2, *norm = sum_gradients(self.tp, q1, k1, q2, k2, *norm)
        elif norm:
            norm = sum_gradients(self.tp, *norm)
        lam = torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + self.lambda_init
        return lam, norm[0] if norm else None

    def forward(self, x: Tensor, geometry: Geometry, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = self.heads(x, geometry)
        lam, norm_weight = self.lambda_and_norm()
        self.mean_lambda = lam.detach().mean()
        norm: dict[str, Any] = {}
        if self.norm_epsilon is not None:
            norm = {"norm_weight": norm_weight, "norm_eps": self.norm_epsilon}
            norm["out_scale"] = 1 - self.lambda_init
        if not (norm and self.recompute_norm):
            y = self.attend(diff_attention, q, k, v, lam, geometry=geometry, cache=cache, **norm)
            return self.out(y)
        heads = self.attend(diff_attention, q, k, v, lam, geometry=geometry, cache=cache)
        weight = lam.new_full((self.value_width,), norm["out_scale"])
        weight = weight if norm_weight is None else weight * norm_weight
        y = self._normalise(heads, weight)
        forget(y, self._normalise, heads, weight)
        return self.out(y)

    def _normalise(self, heads: Tensor, weight: Tensor) -> Tensor:
        assert self.norm_epsilon is not None
        each = heads.unflatten(-1, (-1, self.value_width))
        return rms_norm(each, weight, self.norm_epsilon).flatten(-2)


class DiffAttentionV2(_Attention):
    """Differential attention V2: both branches share keys and values, lambda is a sigmoid of x.

    As published with the DIFF V2 code: no per-head norm, no lambda_init, one lambda for every token
    and head from a projection that is fused with q, k and v.
    """

    kind = "diff_v2"

    def forward(self, x: Tensor, geometry: Geometry, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v, logits = self.heads(x, geometry)
        lam = torch.sigmoid(logits.to(wide(logits.dtype)))
        self.mean_lambda = lam.detach().mean()
        return self.out(self.attend(diff_attention, q, k, v, lam, geometry=geometry, cache=cache))
