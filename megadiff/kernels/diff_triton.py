"""The fused operator in Triton: tile shapes, launches, and the registration with torch.

Runs wherever Triton runs (written for and measured on Hopper), and in Triton's CPU interpreter
(`TRITON_INTERPRET=1`) for tests. Imported only when used: Triton is not a dependency.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megadiff.kernels import diff_backward, diff_forward
from megadiff.kernels.geometry import Geometry

_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """Queries and keys per block, warps, pipeline stages, heads that run side by side."""

    queries: int
    keys: int
    warps: int
    stages: int
    group: int


@dataclass(frozen=True)
class Tiles:
    """How one shape is run. Measurements: docs/kernels.md."""

    joint: bool  # forward: both branches at once
    forward: Tile
    dk: Tile
    dv: Tile | None  # dV in a kernel of its own; None: together with dK
    dq: Tile


def tiles_for(d: int, d_v: int, own_keys: bool) -> Tiles:
    """Tile shapes by (padded) widths. The registers for the accumulators decide."""
    if d_v > 128 or d + d_v > 256:
        return Tiles(
            joint=False,
            forward=Tile(128, 64, 8, 3, 4),
            dk=Tile(32, 128, 8, 2, 3),
            dv=Tile(64, 128, 8, 2, 4),
            dq=Tile(128, 32, 8, 2, 8),
        )
    if d > 64:
        return Tiles(
            joint=True,
            forward=Tile(64, 64, 4, 2, 8),
            dk=Tile(32, 64, 4, 2, 6),
            dv=Tile(32, 64, 4, 2, 6) if own_keys else None,
            dq=Tile(64, 32, 4, 3, 8),
        )
    if d_v > 64:
        return Tiles(
            joint=True,
            forward=Tile(64, 64, 4, 3, 8),
            dk=Tile(64, 64, 4, 2, 8),
            dv=None,
            dq=Tile(128, 64, 8, 3, 8),
        )
    return Tiles(
        joint=True,
        forward=Tile(64, 128, 4, 2, 8),
        dk=Tile(64, 64, 4, 2, 4),
        dv=None,
        dq=Tile(64, 64, 4, 2, 8),
    )


@dataclass(frozen=True)
class Call:
    """The inputs of one call besides q, k, v: visibility, lambda, epilogue."""

    lam: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    used: Tensor | None
    max_q: int
    max_k: int
    left: int  # -1: no limit
    right: int
    scale: float
    weight: Tensor | None
    eps: float | None
    out_scale: float
    width: int  # of v before padding


@dataclass(frozen=True)
class Launch:
    """One kernel with all that it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int

    def run(self) -> None:
        if math.prod(self.grid):
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
            )


def _rows(x: Tensor) -> Tensor:
    """x as `[tokens, heads * width]` with a row pitch that the copy engine takes; copied if need
    be."""
    heads, width = x.shape[-2:]
    tokens = x.shape[:-2]
    pitch = x.stride(-3)
    regular = (
        (x.stride(-1) == 1 or width == 1)
        and (heads == 1 or x.stride(-2) == width)
        and (len(tokens) == 1 or tokens[0] == 1 or x.stride(0) == tokens[1] * pitch)
        and pitch >= heads * width
        and pitch * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )
    if not regular:
        x = x.contiguous()
        pitch = heads * width
    return x.as_strided((math.prod(tokens), heads * width), (pitch, 1))


def _descriptor(rows: Tensor, block: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block, width])


