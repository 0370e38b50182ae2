"""The fused operator registered with torch: forward and backward operators, fake kernels, autograd.
In plain eager mode an autograd function runs the same code, since dispatch to registered operators
takes as long as the kernels of a short sequence.

Runs wherever Triton runs (written for and measured on Hopper), and in Triton's CPU interpreter
(`TRITON_INTERPRET=1`) for tests. Imported only when used: Triton is not a dependency.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels import diff_launch
from megadiff.kernels.device import is_plain_call, refuse_second_derivative
from megadiff.kernels.diff_launch import Call, aligned
from megadiff.kernels.geometry import Geometry


def _call(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used: Tensor | None,
    weight: Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float,
    eps: float | None,
    out_scale: float,
    width: int,
) -> Call:
    def int32(x: Tensor | None) -> Tensor | None:
        return None if x is None else aligned(x.to(torch.int32))

    return Call(
        aligned(lam),
        int32(cu_q),
        int32(cu_k),
        int32(used),
        max_q,
        max_k,
        left,
        right,
        scale,
        None if weight is None else aligned(weight),
        eps,
        out_scale,
        width,
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    weight: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used: Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float,
    eps: float | None,
    out_scale: float,
    width: int,
    hopper: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, O, O2, log-sum-exp, 1 / rms). O is y where there is no norm, and then empty here; all but
    y are empty or arbitrary without `save`. lam is float32; widths are powers of two, at least 16.
    hopper: with the kernels of `megadiff.kernels.hopper`."""
    call = _call(
        q, k, lam, cu_q, cu_k, used, weight, max_q, max_k, left, right, scale, eps, out_scale, width
    )
    y, out, second, lse, rstd = forward_outputs(q, v, cu_q, eps, hopper, save)
    if cu_q is not None:  # rows after the last document are written by no program
        for x in (y, out, second, rstd):
            x.zero_()
    make_launch = diff_launch.forward_launch
    if hopper:
        from megadiff.kernels.hopper import launch as hopper_launch  # needs its version of Triton

        make_launch = hopper_launch.forward_launch
    first, normed = (y, None) if eps is None else (out, y)
    make_launch(q, k, v, call, first, second, normed, lse, rstd, save).run()
    return y, out, second, lse, rstd


