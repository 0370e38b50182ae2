"""How one call is run on Hopper: tile shapes, copy-engine descriptors, launches."""

import functools
import math
from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megadiff.kernels import diff_launch
from megadiff.kernels.diff_launch import Call, Launch, aligned, block_count, descriptor, side
from megadiff.kernels.hopper.forward import forward
from megadiff.kernels.hopper.keys import backward_keys, sum_parts
from megadiff.kernels.hopper.queries import backward_queries

_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Keys:
    """dK and dV of 128 keys, 64 for each warp group, or with roles of 64. Queries per stage,
    stages, heads side by side, registers of the second group."""

    queries: int
    stages: int
    group: int
    roles: bool = False
    registers: int = 240
    ahead: bool = False  # scores of the next block under this block's gradients


@dataclass(frozen=True)
class Queries:
    """dQ of 128 queries. Keys per stage, stages, heads side by side, whether P is packed."""

    keys: int
    stages: int
    group: int
    lean: bool = False


@dataclass(frozen=True)
class Forward:
    """Keys per stage, stages, heads side by side."""

    keys: int
    stages: int
    group: int


@dataclass(frozen=True)
class Tiles:
    keys: Keys
    queries: Queries
    forward: Forward | None  # None: Triton's kernel, which was not measured to be slower


# (d, d_v, own keys). Measurements: docs/kernels.md.
TILES = {
    (128, 256, True): Tiles(
        Keys(64, 2, 3, roles=True, registers=216), Queries(32, 3, 4), Forward(64, 2, 4)
    ),
    (64, 128, True): Tiles(Keys(64, 2, 8), Queries(64, 3, 8), None),
    (128, 128, False): Tiles(Keys(64, 2, 6), Queries(64, 2, 8, lean=True), Forward(128, 2, 8)),
    (64, 64, False): Tiles(Keys(64, 4, 4, ahead=True), Queries(64, 4, 8), None),
}


@functools.cache
def _layout(bits: int) -> gl.NVMMASharedLayout:
    swizzle = 128 if bits == 16 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=3)