def _pitch(tokens: int, sequences: int) -> int:
    """Row pitch of per-query statistics (`diff_common.statistics_start`), a multiple of 16
    bytes."""
    return (tokens // 4 + sequences + 1) * 4


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


class _Plan:
    """What all launches of one call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        self.call = call
        self.pairs, self.groups, self.d, self.d_v = (
            q.shape[-2] // 2,
            v.shape[-2],
            q.shape[-1],
            v.shape[-1],
        )
        self.own_keys = k.shape[-2] != self.groups
        self.tiles = tiles_for(self.d, self.d_v, self.own_keys)
        self.packed = call.cu_q is not None
        self.sequences = q.shape[0] if call.cu_q is None else call.cu_q.shape[0] - 1
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)

    def common(self, tile: Tile, length: int, block: int, heads: int) -> tuple[Any, Any, Any]:
        """Grid, arguments and constants that every attention kernel takes."""
        call = self.call
        blocks = _blocks(length, block)
        arguments = {
            "q_desc": _descriptor(self.q, tile.queries, self.d),
            "k_desc": _descriptor(self.k, tile.keys, self.d),
            "v_desc": _descriptor(self.v, tile.keys, self.d_v),
            "lam": call.lam,
            "cu_q": call.cu_q,
            "cu_k": call.cu_k,
            "used": call.used,
            "n_q": call.max_q,
            "n_k": call.max_k,
            "blocks": blocks,
            "n_sequences": self.sequences,
            "pairs": self.pairs,
            "groups": self.groups,
            "left": call.left,
            "right": call.right,
            "qk_scale": call.scale * _LOG2E,
        }
        constants = {
            "D": self.d,
            "DV": self.d_v,
            "BM": tile.queries,
            "BN": tile.keys,
            "GROUP": tile.group,
            "OWN_KEYS": self.own_keys,
            "PER_TOKEN": call.lam.dim() > 1,
            "PER_HEAD": call.lam.dim() == 1,
            "PACKED": self.packed,
            "HAS_USED": call.used is not None,
            "HAS_LEFT": call.left >= 0,
            "HAS_RIGHT": call.right >= 0,
            # a block can reach into another sequence, whose values must not be multiplied even by 0
            "CLEAN": self.packed
            or call.used is not None
            or call.max_k % tile.keys != 0
            or call.max_q % tile.queries != 0,
        }
        return (blocks * self.sequences * heads,), arguments, constants


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    out: Tensor | None,
    second: Tensor | None,
    normed: Tensor | None,
    lse: Tensor,
    rstd: Tensor | None,
    save: bool,
) -> Launch:
    plan = _Plan(q, k, v, call)
    tile = plan.tiles.forward
    grid, arguments, constants = plan.common(tile, call.max_q, tile.queries, plan.pairs)
    arguments |= {
        "out": out,
        "second": second,
        "normed": normed,
        "lse": lse,
        "n_tokens": plan.q.shape[0],
        "pitch": lse.shape[1],
        "rstd": rstd,
        "weight": call.weight,
        "width": float(call.width),
        "eps": call.eps or 0.0,
        "out_scale": call.out_scale,
    }
    constants |= {
        "NORM": call.eps is not None,
        "HAS_WEIGHT": call.weight is not None,
        "SAVE": save,
    }
    kernel = diff_forward.forward_joint if plan.tiles.joint else diff_forward.forward_in_turn
    return Launch(kernel, grid, arguments, constants, tile.warps, tile.stages)


PREPROCESS_ROWS = 32


def preprocess_launch(
    dy: Tensor,
    out: Tensor,
    second: Tensor,
    rstd: Tensor | None,
    call: Call,
    sequences: int,
    g: Tensor | None,
    delta: Tensor,
    dlam: Tensor,
    dweight: Tensor | None,
) -> Launch:
    """dy, out and second: `[tokens, pairs, d_v]`, contiguous; dlam: `[tokens, pairs]`."""
    tokens, pairs, d_v = out.shape
    arguments = {
        "dy": dy,
        "out": out,
        "second": second,
        "rstd": rstd,
        "lam": call.lam,
        "weight": call.weight,
        "cu_q": call.cu_q,
        "g": g,
        "delta": delta,
        "dlam": dlam,
        "dweight": dweight,
        "n_q": call.max_q,
        "n_tokens": tokens,
        "pitch": delta.shape[-1],
        "pairs": pairs,
        "width": float(call.width),
        "out_scale": call.out_scale,
    }
    constants = {
        "DV": d_v,
        "ROWS": PREPROCESS_ROWS,
        "PER_TOKEN": call.lam.dim() > 1,
        "PER_HEAD": call.lam.dim() == 1,
        "PACKED": call.cu_q is not None,
        "NORM": call.eps is not None,
        "HAS_WEIGHT": call.weight is not None,
    }
    blocks = _blocks(call.max_q, PREPROCESS_ROWS)
    arguments |= {"blocks": blocks}
    grid = (blocks * sequences * pairs,)
    return Launch(diff_backward.preprocess, grid, arguments, constants, 4, 1)


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> list[Launch]:
    plan = _Plan(q, k, v, call)
    rows_g = _rows(g)
    tiles = plan.tiles

    def launch(kernel: Any, tile: Tile, queries: bool, outputs: dict, flags: dict) -> Launch:
        if queries:
            length, block, heads = call.max_q, tile.queries, plan.pairs
        else:
            length, block, heads = call.max_k, tile.keys, plan.groups
        grid, arguments, constants = plan.common(tile, length, block, heads)
        arguments |= {"g_desc": _descriptor(rows_g, tile.queries, plan.d_v), "scale": call.scale}
        if queries:
            arguments |= {"lse": lse, "delta": delta, "pitch": lse.shape[1], **outputs}
        else:
            arguments |= {
                "lse_desc": _descriptor(lse, 1, tile.queries),
                "delta_desc": _descriptor(delta.flatten(0, 1), 1, tile.queries),
                **outputs,
            }
        return Launch(kernel, grid, arguments, constants | flags, tile.warps, tile.stages)

    keys = diff_backward.backward_keys
    outputs = {"dk_out": dk, "dv_out": dv}
    if tiles.dv is not None:
        for_keys = [
            launch(keys, tiles.dv, False, outputs, {"WANT_DK": False, "WANT_DV": True}),
            launch(keys, tiles.dk, False, outputs, {"WANT_DK": True, "WANT_DV": False}),
        ]
    else:
        for_keys = [launch(keys, tiles.dk, False, outputs, {"WANT_DK": True, "WANT_DV": True})]
    return [*for_keys, launch(diff_backward.backward_queries, tiles.dq, True, {"dq_out": dq}, {})]


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
        return None if x is None else x.to(torch.int32).contiguous()

    return Call(
        lam.detach().contiguous(),
        int32(cu_q),
        int32(cu_k),
        int32(used),
        max_q,
        max_k,
        left,
        right,
        scale,
        None if weight is None else weight.detach().contiguous(),
        eps,
        out_scale,
        width,
    )


@torch.library.custom_op("megadiff::diff_attention", mutates_args=())
def forward_op(
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
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, O, O2, log-sum-exp, 1 / rms). O is y where there is no norm, and then empty here; all but
    y are empty or arbitrary without `save`. lam is float32; widths are powers of two, at least
    16."""
    call = _call(
        q, k, lam, cu_q, cu_k, used, weight, max_q, max_k, left, right, scale, eps, out_scale, width
    )
    y, out, second, lse, rstd = forward_outputs(q, v, cu_q, eps, save)
    if cu_q is not None:  # rows after the last document are written by no program
        for x in (y, out, second, rstd):
            x.zero_()
    forward_launch(
        q,
        k,
        v,
        call,
        y if eps is None else out,
        second,
        y if eps is not None else None,
        lse,
        rstd,
        save,
    ).run()
    return y, out, second, lse, rstd


def forward_outputs(
    q: Tensor, v: Tensor, cu_q: Tensor | None, eps: float | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, pairs = q.shape[:-2], q.shape[-2] // 2
    shape = (*tokens, pairs, v.shape[-1])
    n_tokens = math.prod(tokens)
    pitch = _pitch(n_tokens, tokens[0] if cu_q is None else cu_q.shape[0] - 1)
    in_turn = not tiles_for(q.shape[-1], v.shape[-1], True).joint  # uses `second` to work in
    return (
        q.new_empty(shape),
        q.new_empty(shape if eps is not None and save else (0,)),
        q.new_empty(shape if save or in_turn else (0,)),
        q.new_zeros((2 * pairs, pitch), dtype=torch.float32),  # has gaps between sequences
        q.new_empty((pairs, n_tokens) if eps is not None and save else (0,), dtype=torch.float32),
    )


@forward_op.register_fake
def _(q, k, v, lam, weight, cu_q, cu_k, used, max_q, max_k, left, right, scale, eps, out_scale,
width, save):  # fmt: skip
    return forward_outputs(q, v, cu_q, eps, save)


@torch.library.custom_op("megadiff::diff_attention_backward", mutates_args=())
def backward_op(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, lam and weight (empty if there is none)."""
    call = _call(
        q, k, lam, cu_q, cu_k, used, weight, max_q, max_k, left, right, scale, eps, out_scale, width
    )
    pairs, d_v = out.shape[-2:]
    dy, out, second = (x.contiguous().view(-1, pairs, d_v) for x in (dy, out, second))
    sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    delta = lse.new_empty((pairs, 3 if lam.dim() > 1 else 2, lse.shape[1]))
    dlam = lse.new_empty((out.shape[0], pairs))
    if cu_q is not None:
        dlam.zero_()
    g = None if eps is None else torch.empty_like(out)
    partial = None
    if weight is not None:
        programs = _blocks(call.max_q, PREPROCESS_ROWS) * sequences * pairs
        partial = lse.new_empty((programs, d_v))
    preprocess_launch(dy, out, second, rstd, call, sequences, g, delta, dlam, partial).run()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if cu_q is not None:
        for x in (dq, dk, dv):
            x.zero_()
    g = dy if g is None else g
    for launch in backward_launches(q, k, v, call, g, lse, delta, dq, dk, dv):
        launch.run()
    dlam = dlam.view(lam.shape) if lam.dim() > 1 else dlam.sum(0)
    dlam = dlam.sum() if lam.dim() == 0 else dlam
    dweight = partial.sum(0).to(dy.dtype) if partial is not None else dy.new_empty(0)
    if weight is not None:
        dweight = dweight.to(weight.dtype)
    return dq, dk, dv, dlam, dweight


@backward_op.register_fake
def _(dy, q, k, v, lam, weight, out, second, lse, rstd, cu_q, cu_k, used, max_q, max_k, left, right,
scale, eps, out_scale, width):  # fmt: skip
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
        return (None,) * 17
    saved = ctx.saved_tensors  # once: under recomputation every look makes them anew
    dq, dk, dv, dlam, dweight = backward_op(dy, *saved, *ctx.numbers)
    return dq, dk, dv, dlam, (None if saved[4] is None else dweight), *[None] * 12


forward_op.register_autograd(_backward, setup_context=_setup_context)


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
    save: bool,
) -> Tensor:
    """The whole operator with its epilogue, in q's dtype. save: a backward will follow."""
    assert geometry.max_seqlen_q is not None and geometry.max_seqlen_k is not None
    width = v.shape[-1]
    y = forward_op(
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
        save,
    )[0]
    return y[..., :width]
