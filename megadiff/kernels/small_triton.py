# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# (Triton kernels are compiled by Triton, whose types pyright does not know)
"""Memory-bound kernels in Triton: SwiGLU, rotary embedding, cross entropy. Each moves every byte
once.

They serve eager CUDA calls; inside a compiled model the plain torch forms are used, which the
compiler fuses. Arithmetic is float32. Imported only when used: Triton is not a dependency."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadiff.kernels.device import refuse_second_derivative

_COLUMNS = 1024


@triton.jit
def _swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, dy, grad, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * 2 * width + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = d * up * (sigmoid + silu * (1.0 - sigmoid))
    dtype = grad.dtype.element_ty
    tl.store(grad + at, dgate.to(dtype), mask=inside)
    tl.store(grad + at + width, (d * silu).to(dtype), mask=inside)


def _swiglu_grid(gate_up: Tensor) -> tuple[int, int]:
    width = gate_up.shape[-1] // 2
    return gate_up.numel() // (2 * width), triton.cdiv(width, _COLUMNS)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        _swiglu_forward[_swiglu_grid(gate_up)](gate_up, out, width, BLOCK=_COLUMNS)
        return out

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override]
        refuse_second_derivative()
        (gate_up,) = ctx.saved_tensors
        width, grad = gate_up.shape[-1] // 2, torch.empty_like(gate_up)
        grid = _swiglu_grid(gate_up)
        _swiglu_backward[grid](gate_up, dy.contiguous(), grad, width, BLOCK=_COLUMNS)
        return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """As `megadiff.kernels.swiglu`."""
    return _SwiGLU.apply(gate_up)  # type: ignore[return-value]


@triton.jit
def _rotate(
    x, out, pitch, out_pitch, heads, first, token, cos, sin, sign, D: tl.constexpr,
    PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = D // 2
    head = first + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    real = pairs < half
    c = tl.load(cos + pairs, mask=real, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + pairs, mask=real, other=0.0).to(tl.float32)[None, :] * sign
    source = x + token * pitch + head[:, None] * D
    target = out + token * out_pitch + head[:, None] * D
    dtype = out.dtype.element_ty
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (head < heads)[:, None] & (columns < D)
        whole = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(whole, [HEADS, PAIRS, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), [HEADS, 2 * PAIRS])
        tl.store(target + columns, turned.to(dtype), mask=inside)
    else:
        columns = pairs[None, :]
        inside = (head < heads)[:, None] & real[None, :]
        a = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + columns, (a * c - b * s).to(dtype), mask=inside)
        tl.store(target + half + columns, (a * s + b * c).to(dtype), mask=inside)


@triton.jit
def _rotary(
    q, k, v, q_out, k_out, v_out, cos, sin, positions, q_pitch, k_pitch, v_pitch, out_pitch,
    q_heads, k_heads, v_width, sign, D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One token and a few heads of q or of k, by row `token % positions` of cos and sin, or columns
    of v, which are copied."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    both = q_blocks + tl.cdiv(k_heads, HEADS)
    cos += token % positions * (D // 2)
    sin += token % positions * (D // 2)
    if block < q_blocks:
        _rotate(
            q, q_out, q_pitch, out_pitch, q_heads, block * HEADS, token, cos, sin, sign, D, PAIRS,
            HEADS, INTERLEAVED,
        )  # fmt: skip
    elif block < both:
        block -= q_blocks
        _rotate(
            k, k_out, k_pitch, out_pitch, k_heads, block * HEADS, token, cos, sin, sign, D, PAIRS,
            HEADS, INTERLEAVED,
        )  # fmt: skip
    else:
        columns = (block - both) * (2 * HEADS * PAIRS) + tl.arange(0, 2 * HEADS * PAIRS)
        inside = columns < v_width
        copied = tl.load(v + token * v_pitch + columns, mask=inside)
        tl.store(v_out + token * out_pitch + columns, copied, mask=inside)


def _turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sign: float,
) -> None:
    """Rotate the rows of q and k, `[tokens, heads * d]`, into the first columns of `out`, and copy
    those of v behind them."""
    d = 2 * cos.shape[-1]
    q_heads, k_heads = q.shape[1] // d, k.shape[1] // d
    block = min(8, triton.next_power_of_2(max(q_heads, k_heads)))
    pairs = triton.next_power_of_2(d // 2)
    blocks = triton.cdiv(q_heads, block) + triton.cdiv(k_heads, block)
    blocks += triton.cdiv(v.shape[1], 2 * block * pairs)
    k_out, v_out = out[:, q.shape[1] :], out[:, q.shape[1] + k.shape[1] :]
    _rotary[(q.shape[0], blocks)](
        q, k, v, out, k_out, v_out, cos, sin, cos.numel() // (d // 2), q.stride(0), k.stride(0),
        v.stride(0), out.stride(0), q_heads, k_heads, v.shape[1], sign, D=d, PAIRS=pairs,
        HEADS=block, INTERLEAVED=interleaved, num_warps=2,
    )  # fmt: skip


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, widths: list[int], cos: Tensor, sin: Tensor, interleaved: bool):
        y, cos, sin = y.detach(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.padding, ctx.interleaved = y.shape[-1] - sum(widths), interleaved
        rows = y.view(-1, y.shape[-1])
        q, k = rows[:, : widths[0]], rows[:, widths[0] : widths[0] + widths[1]]
        _turn(q, k, rows[:, :0], rows, cos, sin, interleaved, 1.0)
        torch.autograd.graph.increment_version(y)  # who saved y for backward is told
        return y.split([*widths, ctx.padding], -1)[: len(widths)]

    @staticmethod
    def backward(ctx, *parts: Tensor):  # type: ignore[override]
        """The first two of at least three parts are turned back; the padding gets zeros."""
        refuse_second_derivative()
        dq, dk, dv, *rest = parts
        widths = [x.shape[-1] for x in parts]
        dy = dq.new_empty(*dq.shape[:-1], sum(widths) + ctx.padding)
        dq, dk, dv = (x.contiguous().flatten(0, -2) for x in (dq, dk, dv))
        _turn(dq, dk, dv, dy.flatten(0, -2), *ctx.saved_tensors, ctx.interleaved, -1.0)
        *places, zeros = dy.split([*widths, ctx.padding], -1)[3:]
        for place, part in zip(places, rest, strict=True):
            place.copy_(part)
        zeros.zero_()
        return dy, None, None, None, None


def split_rotary(
    y: Tensor, widths: list[int], cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """As `megadiff.kernels.split_rotary`, in place; cos and sin are constants."""
    return _SplitRotary.apply(y, widths, cos, sin, interleaved)  # type: ignore[return-value]


@triton.jit
def _partials(
    logits, labels, maximum, total, target, pitch, vocab_start, columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row) - vocab_start
    base = logits + row * pitch
    offsets = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, columns, BLOCK):
        at = begin + offsets
        x = tl.load(base + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        sums = sums * tl.exp(top - safe) + tl.exp(x - safe)
        top = new_top
    row_max = tl.max(top, 0)
    tl.store(maximum + row, row_max)
    tl.store(total + row, tl.sum(sums * tl.exp(top - row_max), 0))
    if (label >= 0) & (label < columns):
        tl.store(target + row, tl.load(base + label).to(tl.float32))
    else:
        tl.store(target + row, 0.0)


@triton.jit
def _gradient(
    logits, labels, maximum, total, dloss, grad, pitch, vocab_start, columns, all_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row) - vocab_start
    d = tl.load(dloss + row)
    x = tl.load(logits + row * pitch + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(maximum + row)) / tl.load(total + row)
    p = tl.where((at == label) & (at < columns), p - 1.0, p) * d
    tl.store(grad + row * pitch + at, p.to(grad.dtype.element_ty), mask=at < all_columns)


def cross_entropy_partials(
    logits: Tensor, labels: Tensor, vocab_start: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, sum and target, float32 `[rows]`; logits `[rows, all]`, the first `columns`
    count. Everything is contiguous."""
    rows = logits.shape[0]
    maximum, total, target = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    _partials[(rows,)](
        logits, labels, maximum, total, target, logits.stride(0), vocab_start, columns,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return maximum, total, target


def cross_entropy_grad(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    dloss: Tensor,
    grad: Tensor,
    vocab_start: int,
    columns: int,
) -> None:
    """Write (softmax - one-hot) * dloss into grad, which may be logits itself; all contiguous."""
    rows, all_columns = logits.shape
    _gradient[(rows, triton.cdiv(all_columns, 2048))](
        logits, labels, maximum, total, dloss, grad, logits.stride(0), vocab_start, columns,
        all_columns, BLOCK=2048,
    )  # fmt: skip
    torch.autograd.graph.increment_version(grad)  # who saved the logits for backward is told
