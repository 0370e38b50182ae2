"""How one call of the fused operator is run: tile shapes, copy-engine descriptors, launches."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megadiff.kernels import diff_backward, diff_forward

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


def statistics_pitch(tokens: int, sequences: int) -> int:
    """Row pitch of per-query statistics (`diff_common.statistics_start`), a multiple of 16
    bytes."""
    return (tokens // 4 + sequences + 1) * 4


def block_count(length: int, block: int) -> int:
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
        blocks = block_count(length, block)
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
    blocks = block_count(call.max_q, PREPROCESS_ROWS)
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
    """The launches for dK and dV, then the one for dQ."""
    plan = _Plan(q, k, v, call)
    rows_g = _rows(g)
    tiles = plan.tiles

    def keys(tile: Tile, want_dk: bool, want_dv: bool) -> Launch:
        grid, arguments, constants = plan.common(tile, call.max_k, tile.keys, plan.groups)
        arguments |= {
            "g_desc": _descriptor(rows_g, tile.queries, plan.d_v),
            "lse_desc": _descriptor(lse, 1, tile.queries),
            "delta_desc": _descriptor(delta.flatten(0, 1), 1, tile.queries),
            "dk_out": dk,
            "dv_out": dv,
            "scale": call.scale,
        }
        constants |= {"WANT_DK": want_dk, "WANT_DV": want_dv}
        kernel = diff_backward.backward_keys
        return Launch(kernel, grid, arguments, constants, tile.warps, tile.stages)

    if tiles.dv is None:
        for_keys = [keys(tiles.dk, True, True)]
    else:
        for_keys = [keys(tiles.dv, False, True), keys(tiles.dk, True, False)]
    tile = tiles.dq
    grid, arguments, constants = plan.common(tile, call.max_q, tile.queries, plan.pairs)
    arguments |= {
        "g_desc": _descriptor(rows_g, tile.queries, plan.d_v),
        "lse": lse,
        "delta": delta,
        "pitch": lse.shape[1],
        "dq_out": dq,
        "scale": call.scale,
    }
    kernel = diff_backward.backward_queries
    return [*for_keys, Launch(kernel, grid, arguments, constants, tile.warps, tile.stages)]
