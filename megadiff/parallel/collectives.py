"""Collectives that autograd sees: each is a forward and the backward that fits it.

All take an `Axis` and do nothing where its size is 1. Tensors are `[batch, sequence, ...]`, and the
sequence is dim 1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.parallel.mesh import Axis

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingGather:
    """An all-gather along dim 1 that has been started; `wait` gives the whole tensor."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis = axis
        self.x = x.contiguous()
        self.out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        self.work = all_gather_single(self.out, self.x, group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        assert self.work is not None
        self.work.wait()
        parts = self.out.unflatten(0, (self.axis.size, -1))
        return parts.movedim(0, 1).flatten(1, 2)  # a copy only for more than one sequence


class PendingReduceScatter:
    """A reduce-scatter along dim 1 that has been started; `wait` gives this rank's part."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        batch, sequence = x.shape[:2]
        parts = x.reshape(batch, axis.size, sequence // axis.size, *x.shape[2:]).movedim(1, 0)
        self.parts = parts.flatten(0, 1)
        self.out = self.parts.new_empty((batch, *self.parts.shape[1:]))
        self.work = reduce_scatter_single(self.out, self.parts, group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        assert self.work is not None
        self.work.wait()
        return self.out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return PendingGather(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return PendingReduceScatter(grad, ctx.axis).wait(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return PendingReduceScatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return PendingGather(grad, ctx.axis).wait(), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(True)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        flat = torch.cat([g.reshape(-1).to(wide) for g in grads])
        dist.all_reduce(flat, group=ctx.axis.group)
        parts = flat.split([g.numel() for g in grads])
        summed = [p.view_as(g).to(g.dtype) for p, g in zip(parts, grads, strict=True)]
        return None, *summed


def copy_to_group(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward sums the gradient over the ranks of `axis`."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_group(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks of `axis`; backward is the identity."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """`[b, s / n, ...]` to `[b, s, ...]`; backward sums over ranks and keeps this rank's part."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum `[b, s, ...]` over ranks and keep this rank's `[b, s / n, ...]`; backward gathers."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def sum_gradients(axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Identity for all `tensors`; backward sums their gradients over `axis` in one message.

    For replicated parameters whose gradient is only this rank's share. Wrap them where they are
    used, so that the sum is right in every engine, also one that takes gradients during backward.
    """
    return tensors if axis.size == 1 else _SumGradients.apply(axis, *tensors)
