"""How one call of the fused operator is run: tile shapes, copy-engine descriptors, launches.

A training step waits for the host where sequences are short, so what depends on shapes alone is
kept: descriptors' contents, and the compiled kernel of each launch."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
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


_IN_TURN = Tiles(
    joint=False,
    forward=Tile(128, 64, 8, 3, 4),
    dk=Tile(32, 128, 8, 2, 3),
    dv=Tile(64, 128, 8, 2, 4),
    dq=Tile(128, 32, 8, 2, 8),
)
_128_SHARED_KEYS = Tiles(
    joint=True,
    forward=Tile(64, 64, 4, 2, 8),
    dk=Tile(32, 64, 4, 2, 6),
    dv=None,
    dq=Tile(64, 32, 4, 3, 8),
)
_128_OWN_KEYS = replace(_128_SHARED_KEYS, dv=_128_SHARED_KEYS.dk)
_64_WIDE_VALUES = Tiles(
    joint=True,
    forward=Tile(64, 64, 4, 3, 8),
    dk=Tile(64, 64, 4, 2, 8),
    dv=None,
    dq=Tile(128, 64, 8, 3, 8),
)
_64 = Tiles(
    joint=True,
    forward=Tile(64, 128, 4, 2, 8),
    dk=Tile(64, 64, 4, 2, 4),
    dv=None,
    dq=Tile(64, 64, 4, 2, 8),
)


def tiles_for(d: int, d_v: int, own_keys: bool) -> Tiles:
    """Tile shapes by (padded) widths. The registers for the accumulators decide."""
    if d_v > 128 or d + d_v > 256:
        return _IN_TURN
    if d > 64:
        return _128_OWN_KEYS if own_keys else _128_SHARED_KEYS
    return _64_WIDE_VALUES if d_v > 64 else _64


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


_compiled: dict[tuple, CompiledKernel] = {}


@dataclass(frozen=True)
class Launch:
    """One kernel with all that it is called with. Integers are not specialised, and tensors start
    on 16 bytes (`aligned`): the constants, the types of the tensors and the options name the
    compiled kernel. What is a float is never an integer, which has another type."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    overlap: bool = False  # may start before the kernel before it has ended

    def run(self) -> None:
        if not self.programs:
            return
        grid = (self.programs, 1, 1)
        everything = self.arguments | self.constants
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            self.kernel[grid](**everything)
            return
        # Triton's own way to the compiled kernel costs more than all the rest of a launch
        types = [getattr(x, "dtype", None) for x in self.arguments.values()]
        device = torch.cuda.current_device()
        how = (self.warps, self.stages, self.overlap)
        key = (self.kernel.fn, device, *how, *self.constants.values(), *types)
        known = _compiled.get(key)
        if known is None:
            options = {"num_warps": self.warps, "num_stages": self.stages}
            if self.overlap:
                options["launch_pdl"] = True
            _compiled[key] = self.kernel[grid](**everything, **options)
        else:
            known[grid](*[everything[name] for name in self.kernel.arg_names])


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and from an address that is a multiple of 16."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@functools.lru_cache(1024)
def _template(kind: type, dtype: torch.dtype, *description: Any) -> dict[str, Any]:
    """All of a descriptor but its tensor."""
    lists = [list(x) if isinstance(x, tuple) else x for x in description]
    made = vars(kind(torch.empty(0, dtype=dtype), *lists))
    return {name: value for name, value in made.items() if name != "base"}


def descriptor(kind: Any, x: Tensor, *description: Any) -> Any:
    """A descriptor of a kind, `kind(x, *description)`, of a tensor whose strides and start the copy
    engine takes. Made without the constructor's checks, which take longer than a launch."""
    made = kind.__new__(kind)
    made.__dict__ |= _template(kind, x.dtype, *description)
    made.base = x
    return made


