"""Linear layers whose weights are sharded over the tensor-parallel ranks (arXiv 1909.08053)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.parallel import collectives
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import (
    Group,
    Init,
    Section,
    gradient_sum,
    make_parameter,
    record_of,
)
from megadiff.parallel.recompute import Again, kept_for


@dataclass(frozen=True)
class Output:
    """One of the projections that a fused column-parallel layer computes in one product.

    `parts` is the number of indivisible units (heads, key/value groups) among its `features`; the
    tensor-parallel size divides it, or is a multiple of it, and then each part has several copies.
    """

    name: str
    features: int
    parts: int
    init: Init


def shard(features: int, parts: int, axis: Axis) -> tuple[int, int, int, int]:
    """This rank's range of `features`, which consist of `parts` equal indivisible units.

    Its offset and length; how many ranks hold copies of it, and which of them this one is.
    """
    if parts % axis.size == 0:
        length = features // axis.size
        return axis.rank * length, length, 1, 0
    if axis.size % parts:
        raise ValueError(f"{parts} parts can not be split over {axis.size} tensor-parallel ranks")
    copies = axis.size // parts
    length = features // parts
    return axis.rank // copies * length, length, copies, axis.rank % copies


GlobalTensor = tuple[str, tuple[int, ...], int, Group, Init]
"""Name, shape, number of indivisible parts along dim 0, group, initial values."""


def sharded(
    tensors: Sequence[GlobalTensor], tp: Axis, pad_to: int = 1, **factory: Any
) -> nn.Parameter:
    """This rank's rows of `tensors`, one behind the other; zeros fill up a multiple of `pad_to`."""
    sections, start = [], 0
    for name, shape, parts, group, init in tensors:
        offset, length, *copies = shard(shape[0], parts, tp)
        sections.append(Section(name, shape, start, length, offset, group, init, *copies))
        start += length
    rows = -(-start // pad_to) * pad_to
    return make_parameter((rows, *sections[0].shape[1:]), sections, **factory)


def replicated(
    name: str, shape: Sequence[int], group: Group, init: Init, tp: Axis, **factory: Any
) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole."""
    section = Section(name, tuple(shape), 0, shape[0], 0, group, init, tp.size, tp.rank)
    return make_parameter(shape, [section], **factory)


class Products:
    """The products of a linear layer and its gradients; `float8` has others.

    `scale` is what a product needs to know of each whole operand where they are `scaled`, else
    None. `out`: where the result goes, a part of a larger one whose sequences may lie apart.
    """

    scaled = False

    def scale(self, x: Tensor, *, gradient: bool = False) -> Tensor | None:
        return None

    def output(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *scales: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x W^T + b, `[..., out]`, without b in `out`; scales of x and W."""
        weight = weight.detach()  # of one that wants a gradient torch copies x where it has gaps
        return F.linear(x, weight, bias) if out is None else _product(x, weight.T, out)

    def grad_input(
        self, grad: Tensor, weight: Tensor, *scales: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """`[..., in]`; scales of the gradient and of W."""
        return grad @ weight.detach() if out is None else _product(grad, weight, out)

    def grad_weight(self, grad: Tensor, x: Tensor, *scales: Tensor | None) -> Tensor:
        """`[out, in]`; scales of the gradient and of x."""
        return grad.flatten(0, -2).mT @ x.flatten(0, -2)


def _product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if x.is_contiguous() and out.is_contiguous():
        return torch.mm(x.flatten(0, -2), weight, out=out.flatten(0, -2))
    return torch.bmm(x, weight.expand(len(x), -1, -1), out=out)


class ColumnParallelLinear(nn.Module):
    """`[b, s, in]` to this rank's `[b, s, sum of local features]` of several fused projections.

    Under sequence parallelism the input is this rank's part of the sequence, gathered once for all
    projections. The weight is section-major, so `split` gives true views of the output. `pad_to`
    rounds the local width up (with rows that stay zero), which keeps the output's rows aligned.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[Output],
        mesh: ParallelMesh,
        name: str,
        *,
        bias: bool = False,
        pad_to: int = 1,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.tp, self.copies, self.products = mesh.tp, mesh.tp_copies, Products()
        self.sequence_parallel = mesh.sequence_parallel
        weights: list[GlobalTensor] = [
            (f"{name}.{o.name}.weight", (o.features, in_features), o.parts, "matrix", o.init)
            for o in outputs
        ]
        biases: list[GlobalTensor] = [
            (f"{name}.{o.name}.bias", (o.features,), o.parts, "vector", Init()) for o in outputs
        ]
        self.weight = sharded(weights, mesh.tp, pad_to, **factory)
        self.bias = sharded(biases, mesh.tp, pad_to, **factory) if bias else None
        sections = record_of(self.weight).sections
        self.widths = [s.length for s in sections]
        self.padding = len(self.weight) - sum(self.widths)
        copied = [s for s in sections if s.copies > 1]
        self.copied = (copied[0].start, sum(s.length for s in copied)) if copied else None
        if copied and bias:
            raise ValueError(f"{name}: a bias on copied key/value groups is not supported")

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.copied is not None:
            weight = _SumRowGradients.apply(weight, *self.copied, self.copies)
        shared = self.tp, self.sequence_parallel
        return _Product.apply(x, weight, self.bias, self.products, *shared, kept_for(x))

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The projections, as views of the fused output `y`."""
        return y.split([*self.widths, self.padding], dim=-1)[: len(self.widths)]


class RowParallelLinear(nn.Module):
    """This rank's `[b, s, in / tp]` to `[b, s, out]`, summed over ranks.

    Under sequence parallelism the sum is scattered: the output is this rank's part of the sequence.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parts: int,
        mesh: ParallelMesh,
        name: str,
        *,
        init: Init,
        bias: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = mesh.tp, mesh.sequence_parallel
        self.products = Products()
        offset, length, *_ = shard(in_features, parts, mesh.tp)
        shape = (out_features, in_features)
        section = Section(f"{name}.weight", shape, 0, length, offset, "matrix", init)
        self.weight = make_parameter((out_features, length), [section], dim=1, **factory)
        self.bias = None
        if bias:
            shape = (out_features,)
            self.bias = replicated(f"{name}.bias", shape, "vector", Init(), mesh.tp, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            y = _ScatteredProduct.apply(x, self.weight, self.products, self.tp, kept_for(x))
        else:
            y = _Product.apply(x, self.weight, None, self.products, Axis(), False, kept_for(x))
            y = collectives.reduce_from_group(y, self.tp)
        if self.bias is None:
            return y
        bias = self.bias
        if self.sequence_parallel:
            (bias,) = collectives.sum_gradients(self.tp, bias)
        return y + bias


class _Product(torch.autograd.Function):
    """y = x W^T + b; messages travel while products are computed.

    Under sequence parallelism the input arrives in pieces, of which each travels during the product
    of the one before. The input's gradient is communicated while the weight's is computed.
    `kept` says what stays of x until then.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        tp: Axis,
        sequence_parallel: bool,
        kept: Again,
    ) -> Tensor:
        ctx.products, ctx.tp, ctx.sequence_parallel = products, tp, sequence_parallel
        ctx.again, ctx.total = kept.function, gradient_sum(weight)
        gather = None
        if sequence_parallel:
            gather = collectives.start_gather(x, tp, whole=products.scaled)
        whole = x if gather is None or not products.scaled else gather.wait()
        scales = products.scale(whole), products.scale(weight)
        ctx.save_for_backward(weight, *scales, *kept.inputs)
        if gather is None:
            return products.output(x, weight, bias, *scales)
        y = x.new_empty((x.shape[0], tp.size * x.shape[1], weight.shape[0]))
        for part in gather.parts:
            products.output(gather.wait(part), weight, None, *scales, out=y[part])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, x_scale, weight_scale, *inputs = ctx.saved_tensors
        products: Products = ctx.products
        tp: Axis = ctx.tp
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        x = ctx.again(*inputs) if need_weight else None
        gather = None
        if ctx.sequence_parallel and x is not None:
            gather = collectives.start_gather(x, tp, whole=True)
        scale = products.scale(grad, gradient=True)
        grad_x = scatter = reduction = None
        if need_x and ctx.sequence_parallel:
            scatter = collectives.start_reduce_scatter((*grad.shape[:2], weight.shape[1]), grad, tp)
            for part in scatter.parts:
                scatter.start(part, products.grad_input(grad[part], weight, scale, weight_scale))
        elif need_x:
            grad_x = products.grad_input(grad, weight, scale, weight_scale)
            if tp.size > 1:
                grad_x = grad_x.contiguous()
                reduction = dist.all_reduce(grad_x, group=tp.group, async_op=True)
        grad_weight = None
        if x is not None:
            whole = x if gather is None else gather.wait()
            grad_weight = _grad_weight(ctx, grad, whole, scale, x_scale)
        grad_bias = grad.flatten(0, -2).sum(0) if need_bias else None
        if scatter is not None:
            grad_x = scatter.wait()
        if reduction is not None:
            reduction.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _grad_weight(ctx: Any, grad: Tensor, x: Tensor, *scales: Tensor | None) -> Tensor:
    """The weight's gradient; where its sum takes products, they go there at once.

    Only if autograd accumulates it: `torch.autograd.grad` of something else leaves the sum alone,
    and of the weight itself raises RuntimeError.
    """
    total = ctx.total()
    accumulate = ctx.next_functions[1][0]
    if total is None or ctx.products.scaled or not torch._C._will_engine_execute_node(accumulate):
        return ctx.products.grad_weight(grad, x, *scales)
    return total.add_product(grad.flatten(0, -2).mT, x.flatten(0, -2))


class _ScatteredProduct(torch.autograd.Function):
    """y = x W^T summed over ranks, of which each keeps its part of the sequence.

    A piece of the sum travels while the next one's product is computed, and so do pieces of the
    gradient in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, products: Products, tp: Axis, kept: Again
    ) -> Tensor:
        scales = products.scale(x), products.scale(weight)
        ctx.save_for_backward(weight, *scales, *kept.inputs)
        ctx.products, ctx.tp, ctx.again, ctx.shape = products, tp, kept.function, x.shape
        ctx.total = gradient_sum(weight)
        scatter = collectives.start_reduce_scatter((*x.shape[:2], weight.shape[0]), x, tp)
        for part in scatter.parts:
            scatter.start(part, products.output(x[part], weight, None, *scales))
        return scatter.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, x_scale, weight_scale, *inputs = ctx.saved_tensors
        products: Products = ctx.products
        need_x, need_weight = ctx.needs_input_grad[:2]
        gather = collectives.start_gather(grad, ctx.tp, whole=products.scaled)
        scale = products.scale(gather.wait(), gradient=True) if products.scaled else None
        grad_x = None
        if need_x:
            grad_x = grad.new_empty(ctx.shape)
            for part in gather.parts:
                products.grad_input(
                    gather.wait(part), weight, scale, weight_scale, out=grad_x[part]
                )
        grad_weight = None
        if need_weight:
            x = ctx.again(*inputs)
            grad_weight = _grad_weight(ctx, gather.wait(), x, scale, x_scale)
        return grad_x, grad_weight, None, None, None


class _SumRowGradients(torch.autograd.Function):
    """Identity; backward sums rows `[start, start + length)` of the gradient over the copies."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, length: int, copies: Axis) -> Tensor:
        ctx.rows, ctx.copies = (start, length), copies
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad.narrow(0, *ctx.rows), group=ctx.copies.group)
        return grad, None, None, None