@functools.lru_cache(1024)
def _pitches(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> tuple[int, int, int] | None:
    """Strides of `[batch, tokens, heads, width]` seen as `[batch, tokens, heads * width]`; None if
    the copy engine takes no such view."""
    batch, tokens, heads, width = shape
    pitch = strides[1]
    outer = strides[0] if batch > 1 else tokens * pitch
    regular = (
        strides[3] == 1
        and (heads == 1 or strides[2] == width)
        and all(s > 0 and s * size % 16 == 0 for s in (outer, pitch))
    )
    return (outer, pitch, 1) if regular else None


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x `[batch, tokens, heads, width]` as `[batch, tokens, heads * width]`, read in blocks of
    `rows` tokens of one head; what lies past the last token reads as 0. Copied if the copy engine
    cannot take its strides."""
    batch, tokens, heads, width = x.shape
    strides = _pitches(x.shape, x.stride(), x.element_size())
    if strides is None or x.data_ptr() % 16:
        x, strides = aligned(x), (tokens * heads * width, heads * width, 1)
    shape = (batch, tokens, heads * width)
    return descriptor(TensorDescriptor, x, shape, strides, (1, rows, width), _layout(16))


def _statistics(x: Tensor, batch: int, n_q: int, block: int) -> TensorDescriptor:
    """Rows `[.., pitch]` as `[rows, batch, n_q]` (`diff_common.statistics_start`)."""
    pitch = x.shape[-1]
    shape, strides = (x.numel() // pitch, batch, n_q), (pitch, (n_q // 4 + 1) * 4, 1)
    return descriptor(TensorDescriptor, x, shape, strides, (1, 1, block), _layout(32))


def _parts(programs: int, pairs: int, causal: bool) -> int:
    """How many programs share the pairs of a query group, where one for all leaves some of about
    132 multiprocessors idle. Causal ones are of uneven length, and want more to be even."""
    few, enough = (256, 512) if causal else (128, 128)
    if programs >= few:
        return 1
    divisors = (n for n in range(1, pairs) if pairs % n == 0)
    return next((n for n in divisors if n * programs >= enough), pairs)


def _sums(dk_parts: Tensor, dv_parts: Tensor, dk: Tensor, dv: Tensor) -> Launch:
    """Over the first dim; V1's two keys of d columns are as wide as its value of 2 d."""
    width = dk.shape[-1]
    rows, at_once = dk.numel() // width, 2048 // width
    arguments = {"dk_parts": dk_parts, "dv_parts": dv_parts, "dk": dk, "dv": dv}
    arguments |= {"parts": len(dk_parts), "rows": rows}
    constants = {"ROWS": at_once, "WIDTH": width}
    return Launch(sum_parts, block_count(rows, at_once), arguments, constants, 4, 1)


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
    """As `diff_launch.backward_launches`."""
    batch, n_q, heads, d = q.shape
    n_k, groups, d_v = v.shape[1:]
    pairs = heads // 2
    own_keys = k.shape[2] != groups
    keys, queries = TILES[d, d_v, own_keys].keys, TILES[d, d_v, own_keys].queries
    arguments = {
        "lam": call.lam,
        "n_q": n_q,
        "n_k": n_k,
        "n_sequences": batch,
        "pairs": pairs,
        "groups": groups,
        "qk_scale": call.scale * _LOG2E,
        "scale": call.scale,
    }
    constants = {
        "D": d,
        "DV": d_v,
        "OWN_KEYS": own_keys,
        "PER_TOKEN": call.lam.dim() > 1,
        "PER_HEAD": call.lam.dim() == 1,
        "CAUSAL": call.right == 0,
    }
    key_blocks, query_blocks = block_count(n_k, 64 if keys.roles else 128), block_count(n_q, 128)
    parts = _parts(key_blocks * batch * groups, pairs // groups, call.right == 0)
    dk_out, dv_out = dk, dv
    sums: list[Launch] = []
    if parts > 1:
        dk_out, dv_out = (lse.new_empty((parts, *x.shape)) for x in (dk, dv))
        sums = [_sums(dk_out, dv_out, dk, dv)]
    for_keys = {
        "q_desc": _descriptor(q, keys.queries),
        "g_desc": _descriptor(g, keys.queries),
        "k_desc": _descriptor(k, 64),
        "v_desc": _descriptor(v, 64),
        "lse_desc": _statistics(lse, batch, n_q, keys.queries),
        "delta_desc": _statistics(delta, batch, n_q, keys.queries),
        "dk_out": dk_out,
        "dv_out": dv_out,
        "parts": parts,
        "blocks": key_blocks,
        "side": side(batch * groups * parts, keys.group),
    }
    for_queries = {
        "q_desc": _descriptor(q, 64),
        "g_desc": _descriptor(g, 64),
        "k_desc": _descriptor(k, queries.keys),
        "v_desc": _descriptor(v, queries.keys),
        "lse": lse,
        "delta": delta,
        "pitch": lse.shape[1],
        "dq_out": dq,
        "blocks": query_blocks,
        "side": side(batch * pairs, queries.group),
    }
    keys_constants = {
        "BM": keys.queries,
        "STAGES": keys.stages,
        "ROLES": keys.roles,
        "REGISTERS": keys.registers,
        "AHEAD": keys.ahead,
    }
    queries_constants = {"BN": queries.keys, "STAGES": queries.stages, "LEAN": queries.lean}
    return [
        Launch(
            backward_keys,
            key_blocks * batch * groups * parts,
            arguments | for_keys,
            constants | keys_constants,
            4,
            1,
        ),
        Launch(
            backward_queries,
            query_blocks * batch * pairs,
            arguments | for_queries,
            constants | queries_constants,
            4,
            1,
            overlap=True,
        ),
        *sums,
    ]


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
    """As `diff_launch.forward_launch`, with Triton's kernel where it is faster."""
    batch, n_q, heads, d = q.shape
    n_k, groups, d_v = v.shape[1:]
    pairs = heads // 2
    own_keys = k.shape[2] != groups
    tile = TILES[d, d_v, own_keys].forward
    if tile is None:
        return diff_launch.forward_launch(q, k, v, call, out, second, normed, lse, rstd, save)
    in_turn = d_v > 128
    blocks = block_count(n_q, 128 if in_turn else 64)
    arguments = {
        "q_desc": _descriptor(q, 64),
        "k_desc": _descriptor(k, tile.keys),
        "v_desc": _descriptor(v, tile.keys),
        "out": out,
        "second": second,
        "normed": normed,
        "lse": lse,
        "rstd": rstd,
        "lam": call.lam,
        "weight": call.weight,
        "n_q": n_q,
        "n_k": n_k,
        "n_tokens": batch * n_q,
        "pitch": lse.shape[1],
        "blocks": blocks,
        "side": side(batch * pairs, tile.group),
        "n_sequences": batch,
        "pairs": pairs,
        "groups": groups,
        "qk_scale": call.scale * _LOG2E,
        "width": float(call.width),
        "eps": call.eps or 0.0,
        "out_scale": call.out_scale,
    }
    constants = {
        "D": d,
        "DV": d_v,
        "BN": tile.keys,
        "OWN_KEYS": own_keys,
        "PER_TOKEN": call.lam.dim() > 1,
        "PER_HEAD": call.lam.dim() == 1,
        "CAUSAL": call.right == 0,
        "NORM": call.eps is not None,
        "HAS_WEIGHT": call.weight is not None,
        "SAVE": save,
        "IN_TURN": in_turn,
        "STAGES": tile.stages,
    }
    return Launch(forward, blocks * batch * pairs, arguments, constants, 4, 1)
