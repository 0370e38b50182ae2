"""dQ of both branches on Hopper: one program for 128 queries of one pair, 64 for each of two warp
groups. The formulas are those of `diff_backward`.

      (all)    --q_full-> consumers        Q1, Q2, G of both groups, once
      producer --full---> consumers        K1, K2, V of `BN` keys have arrived in a stage
               <-empty--- both consumers   the stage may be overwritten
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from megadiff.kernels.hopper.common import (
    accumulator_layout,
    left_operand_layout,
    load_lambda,
    pack,
    ring,
    schedule,
    statistics_start,
    tile,
    times_first,
    times_second,
)

_INTEGERS = ["n_q", "n_k", "blocks", "side", "pitch", "n_sequences", "pairs", "groups"]


@gluon.jit
def _produce(
    sources, tiles, ready, at, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    OWN_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, g_desc, k_desc, v_desc = sources
    q_tiles, g_tiles, k_tiles, v_tiles = tiles
    full, empty, q_full = ready
    index, pair, group, begin, high, n_q, n_k = at
    branches: gl.constexpr = 2 if OWN_KEYS else 1
    mbarrier.expect(q_full, 4 * q_desc.block_type.nbytes + 2 * g_desc.block_type.nbytes)
    for owner in gl.static_range(2):
        for b in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [index, begin + 64 * owner, (2 * pair + b) * D], q_full,
                q_tiles.index(2 * owner + b),
            )  # fmt: skip
        tma.async_copy_global_to_shared(
            g_desc, [index, begin + 64 * owner, pair * DV], q_full, g_tiles.index(owner)
        )
    it = 0
    for j in range(0, high, BN):
        s = it % STAGES
        mbarrier.wait(empty.index(s), (it // STAGES & 1) ^ 1)
        mbarrier.expect(
            full.index(s), branches * k_desc.block_type.nbytes + v_desc.block_type.nbytes
        )
        for b in gl.static_range(branches):
            tma.async_copy_global_to_shared(
                k_desc, [index, j, (group * branches + b) * D], full.index(s),
                k_tiles.index(branches * s + b),
            )  # fmt: skip
        tma.async_copy_global_to_shared(
            v_desc, [index, j, group * DV], full.index(s), v_tiles.index(s)
        )
        it += 1


@gluon.jit
def _consume(
    tiles, ready, at, statistics, dq_out, owner, qk_scale, scale, BN: gl.constexpr,
    D: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """dQ1 and dQ2 of 64 queries. LEAN: dP after P is packed, for want of registers."""
    q_tiles, g_tiles, k_tiles, v_tiles = tiles
    full, empty, q_full = ready
    index, pair, group, begin, high, n_q, n_k = at
    lse, delta, pitch, lam, pairs = statistics
    S: gl.constexpr = accumulator_layout(BN)
    DQ: gl.constexpr = accumulator_layout(D)
    dtype: gl.constexpr = q_tiles.dtype
    branches: gl.constexpr = 2 if OWN_KEYS else 1
    begin += 64 * owner
    shift = n_k - n_q
    last = begin + 63 + shift  # position of the last query
    if CAUSAL:
        high = max(min(high, last + 1), 0)
    rows = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
    keys = gl.arange(0, BN, gl.SliceLayout(0, S))
    inside = rows < n_q
    row_count: gl.constexpr = 3 if PER_TOKEN else 2
    from_here = statistics_start(n_q, index) + rows
    to_lse = lse + 2 * pair * pitch.to(gl.int64) + from_here
    lse1 = gl.load(to_lse, mask=inside, other=float("inf"))
    lse2 = gl.load(to_lse + pitch, mask=inside, other=float("inf"))
    to_delta = delta + row_count * pair * pitch.to(gl.int64) + from_here
    d1 = gl.load(to_delta, mask=inside, other=0.0)
    d2 = gl.load(to_delta + pitch, mask=inside, other=0.0)
    q1 = tile(q_tiles, 2 * owner)
    q2 = tile(q_tiles, 2 * owner + 1)
    g = tile(g_tiles, owner)
    dq1 = gl.zeros([64, D], gl.float32, DQ)
    dq2 = gl.zeros([64, D], gl.float32, DQ)
    zeros = gl.zeros([64, BN], gl.float32, S)
    mbarrier.wait(q_full, 0)
    it = 0
    for j in range(0, high, BN):
        s = it % STAGES
        k1 = tile(k_tiles, branches * s)
        k2 = tile(k_tiles, branches * s + branches - 1)
        v = tile(v_tiles, s)
        mbarrier.wait(full.index(s), it // STAGES & 1)
        s1 = warpgroup_mma(q1, k1.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s2 = warpgroup_mma(q2, k2.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if LEAN:
            s1, s2 = warpgroup_mma_wait(num_outstanding=0, deps=[s1, s2])
            p1 = gl.exp2(s1 * qk_scale - lse1[:, None])
            p2 = gl.exp2(s2 * qk_scale - lse2[:, None])
        else:
            dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s1 = warpgroup_mma_wait(num_outstanding=2, deps=[s1])
            p1 = gl.exp2(s1 * qk_scale - lse1[:, None])
            s2 = warpgroup_mma_wait(num_outstanding=1, deps=[s2])
            p2 = gl.exp2(s2 * qk_scale - lse2[:, None])
        if CAUSAL:
            if j + BN > begin + shift + 1:
                seen = (j + keys)[None, :] <= (rows + shift)[:, None]
                p1 = gl.where(seen, p1, 0.0)
                p2 = gl.where(seen, p2, 0.0)
        else:
            if j + BN > n_k:
                seen = (j + keys < n_k)[None, :] & (rows == rows)[:, None]
                p1 = gl.where(seen, p1, 0.0)
                p2 = gl.where(seen, p2, 0.0)
        if LEAN:
            both = pack(p1, p2)
            dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
            ds1 = times_first(both, dp - d1[:, None])
            ds1 = gl.convert_layout(ds1.to(dtype), left_operand_layout(DQ))
            dq1 = warpgroup_mma(ds1, k1, dq1, is_async=True)
            ds2 = times_second(both, dp - d2[:, None])
        else:
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
            ds1 = gl.convert_layout((p1 * (dp - d1[:, None])).to(dtype), left_operand_layout(DQ))
            dq1 = warpgroup_mma(ds1, k1, dq1, is_async=True)
            ds2 = p2 * (dp - d2[:, None])
        ds2 = gl.convert_layout(ds2.to(dtype), left_operand_layout(DQ))
        dq2 = warpgroup_mma(ds2, k2, dq2, is_async=True)
        dq1, dq2 = warpgroup_mma_wait(num_outstanding=0, deps=[dq1, dq2])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(s), count=1)
        it += 1
    # (a group that ends before the other leaves at most STAGES stages without its arrival)
    rows = begin + gl.arange(0, 64, gl.SliceLayout(1, DQ))
    inside = rows < n_q
    token = index * n_q + rows
    this = load_lambda(lam, token, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    columns = gl.arange(0, D, gl.SliceLayout(0, DQ))
    to = dq_out + ((token.to(gl.int64) * pairs + pair) * (2 * D))[:, None] + columns[None, :]
    out_dtype: gl.constexpr = dq_out.dtype.element_ty
    gl.store(to, (dq1 * scale).to(out_dtype), mask=inside[:, None])
    gl.store(to + D, (dq2 * (-scale * this)[:, None]).to(out_dtype), mask=inside[:, None])


@gluon.jit(do_not_specialize=_INTEGERS)
def backward_queries(
    q_desc, g_desc, k_desc, v_desc, lse, delta, dq_out, lam, n_q, n_k, pitch, blocks, side,
    n_sequences, pairs, groups, qk_scale, scale, BN: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    block, z = schedule(gl.program_id(0), blocks, n_sequences * pairs, side, True)
    pair = z % pairs
    index = z // pairs
    group = pair // (pairs // groups)
    begin = block * 128
    high = n_k
    if CAUSAL:
        high = max(min(high, begin + 128 + n_k - n_q), 0)

    branches: gl.constexpr = 2 if OWN_KEYS else 1
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [4, 1, 64, D], q_desc.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [2, 1, 64, DV], g_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [branches * STAGES, 1, BN, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, DV], v_desc.layout)
    full = ring(STAGES, 1)
    empty = ring(STAGES, 2)
    q_full = ring(1, 1).index(0)
    fence_async_shared()

    sources = (q_desc, g_desc, k_desc, v_desc)
    tiles = (q_tiles, g_tiles, k_tiles, v_tiles)
    ready = (full, empty, q_full)
    at = (index, pair, group, begin, high, n_q, n_k)
    statistics = (lse, delta, pitch, lam, pairs)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles, ready, at, statistics, dq_out, 0, qk_scale, scale, BN, D, OWN_KEYS,
                    PER_TOKEN, PER_HEAD, CAUSAL, STAGES, LEAN,
                ),
            ),
            (
                _consume,
                (
                    tiles, ready, at, statistics, dq_out, 1, qk_scale, scale, BN, D, OWN_KEYS,
                    PER_TOKEN, PER_HEAD, CAUSAL, STAGES, LEAN,
                ),
            ),
            (_produce, (sources, tiles, ready, at, BN, D, DV, OWN_KEYS, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
    # This kernel reads nothing of the one for dK and dV, and may run beside its last programs; what
    # comes after this kernel waits for both.
    gdc_wait()
