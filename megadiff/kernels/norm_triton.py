# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
"""RMSNorm in Triton, with the addition before it and the gradient that passes beside it.

A block adds to the residual stream x and normalises the sum r; r goes on to the next addition, so
its gradient has two parts. Forward reads x and y once and writes r and norm(r); backward reads r
and the two gradients once and writes their sum. Arithmetic is float32; r is rounded before it is
normalised, as it is stored. Imported only when used: Triton is not a dependency."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadiff.kernels.device import refuse_second_derivative

# Elements in flight in backward for each multiprocessor; each program sums the weight's gradient.
_IN_FLIGHT = 8192


@triton.jit
def _forward(
    x, y, weight, total, out, rstd, width, eps, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    r = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        r += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        rounded = r.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        r = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(r * r, 0) / width + eps)
    tl.store(rstd + row, scale)
    r *= scale
    if WEIGHT:
        r *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, r.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    r, weight, rstd, dout, dtotal, dr, partial, rows, width, ADD: tl.constexpr,
    WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dw = tl.zeros([BLOCK], tl.float32)
    if WEIGHT:
        w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(first, rows, tl.num_programs(0)):
        at = row * width + columns
        scale = tl.load(rstd + row)
        normed = tl.load(r + at, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        dw += d * normed
        if WEIGHT:
            d *= w
        d = scale * (d - normed * (tl.sum(d * normed, 0) / width))
        if ADD:
            d += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dr + at, d.to(dr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(partial + first * width + columns, dw, mask=inside)


def _block(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _programs(rows: int, width: int, device: torch.device) -> int:
    if device.type != "cuda":
        return min(rows, 2)
    each = min(max(_IN_FLIGHT // triton.next_power_of_2(width), 4), 32)
    return min(rows, each * torch.cuda.get_device_properties(device).multi_processor_count)


class _AddRMSNorm(torch.autograd.Function):
    """(r, norm(r)) of r = x + y, or of r = x without y."""

    @staticmethod
    def forward(
        ctx, x: Tensor, y: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        weight = None if weight is None else weight.contiguous()
        given, out = x.contiguous(), x.new_empty(x.shape)
        total = given if y is None else x.new_empty(x.shape)
        rstd = x.new_empty(rows, dtype=torch.float32)
        _forward[(rows,)](
            given, given if y is None else y.contiguous(), weight, total, out, rstd, width, eps,
            ADD=y is not None, WEIGHT=weight is not None, **_block(width),
        )  # fmt: skip
        ctx.save_for_backward(x if y is None else total, weight, rstd)
        ctx.added = y is not None
        ctx.set_materialize_grads(False)
        return (x.view_as(x) if y is None else total), out

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dout: Tensor | None):  # type: ignore[override]
        refuse_second_derivative()
        r, weight, rstd = ctx.saved_tensors
        if dout is None:
            return dtotal, dtotal if ctx.added else None, None, None
        width, rows = r.shape[-1], rstd.numel()
        programs = _programs(rows, width, r.device)
        dr, r, dout = r.new_empty(r.shape), r.contiguous(), dout.contiguous()
        partial = None if weight is None else rstd.new_empty((programs, width))
        _backward[(programs,)](
            r, weight, rstd, dout, dout if dtotal is None else dtotal.contiguous(), dr, partial,
            rows, width, ADD=dtotal is not None, WEIGHT=weight is not None, **_block(width),
        )  # fmt: skip
        dweight = None if partial is None else partial.sum(0).to(weight.dtype)
        return dr, dr if ctx.added else None, dweight, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As `megadiff.kernels.add_rms_norm`; x and y of one shape and dtype, float32 or less."""
    return _AddRMSNorm.apply(x, y, weight, eps)  # type: ignore[return-value]
