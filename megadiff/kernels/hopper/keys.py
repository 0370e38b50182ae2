"""dK and dV on Hopper: one program makes both for a block of keys of one query group, over all its
pairs (in small calls over a part of them), and reads the queries once. The formulas are those of
`diff_backward`.

A producer warp feeds a ring of `STAGES` with Q1, Q2, G and the statistics of `BM` queries:

      producer --q_full--> consumers        Q1, Q2, log-sum-exps, lambda of a stage have arrived
               --g_full--> consumers        G, D1, D2 of a stage have arrived
               <--empty--- both consumers   a stage may be overwritten
               --kv_full-> consumers        K and V, once

Scores are held transposed, `[keys, queries]`, so that P and dS are the left operands of dV and dK
in registers as they come out of the product. Two ways to share the work between the warp groups:

Owners: each group owns 64 keys and does everything for them.

ROLES, for V1 of width 128, whose dK1, dK2 and dV of 64 keys fill two groups' registers:

      scores group     S1, S2 -> P1, -lam P2 --p_full--> gradients group   dP -> dS1, dS2
                       dV += (P1 - lam P2) G  <--p_empty--                 dK1, dK2 += dS^T Q
      (two buffers of P in shared memory, in the half type)
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from megadiff.kernels.hopper.common import (
    accumulator_layout,
    left_operand_layout,
    pack,
    ring,
    schedule,
    tile,
    times_first,
    times_second,
)

_INTEGERS = ["n_q", "n_k", "blocks", "side", "n_sequences", "pairs", "groups", "parts"]


@gluon.jit
def _stat(stats, at, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """One row of statistics, `[BM]`, along the columns of a tile."""
    return stats.index(at).reshape([BM]).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _produce(
    sources, tiles, ready, at, BM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    OWNERS: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, g_desc, k_desc, v_desc, lse_desc, delta_desc = sources
    q_tiles, g_tiles, k_tiles, v_tiles, stats = tiles
    q_full, g_full, empty, kv_full = ready
    index, group, groups, first_pair, last_pair, to, begin, low, n_q, n_k = at
    branches: gl.constexpr = 2 if OWN_KEYS else 1
    rows: gl.constexpr = 3 if PER_TOKEN else 2
    mbarrier.expect(
        kv_full, OWNERS * (branches * k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    )
    for owner in gl.static_range(OWNERS):
        at = begin + 64 * owner
        for b in gl.static_range(branches):
            tma.async_copy_global_to_shared(
                k_desc, [index, at, (group * branches + b) * D], kv_full,
                k_tiles.index(owner * branches + b),
            )  # fmt: skip
        tma.async_copy_global_to_shared(
            v_desc, [index, at, group * DV], kv_full, v_tiles.index(owner)
        )
    it = 0
    for pair in range(first_pair, last_pair):
        for i in range(low, n_q, BM):
            s = it % STAGES
            mbarrier.wait(empty.index(s), (it // STAGES & 1) ^ 1)
            full = q_full.index(s)
            mbarrier.expect(full, 2 * q_desc.block_type.nbytes + rows * 4 * BM)
            for b in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    q_desc, [index, i, (2 * pair + b) * D], full, q_tiles.index(2 * s + b)
                )
                tma.async_copy_global_to_shared(
                    lse_desc, [2 * pair + b, index, i], full, stats.index(5 * s + b)
                )
            if PER_TOKEN:
                tma.async_copy_global_to_shared(
                    delta_desc, [rows * pair + 2, index, i], full, stats.index(5 * s + 4)
                )
            full = g_full.index(s)
            mbarrier.expect(full, g_desc.block_type.nbytes + 2 * 4 * BM)
            tma.async_copy_global_to_shared(g_desc, [index, i, pair * DV], full, g_tiles.index(s))
            for b in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    delta_desc, [rows * pair + b, index, i], full, stats.index(5 * s + 2 + b)
                )
            it += 1


@gluon.jit
def _minus_lambda(lam, pair, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr):
    if PER_TOKEN:
        return 1.0  # comes with the statistics
    if PER_HEAD:
        return -gl.load(lam + pair)
    return -gl.load(lam)


@gluon.jit
def _unmasked(begin, low, shift, BM: gl.constexpr, CAUSAL: gl.constexpr):
    """The first block of queries that all see all of 64 keys."""
    if CAUSAL:
        return (max(begin + 63 - shift, 0) + BM - 1) // BM * BM
    return low


@gluon.jit
def _weights(
    s1, s2, stats, stage, minus_lam, qk_scale, keys, queries, unmasked, i, shift, BM: gl.constexpr,
    PER_TOKEN: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """P1 and -lam P2 from the scores of 64 keys and the block of queries from i on."""
    p1 = gl.exp2(s1 * qk_scale - _stat(stats, 5 * stage, BM, LAYOUT)[None, :])
    p2 = gl.exp2(s2 * qk_scale - _stat(stats, 5 * stage + 1, BM, LAYOUT)[None, :])
    if PER_TOKEN:
        p2 = p2 * _stat(stats, 5 * stage + 4, BM, LAYOUT)[None, :]
    else:
        p2 = p2 * minus_lam
    if CAUSAL:
        if i < unmasked:
            seen = keys[:, None] <= (i + shift + queries)[None, :]
            p1 = gl.where(seen, p1, 0.0)
            p2 = gl.where(seen, p2, 0.0)
    return p1, p2


@gluon.jit
def _products(k1, k2, q_tiles, stage, zeros):
    """Scores of both branches, in flight."""
    q1 = tile(q_tiles, 2 * stage).permute((1, 0))
    q2 = tile(q_tiles, 2 * stage + 1).permute((1, 0))
    s1 = warpgroup_mma(k1, q1, zeros, use_acc=False, is_async=True)
    return s1, warpgroup_mma(k2, q2, zeros, use_acc=False, is_async=True)


@gluon.jit
def _own(
    tiles, ready, at, results, owner, lam, qk_scale, scale, BM: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """All of dK and dV of the 64 keys of one owner."""
    q_tiles, g_tiles, k_tiles, v_tiles, stats = tiles
    q_full, g_full, empty, kv_full = ready
    index, group, groups, first_pair, last_pair, to, begin, low, n_q, n_k = at
    dk_out, dv_out = results
    S: gl.constexpr = accumulator_layout(BM)
    DK: gl.constexpr = accumulator_layout(D)
    DVL: gl.constexpr = accumulator_layout(DV)
    dtype: gl.constexpr = q_tiles.dtype
    branches: gl.constexpr = 2 if OWN_KEYS else 1
    k1 = tile(k_tiles, owner * branches)
    k2 = tile(k_tiles, owner * branches + branches - 1)
    v = tile(v_tiles, owner)
    begin += 64 * owner
    shift = n_k - n_q
    mine = low  # the first block that sees these keys
    if CAUSAL:
        mine = min(max(begin - shift, low), n_q) // BM * BM  # (no further than the producer goes)
    unmasked = _unmasked(begin, low, shift, BM, CAUSAL)
    keys = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
    queries = gl.arange(0, BM, gl.SliceLayout(0, S))
    dk1 = gl.zeros([64, D], gl.float32, DK)
    dk2 = gl.zeros([64, D], gl.float32, DK)
    dv = gl.zeros([64, DV], gl.float32, DVL)
    zeros = gl.zeros([64, BM], gl.float32, S)
    mbarrier.wait(kv_full, 0)
    it = 0
    for pair in range(first_pair, last_pair):
        minus_lam = _minus_lambda(lam, pair, PER_TOKEN, PER_HEAD)
        for _ in range(low, mine, BM):
            mbarrier.wait(q_full.index(it % STAGES), it // STAGES & 1)
            mbarrier.arrive(empty.index(it % STAGES), count=1)
            it += 1
        n1, n2 = zeros, zeros
        if AHEAD:
            if mine < n_q:
                mbarrier.wait(q_full.index(it % STAGES), it // STAGES & 1)
                n1, n2 = _products(k1, k2, q_tiles, it % STAGES, zeros)
                n1, n2 = warpgroup_mma_wait(num_outstanding=0, deps=[n1, n2])
        for i in range(mine, n_q, BM):
            s = it % STAGES
            phase = it // STAGES & 1
            q1 = tile(q_tiles, 2 * s)
            q2 = tile(q_tiles, 2 * s + 1)
            g = tile(g_tiles, s)
            if AHEAD:
                s1, s2 = n1, n2
            else:
                mbarrier.wait(q_full.index(s), phase)
                s1, s2 = _products(k1, k2, q_tiles, s, zeros)
                s1, s2 = warpgroup_mma_wait(num_outstanding=0, deps=[s1, s2])
            p1, p2 = _weights(
                s1, s2, stats, s, minus_lam, qk_scale, keys, queries, unmasked, i, shift, BM,
                PER_TOKEN, CAUSAL, S,
            )  # fmt: skip
            p = gl.convert_layout((p1 + p2).to(dtype), left_operand_layout(DVL))
            both = pack(p1, p2)  # half the registers while dP is formed
            mbarrier.wait(g_full.index(s), phase)
            dp = warpgroup_mma(v, g.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv = warpgroup_mma(p, g, dv, is_async=True)
            dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
            ds1 = times_first(both, dp - _stat(stats, 5 * s + 2, BM, S)[None, :])
            ds1 = gl.convert_layout(ds1.to(dtype), left_operand_layout(DK))
            dk1 = warpgroup_mma(ds1, q1, dk1, is_async=True)
            ds2 = times_second(both, dp - _stat(stats, 5 * s + 3, BM, S)[None, :])
            ds2 = gl.convert_layout(ds2.to(dtype), left_operand_layout(DK))
            if OWN_KEYS:
                dk2 = warpgroup_mma(ds2, q2, dk2, is_async=True)
            else:
                dk1 = warpgroup_mma(ds2, q2, dk1, is_async=True)
            if AHEAD:  # the last block of a pair forms its own scores once more, for nothing
                following = it + (i + BM < n_q).to(gl.int32)
                mbarrier.wait(q_full.index(following % STAGES), following // STAGES & 1)
                n1, n2 = _products(k1, k2, q_tiles, following % STAGES, zeros)
                n1, n2 = warpgroup_mma_wait(num_outstanding=0, deps=[n1, n2])
            if OWN_KEYS:
                dv, dk1, dk2 = warpgroup_mma_wait(num_outstanding=0, deps=[dv, dk1, dk2])
            else:
                dv, dk1 = warpgroup_mma_wait(num_outstanding=0, deps=[dv, dk1])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(s), count=1)
            it += 1
    _store(dv, dv_out, to, n_k, begin, groups, group, DV)
    _store(dk1 * scale, dk_out, to, n_k, begin, groups * branches, group * branches, D)
    if OWN_KEYS:
        _store(dk2 * scale, dk_out, to, n_k, begin, groups * branches, group * branches + 1, D)


@gluon.jit
def _store(x, out, index, n_k, begin, heads, head, WIDTH: gl.constexpr):
    """64 rows of one head into `[batch, n_k, heads, WIDTH]`."""
    LAYOUT: gl.constexpr = x.type.layout
    keys = begin + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    row = ((index * n_k + keys).to(gl.int64) * heads + head) * WIDTH
    at = row[:, None] + columns[None, :]
    gl.store(out + at, x.to(out.dtype.element_ty), mask=(keys < n_k)[:, None])


@gluon.jit
def _scores(
    tiles, p_tiles, ready, p_full, p_empty, at, dv_out, lam, qk_scale, BM: gl.constexpr,
    DV: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """S1, S2, P1, -lam P2 for the other group, and dV."""
    q_tiles, g_tiles, k_tiles, v_tiles, stats = tiles
    q_full, g_full, empty, kv_full = ready
    index, group, groups, first_pair, last_pair, to, begin, low, n_q, n_k = at
    S: gl.constexpr = accumulator_layout(BM)
    DVL: gl.constexpr = accumulator_layout(DV)
    dtype: gl.constexpr = q_tiles.dtype
    k1 = tile(k_tiles, 0)
    k2 = tile(k_tiles, 1)
    shift = n_k - n_q
    unmasked = _unmasked(begin, low, shift, BM, CAUSAL)
    keys = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
    queries = gl.arange(0, BM, gl.SliceLayout(0, S))
    dv = gl.zeros([64, DV], gl.float32, DVL)
    zeros = gl.zeros([64, BM], gl.float32, S)
    mbarrier.wait(kv_full, 0)
    it = 0
    for pair in range(first_pair, last_pair):
        minus_lam = _minus_lambda(lam, pair, PER_TOKEN, PER_HEAD)
        for i in range(low, n_q, BM):
            s = it % STAGES
            phase = it // STAGES & 1
            buffer = it & 1
            mbarrier.wait(q_full.index(s), phase)
            s1, s2 = _products(k1, k2, q_tiles, s, zeros)
            s1, s2 = warpgroup_mma_wait(num_outstanding=0, deps=[s1, s2])
            p1, p2 = _weights(
                s1, s2, stats, s, minus_lam, qk_scale, keys, queries, unmasked, i, shift, BM,
                PER_TOKEN, CAUSAL, S,
            )  # fmt: skip
            mbarrier.wait(p_empty.index(buffer), (it // 2 & 1) ^ 1)
            p_tiles.index(2 * buffer).store(p1.to(dtype))
            p_tiles.index(2 * buffer + 1).store(p2.to(dtype))
            gl.thread_barrier()
            mbarrier.arrive(p_full.index(buffer), count=1)
            p = gl.convert_layout((p1 + p2).to(dtype), left_operand_layout(DVL))
            mbarrier.wait(g_full.index(s), phase)
            dv = warpgroup_mma(p, tile(g_tiles, s), dv, is_async=True)
            dv = warpgroup_mma_wait(num_outstanding=0, deps=[dv])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(s), count=1)
            it += 1
    _store(dv, dv_out, to, n_k, begin, groups, group, DV)


@gluon.jit
def _gradients(
    tiles, p_tiles, ready, p_full, p_empty, at, dk_out, scale, BM: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dP, then dS of both branches with the other group's P, then dK1, dK2."""
    q_tiles, g_tiles, k_tiles, v_tiles, stats = tiles
    q_full, g_full, empty, kv_full = ready
    index, group, groups, first_pair, last_pair, to, begin, low, n_q, n_k = at
    S: gl.constexpr = accumulator_layout(BM)
    DK: gl.constexpr = accumulator_layout(D)
    dtype: gl.constexpr = q_tiles.dtype
    v = tile(v_tiles, 0)
    dk1 = gl.zeros([64, D], gl.float32, DK)
    dk2 = gl.zeros([64, D], gl.float32, DK)
    zeros = gl.zeros([64, BM], gl.float32, S)
    mbarrier.wait(kv_full, 0)
    it = 0
    for _ in range(first_pair, last_pair):
        for _i in range(low, n_q, BM):
            s = it % STAGES
            phase = it // STAGES & 1
            buffer = it & 1
            mbarrier.wait(g_full.index(s), phase)
            g = tile(g_tiles, s)
            dp = warpgroup_mma(v, g.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
            mbarrier.wait(p_full.index(buffer), it // 2 & 1)
            p1 = p_tiles.index(2 * buffer).load(S).to(gl.float32)
            ds1 = gl.convert_layout(
                (p1 * (dp - _stat(stats, 5 * s + 2, BM, S)[None, :])).to(dtype),
                left_operand_layout(DK),
            )
            mbarrier.wait(q_full.index(s), phase)
            dk1 = warpgroup_mma(ds1, tile(q_tiles, 2 * s), dk1, is_async=True)
            p2 = p_tiles.index(2 * buffer + 1).load(S).to(gl.float32)
            gl.thread_barrier()
            mbarrier.arrive(p_empty.index(buffer), count=1)
            ds2 = gl.convert_layout(
                (p2 * (dp - _stat(stats, 5 * s + 3, BM, S)[None, :])).to(dtype),
                left_operand_layout(DK),
            )
            dk2 = warpgroup_mma(ds2, tile(q_tiles, 2 * s + 1), dk2, is_async=True)
            dk1, dk2 = warpgroup_mma_wait(num_outstanding=0, deps=[dk1, dk2])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(s), count=1)
            it += 1
    _store(dk1 * scale, dk_out, to, n_k, begin, 2 * groups, 2 * group, D)
    _store(dk2 * scale, dk_out, to, n_k, begin, 2 * groups, 2 * group + 1, D)


@gluon.jit(do_not_specialize=_INTEGERS)
def backward_keys(
    q_desc, g_desc, k_desc, v_desc, lse_desc, delta_desc, dk_out, dv_out, lam, n_q, n_k, blocks,
    side, n_sequences, pairs, groups, parts, qk_scale, scale, BM: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, ROLES: gl.constexpr,
    REGISTERS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys, or with ROLES of 64: the two groups share them. Over all pairs of a
    query group, or over one of `parts` of them: outputs are `[parts, batch, n_k, heads, width]`."""
    gdc_launch_dependents()  # the kernel for dQ may fill multiprocessors that have no keys left
    block, z = schedule(gl.program_id(0), blocks, n_sequences * groups * parts, side, False)
    part = z % parts
    group = z // parts % groups
    index = z // (parts * groups)
    per_part = pairs // (groups * parts)
    first_pair = (group * parts + part) * per_part
    to = part * n_sequences + index
    owners: gl.constexpr = 1 if ROLES else 2
    begin = block * (64 * owners)
    low = 0
    if CAUSAL:
        low = max(begin - (n_k - n_q), 0) // BM * BM

    branches: gl.constexpr = 2 if OWN_KEYS else 1
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, BM, D], q_desc.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BM, DV], g_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [branches * owners, 1, 64, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [owners, 1, 64, DV], v_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, [5 * STAGES, 1, 1, BM], lse_desc.layout)
    q_full = ring(STAGES, 1)
    g_full = ring(STAGES, 1)
    empty = ring(STAGES, 2)
    kv_full = ring(1, 1).index(0)
    sources = (q_desc, g_desc, k_desc, v_desc, lse_desc, delta_desc)
    tiles = (q_tiles, g_tiles, k_tiles, v_tiles, stats)
    ready = (q_full, g_full, empty, kv_full)
    at = (index, group, groups, first_pair, first_pair + per_part, to, begin, low, n_q, n_k)
    if ROLES:
        P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], dtype)
        p_tiles = gl.allocate_shared_memory(dtype, [4, 64, BM], P)
        p_full = ring(2, 1)
        p_empty = ring(2, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _scores,
                    (
                        tiles, p_tiles, ready, p_full, p_empty, at, dv_out, lam, qk_scale, BM, DV,
                        PER_TOKEN, PER_HEAD, CAUSAL, STAGES,
                    ),
                ),
                (
                    _gradients,
                    (tiles, p_tiles, ready, p_full, p_empty, at, dk_out, scale, BM, D, STAGES),
                ),
                (
                    _produce,
                    (sources, tiles, ready, at, BM, D, DV, owners, OWN_KEYS, PER_TOKEN, STAGES),
                ),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        fence_async_shared()
        results = (dk_out, dv_out)
        gl.warp_specialize(
            [
                (
                    _own,
                    (
                        tiles, ready, at, results, 0, lam, qk_scale, scale, BM, D, DV,
                        OWN_KEYS, PER_TOKEN, PER_HEAD, CAUSAL, STAGES, AHEAD,
                    ),
                ),
                (
                    _own,
                    (
                        tiles, ready, at, results, 1, lam, qk_scale, scale, BM, D, DV,
                        OWN_KEYS, PER_TOKEN, PER_HEAD, CAUSAL, STAGES, AHEAD,
                    ),
                ),
                (
                    _produce,
                    (
                        sources, tiles, ready, at, BM, D, DV, owners, OWN_KEYS, PER_TOKEN,
                        STAGES,
                    ),
                ),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "rows"])
def sum_parts(dk_parts, dv_parts, dk, dv, parts, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Both `[parts, rows, WIDTH]` float32 to `[rows, WIDTH]` in the type of dk and dv."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    of_k = tl.load(dk_parts + at, mask=inside, other=0.0)
    of_v = tl.load(dv_parts + at, mask=inside, other=0.0)
    for part in tl.range(1, parts):
        to = part * rows.to(tl.int64) * WIDTH + at
        of_k += tl.load(dk_parts + to, mask=inside, other=0.0)
        of_v += tl.load(dv_parts + to, mask=inside, other=0.0)
    tl.store(dk + at, of_k.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, of_v.to(dv.dtype.element_ty), mask=inside)
