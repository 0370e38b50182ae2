"""Token mixers by attention: standard, DIFF V1 and DIFF V2.

Head `i` of a differential mixer owns the query heads `2i` and `2i + 1`, its two branches.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import attention, diff_attention, rms_norm, split_rotary
from megadiff.models.geometry import Geometry, KeyValueCache
from megadiff.models.mixer import Mixer
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.context import attend_in_context
from megadiff.parallel.linear import (
    ColumnParallelLinear,
    Output,
    RowParallelLinear,
    replicated,
    shard,
)
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init, Section, make_parameter
from megadiff.parallel.recompute import forget, recomputed

# 64 elements are 128 bytes in bfloat16: rows of the fused projection stay aligned behind lambda's.
_PAD = 64


class _Attention(Mixer):
    """What the three mixers share: fused projection, rotary positions, packing, cache."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        name: str,
        *,
        width: int,
        value_width: int,
        query_heads: int,
        key_heads: int,
        lambda_logits: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        heads, groups, hidden = config.num_attention_heads, config.query_groups, config.hidden_size
        self.width, self.value_width = width, value_width
        self.rotary = config.position_embedding_type == "rope"
        self.interleaved = config.rotary_interleaved
        init = Init(config.init_method_std)
        outputs = [
            Output("q", query_heads * width, heads, init),
            Output("k", key_heads * width, groups, init),
            Output("v", groups * value_width, groups, init),
        ]
        if lambda_logits:
            outputs.append(Output("lambda", heads, heads, init))
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.qkv = ColumnParallelLinear(hidden, outputs, mesh, name, pad_to=_PAD, **factory)
        self.out = RowParallelLinear(
            heads * value_width,
            hidden,
            heads,
            mesh,
            f"{name}.o",
            init=Init(config.init_method_std / math.sqrt(2 * config.num_layers)),
            **factory,
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
    elif geometry.cu_seqlens is None:
        y = operator(q, k, v, *lam, **options)
    else:
        batch, length = q.shape[:2]
        lam = tuple(t.flatten(0, 1) if t.dim() == 3 else t for t in lam)
        cu, longest = geometry.cu_seqlens, length
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        y = operator(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lam, **options)
        y = y.unflatten(0, (batch, length))
    return y.flatten(2)


class StandardAttention(_Attention):
    """Softmax attention with query groups, the baseline."""

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ParallelMesh, name: str, **factory: Any
    ) -> None:
        width = config.head_width("standard")
        super().__init__(
            config,
            mesh,
            name,
            width=width,
            value_width=width,
            query_heads=config.num_attention_heads,
            key_heads=config.query_groups,
            **factory,
        )

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

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mesh: ParallelMesh,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        width = config.head_width("diff_v1")
        heads = config.num_attention_heads
        value_width = 2 * width if config.diff_value_width == "2d" else width
        super().__init__(
            config,
            mesh,
            name,
            width=width,
            value_width=value_width,
            query_heads=2 * heads,
            key_heads=2 * config.query_groups,
            dtype=dtype,
            device=device,
        )
        self.tp = mesh.tp
        init = config.diff_lambda_init
        self.lambda_init = lambda_init_of_layer(layer) if init is None else init
        self.norm_epsilon = config.norm_epsilon if config.diff_head_norm != "none" else None
        self.per_head = config.diff_lambda_per_head
        wide = torch.promote_types(dtype, torch.float32)
        factory: dict[str, Any] = {"dtype": wide, "device": device}
        normal = Init(config.diff_lambda_std)

        def vector(which: str) -> nn.Parameter:
            full = f"{name}.lambda_{which}"
            if not self.per_head:
                section = replicated(full, (width,), "lambda", normal, mesh.tp)
                return make_parameter((width,), [section], **factory)
            s = shard(heads, heads, mesh.tp)
            section = Section(full, (heads, width), 0, s.length, s.offset, "lambda", normal)
            return make_parameter((s.length, width), [section], **factory)

        self.lambda_q1, self.lambda_k1 = vector("q1"), vector("k1")
        self.lambda_q2, self.lambda_k2 = vector("q2"), vector("k2")
        self.subln = None
        if config.diff_head_norm == "weight":
            ones = Init(mean=1.0)
            section = replicated(f"{name}.subln.weight", (value_width,), "vector", ones, mesh.tp)
            self.subln = make_parameter((value_width,), [section], **factory)

    def lambda_and_norm(self) -> tuple[Tensor, Tensor | None]:
        """lambda, a scalar or `[heads]` in at least float32, and the norm's weight.

        What all heads share has only a part of its gradient on each tensor-parallel rank.
        """
        q1: Tensor = self.lambda_q1
        k1: Tensor = self.lambda_k1
        q2: Tensor = self.lambda_q2
        k2: Tensor = self.lambda_k2
        norm_weight: Tensor | None = self.subln
        if self.per_head and norm_weight is not None:
            (norm_weight,) = sum_gradients(self.tp, norm_weight)
        elif norm_weight is not None:
            q1, k1, q2, k2, norm_weight = sum_gradients(self.tp, q1, k1, q2, k2, norm_weight)
        elif not self.per_head:
            q1, k1, q2, k2 = sum_gradients(self.tp, q1, k1, q2, k2)
        lam = torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + self.lambda_init
        return lam, norm_weight

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

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ParallelMesh, name: str, **factory: Any
    ) -> None:
        width = config.head_width("diff_v2")
        super().__init__(
            config,
            mesh,
            name,
            width=width,
            value_width=width,
            query_heads=2 * config.num_attention_heads,
            key_heads=config.query_groups,
            lambda_logits=True,
            **factory,
        )

    def forward(self, x: Tensor, geometry: Geometry, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v, logits = self.heads(x, geometry)
        wide = torch.promote_types(logits.dtype, torch.float32)
        lam = torch.sigmoid(logits.to(wide))
        self.mean_lambda = lam.detach().mean()
        return self.out(self.attend(diff_attention, q, k, v, lam, geometry=geometry, cache=cache))