@functools.lru_cache(1024)
def _row_pitch(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int | None:
    """Between the rows of a tensor seen as `[tokens, heads * width]`; None if the copy engine takes
    no such view."""
    *tokens, heads, width = shape
    pitch = strides[-3]
    regular = (
        (strides[-1] == 1 or width == 1)
        and (heads == 1 or strides[-2] == width)
        and (len(tokens) == 1 or tokens[0] == 1 or strides[0] == tokens[1] * pitch)
        and pitch >= heads * width
        and pitch * size % 16 == 0
    )
    return pitch if regular else None


class _Rows:
    """A tensor as `[tokens, heads * width]`; copied if the copy engine cannot take it as it is."""

    def __init__(self, x: Tensor) -> None:
        *tokens, heads, self.width = x.shape
        columns = heads * self.width
        pitch = _row_pitch(x.shape, x.stride(), x.element_size())
        if pitch is None or x.data_ptr() % 16:
            x, pitch = aligned(x), columns
        self.x, self.shape, self.strides = x, (math.prod(tokens), columns), (pitch, 1)

    def blocks(self, rows: int) -> TensorDescriptor:
        """Read in blocks of `rows` tokens of one head."""
        block = (rows, self.width)
        return descriptor(TensorDescriptor, self.x, self.shape, self.strides, block)


def _statistics(x: Tensor, block: int) -> TensorDescriptor:
    """Statistics `[.., pitch]`, contiguous, one row of `block` queries at a time."""
    pitch = x.shape[-1]
    shape = (x.numel() // pitch, pitch)
    return descriptor(TensorDescriptor, x, shape, (pitch, 1), (1, block))


def statistics_pitch(tokens: int, sequences: int) -> int:
    """Row pitch of per-query statistics (`diff_common.statistics_start`), a multiple of 16
    bytes."""
    return (tokens // 4 + sequences + 1) * 4


def block_count(length: int, block: int) -> int:
    return -(-length // block)


def side(heads: int, most: int) -> int:
    """Heads side by side, in even portions: few alone at the end would start long blocks late."""
    return block_count(heads, max(block_count(heads, most), 1))


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
        self.q, self.k, self.v = _Rows(q), _Rows(k), _Rows(v)

    def common(self, tile: Tile, length: int, block: int, heads: int) -> tuple[int, Any, Any]:
        """Programs, arguments and constants that every attention kernel takes."""
        call = self.call
        blocks = block_count(length, block)
        arguments = {
            "q_desc": self.q.blocks(tile.queries),
            "k_desc": self.k.blocks(tile.keys),
            "v_desc": self.v.blocks(tile.keys),
            "lam": call.lam,
            "cu_q": call.cu_q,
            "cu_k": call.cu_k,
            "used": call.used,
            "n_q": call.max_q,
            "n_k": call.max_k,
            "blocks": blocks,
            "side": side(self.sequences * heads, tile.group),
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
        return blocks * self.sequences * heads, arguments, constants


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
    programs, arguments, constants = plan.common(tile, call.max_q, tile.queries, plan.pairs)
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
    return Launch(kernel, programs, arguments, constants, tile.warps, tile.stages)


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
    """dy, out and second: `[.., pairs, d_v]`, contiguous; dlam: `[tokens, pairs]`."""
    (tokens, pairs), d_v = dlam.shape, out.shape[-1]
    blocks = block_count(call.max_q, PREPROCESS_ROWS)
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
        "blocks": blocks,
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
    programs = blocks * sequences * pairs
    return Launch(diff_backward.preprocess, programs, arguments, constants, 4, 1)


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
    rows_g = _Rows(g)
    tiles = plan.tiles

    def keys(tile: Tile, want_dk: bool, want_dv: bool) -> Launch:
        programs, arguments, constants = plan.common(tile, call.max_k, tile.keys, plan.groups)
        arguments |= {
            "g_desc": rows_g.blocks(tile.queries),
            "lse_desc": _statistics(lse, tile.queries),
            "delta_desc": _statistics(delta, tile.queries),
            "dk_out": dk,
            "dv_out": dv,
            "scale": call.scale,
        }
        constants |= {"WANT_DK": want_dk, "WANT_DV": want_dv}
        kernel = diff_backward.backward_keys
        return Launch(kernel, programs, arguments, constants, tile.warps, tile.stages)

    if tiles.dv is None:
        for_keys = [keys(tiles.dk, True, True)]
    else:
        for_keys = [keys(tiles.dv, False, True), keys(tiles.dk, True, False)]
    tile = tiles.dq
    programs, arguments, constants = plan.common(tile, call.max_q, tile.queries, plan.pairs)
    arguments |= {
        "g_desc": rows_g.blocks(tile.queries),
        "lse": lse,
        "delta": delta,
        "pitch": lse.shape[1],
        "dq_out": dq,
        "scale": call.scale,
    }
    kernel = diff_backward.backward_queries
    return [*for_keys, Launch(kernel, programs, arguments, constants, tile.warps, tile.stages)]
