"""Collectives that autograd sees: each is a forward and the backward that fits it.

All take an `Axis` and do nothing where its size is 1. Tensors are `[batch, sequence, ...]`, and the
sequence is dim 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from megadiff.parallel import copy_engine
from megadiff.parallel.copy_engine import PIECES, Part, cut
from megadiff.parallel.mesh import Axis

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_gather(
    x: Tensor, axis: Axis, *, whole: bool = False
) -> "PendingGather | copy_engine.Gather":
    """All-gather along dim 1 for products of its `parts`, or of the `whole` only.

    Read it before the second message after this one.
    """
    if axis.peers is not None:
        return copy_engine.Gather(x, axis.peers, whole)
    return PendingGather(x, axis, whole)


def start_reduce_scatter(
    shape: Sequence[int], like: Tensor, axis: Axis
) -> "PendingReduceScatter | copy_engine.ReduceScatter":
    """Sums over ranks along dim 1, of parts that products make one after the other."""
    if axis.peers is not None:
        return copy_engine.ReduceScatter(shape, like, axis.peers)
    return PendingReduceScatter(shape, like, axis)


class PendingGather:
    """An all-gather along dim 1 that has been started; `wait` gives one of its `parts`, or all.

    The sequences of a part travel together, on a GPU in one launch; each arrives where it belongs.
    """

    def __init__(self, x: Tensor, axis: Axis, whole: bool) -> None:
        assert axis.group is not None
        self.parts = _parts(len(x), 1 if whole else PIECES)
        self._x = x.contiguous()
        self._whole = x.new_empty((x.shape[0], axis.size * x.shape[1], *x.shape[2:]))
        self._running = [
            _start_gathers(list(self._whole[part]), list(self._x[part]), axis.group)
            for part in self.parts
        ]

    def wait(self, part: Part | None = None) -> Tensor:
        wanted = len(self.parts) if part is None else 1 + self.parts.index(part)
        while len(self.parts) - len(self._running) < wanted:
            for work in self._running.pop(0):
                work.wait()
        return self._whole if part is None else self._whole[part]


def _parts(batch: int, count: int) -> list[Part]:
    """Whole sequences, in at most `count` runs."""
    return [Part(rows, slice(None)) for rows in cut(batch, count)]


def _start_gathers(whole: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Starts an all-gather of each part.

    Gloo's two threads note the name of what they completed in one string, without a lock (torch
    2.11 to 2.13). A name of more than 15 letters, as the coalesced gather's, lives on the heap,
    which they then corrupt; and that gather hands gloo pointers to a GPU's memory as they are. So
    there every part is a gather of its own. (Gloo's coalesced sums are all-reduces, one by one.)
    """
    if dist.get_backend(group) == "gloo":
        pairs = zip(whole, parts, strict=True)
        return [all_gather_single(w, p, group=group, async_op=True) for w, p in pairs]
    options = AllgatherOptions()
    options.asyncOp = True
    return [group.allgather_into_tensor_coalesced(whole, parts, options)]


class PendingReduceScatter:
    """Sums over ranks of `[b, s, ...]`, of which this one keeps `[b, s / n, ...]`.

    `start` takes the next of `parts` when it is ready, `wait` gives the sums.
    """

    def __init__(self, shape: Sequence[int], like: Tensor, axis: Axis) -> None:
        assert axis.group is not None
        self._group = axis.group
        self.parts = _parts(shape[0], PIECES)
        self._out = like.new_empty((shape[0], shape[1] // axis.size, *shape[2:]))
        self._running: list[tuple[Tensor, Any]] = []

    def start(self, part: Part, x: Tensor) -> None:
        x = x.contiguous()
        options = ReduceScatterOptions()
        options.asyncOp = True
        outs = list(self._out[part])
        work = self._group.reduce_scatter_tensor_coalesced(outs, list(x), options)
        self._running.append((x, work))

    def wait(self) -> Tensor:
        for _, work in self._running:
            work.wait()
        self._running = []
        return self._out


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    scatter = PendingReduceScatter(x.shape, x, axis)
    scatter.start(Part(slice(None), slice(None)), x)
    return scatter.wait()


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
        return PendingGather(x, axis, whole=True).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return PendingGather(grad, ctx.axis, whole=True).wait(), None


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
