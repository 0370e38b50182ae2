"""Sequences and heads change places: the context parallelism of recurrent layers.

A recurrence needs the whole sequence, but heads are independent. One all-to-all gives each rank of
the axis `cp` whole sequences of its share of the heads, and another one gives its part of the
sequence back (arXiv 2309.14509, section 3).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.parallel.context import context_shard, natural_order
from megadiff.parallel.mesh import Axis


class _AllToAll(torch.autograd.Function):
    """Part i of dim 0 goes to rank i, whose part for this rank takes its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=axis.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllToAll.apply(grad, ctx.axis), None  # type: ignore[return-value]


def sequence_to_heads(x: Tensor, cp: Axis) -> Tensor:
    """This rank's `[b, s / cp, heads, width]` to `[b, s, heads / cp, width]` in natural order.

    `cp` divides the heads; rank r gets the r-th share.
    """
    parts = x.unflatten(2, (cp.size, -1)).movedim(2, 0)
    return natural_order(_AllToAll.apply(parts, cp).movedim(0, 1).flatten(1, 2), cp)


def heads_to_sequence(x: Tensor, cp: Axis) -> Tensor:
    """The inverse: `[b, s, heads / cp, width]` to this rank's `[b, s / cp, heads, width]`."""
    parts = [context_shard(x, replace(cp, rank=rank)) for rank in range(cp.size)]
    return _AllToAll.apply(torch.stack(parts), cp).movedim(0, 2).flatten(2, 3)