def forward_outputs(
    q: Tensor, v: Tensor, cu_q: Tensor | None, eps: float | None, hopper: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, pairs = q.shape[:-2], q.shape[-2] // 2
    shape = (*tokens, pairs, v.shape[-1])
    n_tokens = math.prod(tokens)
    sequences = tokens[0] if cu_q is None else cu_q.shape[0] - 1
    pitch = diff_launch.statistics_pitch(n_tokens, sequences)
    # the forward in turn works in `second`
    in_turn = not diff_launch.tiles_for(q.shape[-1], v.shape[-1], own_keys=True).joint
    # has gaps between sequences, which Triton's kernels read before they mask
    make_lse = q.new_empty if hopper else q.new_zeros
    return (
        q.new_empty(shape),
        q.new_empty(shape if eps is not None and save else (0,)),
        q.new_empty(shape if save or in_turn else (0,)),
        make_lse((2 * pairs, pitch), dtype=torch.float32),
        q.new_empty((pairs, n_tokens) if eps is not None and save else (0,), dtype=torch.float32),
    )


forward_op = torch.library.custom_op("megadiff::diff_attention", _forward, mutates_args=())


@forward_op.register_fake
def _(
    q, k, v, lam, weight, cu_q, cu_k, used, max_q, max_k, left, right, scale, eps, out_scale,
    width, hopper, save,
):  # fmt: skip
    return forward_outputs(q, v, cu_q, eps, hopper, save)


def _gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    weight: Tensor | None,
    out: Tensor,
    second: Tensor,
    lse: Tensor,
    rstd: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used: Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    scale: float,
    eps: float | None,
    out_scale: float,
    width: int,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, lam and weight (empty if there is none)."""
    call = _call(
        q, k, lam, cu_q, cu_k, used, weight, max_q, max_k, left, right, scale, eps, out_scale, width
    )
    *tokens, pairs, d_v = out.shape
    dy, out, second = aligned(dy), out.contiguous(), second.contiguous()
    sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    delta = lse.new_empty((pairs, 3 if lam.dim() > 1 else 2, lse.shape[1]))
    dlam = lse.new_empty((math.prod(tokens), pairs))
    if cu_q is not None:
        dlam.zero_()
    g = None if eps is None else torch.empty_like(out)
    partial = None
    if weight is not None:
        blocks = diff_launch.block_count(call.max_q, diff_launch.PREPROCESS_ROWS)
        partial = lse.new_empty((blocks * sequences * pairs, d_v))
    diff_launch.preprocess_launch(
        dy, out, second, rstd, call, sequences, g, delta, dlam, partial
    ).run()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if cu_q is not None:
        for x in (dq, dk, dv):
            x.zero_()
    g = dy if g is None else g
    make_launches = diff_launch.backward_launches
    if hopper:
        from megadiff.kernels.hopper import launch as hopper_launch  # needs its version of Triton

        make_launches = hopper_launch.backward_launches
    for launch in make_launches(q, k, v, call, g, lse, delta, dq, dk, dv):
        launch.run()
    dlam = dlam.view(lam.shape) if lam.dim() > 1 else dlam.sum(0)
    dlam = dlam.sum() if lam.dim() == 0 else dlam
    if weight is None or partial is None:
        return dq, dk, dv, dlam, dy.new_empty(0)
    return dq, dk, dv, dlam, partial.sum(0).to(weight.dtype)


backward_op = torch.library.custom_op(
    "megadiff::diff_attention_backward", _gradients, mutates_args=()
)


@backward_op.register_fake
def _(
    dy, q, k, v, lam, weight, out, second, lse, rstd, cu_q, cu_k, used, max_q, max_k, left, right,
    scale, eps, out_scale, width, hopper,
):  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dweight = dy.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return dq, dk, dv, lam.new_empty(lam.shape), dweight


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, lam, weight, cu_q, cu_k, used, *numbers, _save = inputs
    y, out, second, lse, rstd = output
    eps = numbers[5]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        q, k, v, lam, weight, y if eps is None else out, second, lse, rstd, cu_q, cu_k, used
    )
    ctx.numbers = numbers


def _backward(ctx: Any, dy: Tensor | None, *_unused: Tensor | None) -> tuple:
    if dy is None:
        return (None,) * 18
    saved = ctx.saved_tensors  # once: under recomputation every look makes them anew
    run = _gradients if is_plain_call(dy) else backward_op
    dq, dk, dv, dlam, dweight = run(dy, *saved, *ctx.numbers)
    return dq, dk, dv, dlam, (None if saved[4] is None else dweight), *[None] * 13


forward_op.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        refuse_second_derivative()
        return _backward(ctx, dy)


def _padded(x: Tensor) -> Tensor:
    """The last dim padded with zeros to a power of two of at least 16: they change no product."""
    width = max(16, 1 << (x.shape[-1] - 1).bit_length())
    return x if width == x.shape[-1] else F.pad(x, (0, width - x.shape[-1]))


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    scale: float,
    geometry: Geometry,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    out_scale: float | None,
    hopper: bool,
    save: bool,
) -> Tensor:
    """The whole operator with its epilogue, in q's dtype. save: a backward will follow."""
    assert geometry.max_seqlen_q is not None and geometry.max_seqlen_k is not None
    width = v.shape[-1]
    inputs = (
        _padded(q),
        _padded(k),
        _padded(v),
        lam.float(),
        None if norm_weight is None else _padded(norm_weight),
        geometry.cu_seqlens_q,
        geometry.cu_seqlens_k,
        geometry.seqused_k,
        geometry.max_seqlen_q,
        geometry.max_seqlen_k,
        -1 if geometry.left is None else geometry.left,
        -1 if geometry.right is None else geometry.right,
        scale,
        norm_eps,
        1.0 if out_scale is None else out_scale,
        width,
        hopper,
        save,
    )
    if not is_plain_call(*(x for x in (q, k, v, lam, norm_weight) if x is not None)):
        y = forward_op(*inputs)[0]
    elif save:
        y: Any = _Eager.apply(*inputs)
    else:
        y = _forward(*inputs)[0]
    return y if y.shape[-1] == width else y[..., :width]
