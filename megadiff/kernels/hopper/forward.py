"""Forward of differential attention on Hopper. The outputs are those of `diff_forward`.

A producer warp feeds two warp groups with blocks of `BN` keys:

      (all)    --q_full-> consumers        the queries, once
      producer --k_full-> consumers        K1 (and K2) of a stage          <-k_empty--
               --v_full-> consumers        V of a stage                    <-v_empty--

Side by side: one program has 64 queries, a group has one branch, and branch 2 hands its output over
in shared memory (`o2_full`). IN_TURN, for values of 256 columns: 128 queries, 64 for each group,
which runs branch 2, writes its output, runs branch 1 and reads the other back.

Within a group the scores of the next block are formed while this block's values are accumulated.
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

from megadiff.kernels.hopper.common import (
    accumulator_layout,
    left_operand_layout,
    load_lambda,
    ring,
    schedule,
    statistics_start,
    tile,
)

_INTEGERS = ["n_q", "n_k", "n_tokens", "pitch", "blocks", "side", "n_sequences", "pairs", "groups"]


@gluon.jit
def _produce(
    sources, tiles, ready, at, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    OWN_KEYS: gl.constexpr, IN_TURN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = sources
    q_tiles, k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty, q_full = ready
    index, pair, group, begin, high, n_q, n_k = at
    branches: gl.constexpr = 2 if OWN_KEYS else 1
    together: gl.constexpr = 1 if IN_TURN else branches  # tiles of keys in a stage
    turns: gl.constexpr = 2 if IN_TURN else 1
    owners: gl.constexpr = 2 if IN_TURN else 1
    mbarrier.expect(q_full, 2 * owners * q_desc.block_type.nbytes)
    for owner in gl.static_range(owners):
        for b in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [index, begin + 64 * owner, (2 * pair + b) * D], q_full,
                q_tiles.index(2 * owner + b),
            )  # fmt: skip
    it = 0
    for turn in gl.static_range(turns):
        for j in range(0, high, BN):
            s = it % STAGES
            phase = (it // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(s), phase)
            mbarrier.expect(k_full.index(s), together * k_desc.block_type.nbytes)
            for b in gl.static_range(together):
                head = group * branches + b
                if IN_TURN:  # branch 2 first
                    head = group * branches + (branches - 1) * (1 - turn)
                tma.async_copy_global_to_shared(
                    k_desc, [index, j, head * D], k_full.index(s), k_tiles.index(together * s + b)
                )
            mbarrier.wait(v_empty.index(s), phase)
            mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [index, j, group * DV], v_full.index(s), v_tiles.index(s)
            )
            it += 1


@gluon.jit
def _softmax(
    scores, top, total, j, rows, shift, begin, n_k, qk_scale, BN: gl.constexpr,
    CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(weights, factor for what was accumulated before, new top, new total)."""
    keys = j + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        if j + BN > begin + shift + 1:
            seen = keys[None, :] <= (rows + shift)[:, None]
            scores = gl.where(seen, scores, float("-inf"))
    else:
        if j + BN > n_k:
            seen = (keys < n_k)[None, :] & (rows == rows)[:, None]
            scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * qk_scale)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(scores * qk_scale - base[:, None])
    shrink = gl.exp2(top - base)
    return p, shrink, new_top, total * shrink + gl.sum(p, 1)


@gluon.jit
def _attend(
    q, k_tiles, v_tiles, ready, it, which, together, begin, high, shift, n_k, qk_scale,
    BN: gl.constexpr, DV: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """softmax(q k^T) v of 64 queries, its log-sum-exp (base 2), and the next iteration's number."""
    k_full, k_empty, v_full, v_empty, q_full = ready
    S: gl.constexpr = accumulator_layout(BN)
    O: gl.constexpr = accumulator_layout(DV)
    dtype: gl.constexpr = q.dtype
    rows = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
    o = gl.zeros([64, DV], gl.float32, O)
    zeros = gl.zeros([64, BN], gl.float32, S)
    it = gl.to_tensor(it)
    if high > 0:
        s = it % STAGES
        mbarrier.wait(k_full.index(s), it // STAGES & 1)
        k = tile(k_tiles, together * s + which)
        x = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=0, deps=[x])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(s), count=1)
        p, shrink, top, total = _softmax(
            x, top, total, 0, rows, shift, begin, n_k, qk_scale, BN, CAUSAL, S
        )
        w = gl.convert_layout(p.to(dtype), left_operand_layout(O))
        for j in range(BN, high, BN):
            before = it % STAGES
            v_phase = it // STAGES & 1
            it += 1
            s = it % STAGES
            k = tile(k_tiles, together * s + which)
            mbarrier.wait(k_full.index(s), it // STAGES & 1)
            x = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), v_phase)
            o = warpgroup_mma(w, tile(v_tiles, before), o, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=1, deps=[x])
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(s), count=1)
            p, shrink, top, total = _softmax(
                x, top, total, j, rows, shift, begin, n_k, qk_scale, BN, CAUSAL, S
            )
            o = warpgroup_mma_wait(num_outstanding=0, deps=[o])
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index(before), count=1)
            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
            w = gl.convert_layout(p.to(dtype), left_operand_layout(O))
        s = it % STAGES
        mbarrier.wait(v_full.index(s), it // STAGES & 1)
        o = warpgroup_mma(w, tile(v_tiles, s), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=[o])
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(s), count=1)
        it += 1
    seen_none = total == 0.0
    safe = gl.where(seen_none, 1.0, total)
    lse = gl.where(seen_none, float("inf"), top + gl.log2(safe))
    return o / gl.convert_layout(safe, gl.SliceLayout(1, O))[:, None], lse, it


@gluon.jit
def _rows_and_places(at, begin, pairs, DV: gl.constexpr):
    """Tokens of 64 queries, which of them exist, and where their outputs lie."""
    O: gl.constexpr = accumulator_layout(DV)
    index, pair, group, _, high, n_q, n_k = at
    rows = begin + gl.arange(0, 64, gl.SliceLayout(1, O))
    token = index * n_q + rows
    columns = gl.arange(0, DV, gl.SliceLayout(0, O))
    place = ((token.to(gl.int64) * pairs + pair) * DV)[:, None] + columns[None, :]
    return token, rows < n_q, place


@gluon.jit
def _store_lse(lse_out, lse, at, begin, pitch, branch: gl.constexpr):
    index, pair, group, _, high, n_q, n_k = at
    rows = begin + gl.arange(0, 64, lse.type.layout)
    to = lse_out + (2 * pair + branch) * pitch.to(gl.int64) + statistics_start(n_q, index) + rows
    gl.store(to, lse, mask=rows < n_q)


@gluon.jit
def _finish(
    o, at, outputs, epilogue, begin, pairs, DV: gl.constexpr, NORM: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """Write the difference and, with NORM, its RMSNorm (`diff_forward._finish`)."""
    index, pair, group, _, high, n_q, n_k = at
    out, second, normed, lse_out, rstd, pitch, n_tokens = outputs
    lam, weight, width, eps, out_scale = epilogue
    token, inside, place = _rows_and_places(at, begin, pairs, DV)
    if SAVE or not NORM:
        gl.store(out + place, o.to(out.dtype.element_ty), mask=inside[:, None])
    if NORM:
        r = gl.rsqrt(gl.sum(o * o, 1) / width + eps)
        y = o * (r * out_scale)[:, None]
        if HAS_WEIGHT:
            columns = gl.arange(0, DV, gl.SliceLayout(0, o.type.layout))
            y = y * gl.load(weight + columns).to(gl.float32)[None, :]
        gl.store(normed + place, y.to(normed.dtype.element_ty), mask=inside[:, None])
        if SAVE:
            gl.store(rstd + pair * n_tokens.to(gl.int64) + token, r, mask=inside)


@gluon.jit
def _branch(
    tiles, ready, at, outputs, epilogue, o2_tile, o2_full, pairs, qk_scale, branch: gl.constexpr,
    BN: gl.constexpr, DV: gl.constexpr, OWN_KEYS: gl.constexpr, PER_TOKEN: gl.constexpr,
    PER_HEAD: gl.constexpr, CAUSAL: gl.constexpr, NORM: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    SAVE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One branch of 64 queries; the first branch takes the difference."""
    q_tiles, k_tiles, v_tiles = tiles
    index, pair, group, begin, high, n_q, n_k = at
    out, second, normed, lse_out, rstd, pitch, n_tokens = outputs
    together: gl.constexpr = 2 if OWN_KEYS else 1
    mbarrier.wait(ready[4], 0)
    o, lse, _ = _attend(
        tile(q_tiles, branch), k_tiles, v_tiles, ready, 0, branch * (together - 1), together, begin,
        high, n_k - n_q, n_k, qk_scale, BN, DV, CAUSAL, STAGES,
    )  # fmt: skip
    if SAVE:
        _store_lse(lse_out, lse, at, begin, pitch, branch)
    token, inside, place = _rows_and_places(at, begin, pairs, DV)
    if branch == 1:
        if SAVE:
            gl.store(second + place, o.to(second.dtype.element_ty), mask=inside[:, None])
        o2_tile.store(o)
        gl.thread_barrier()
        mbarrier.arrive(o2_full, count=1)
    else:
        this = load_lambda(epilogue[0], token, inside, pair, pairs, PER_TOKEN, PER_HEAD)
        mbarrier.wait(o2_full, 0)
        o = o - this[:, None] * o2_tile.load(o.type.layout)
        _finish(o, at, outputs, epilogue, begin, pairs, DV, NORM, HAS_WEIGHT, SAVE)


@gluon.jit
def _both_branches(
    tiles, ready, at, outputs, epilogue, pairs, qk_scale, owner, BN: gl.constexpr,
    DV: gl.constexpr, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr, CAUSAL: gl.constexpr,
    NORM: gl.constexpr, HAS_WEIGHT: gl.constexpr, SAVE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Both branches of 64 queries in turn."""
    q_tiles, k_tiles, v_tiles = tiles
    index, pair, group, begin, high, n_q, n_k = at
    out, second, normed, lse_out, rstd, pitch, n_tokens = outputs
    begin += 64 * owner
    mbarrier.wait(ready[4], 0)
    o, lse, it = _attend(
        tile(q_tiles, 2 * owner + 1), k_tiles, v_tiles, ready, 0, 0, 1, begin, high, n_k - n_q, n_k,
        qk_scale, BN, DV, CAUSAL, STAGES,
    )  # fmt: skip
    _store_lse(lse_out, lse, at, begin, pitch, 1)
    token, inside, place = _rows_and_places(at, begin, pairs, DV)
    gl.store(second + place, o.to(second.dtype.element_ty), mask=inside[:, None])
    o, lse, it = _attend(
        tile(q_tiles, 2 * owner), k_tiles, v_tiles, ready, it, 0, 1, begin, high, n_k - n_q, n_k,
        qk_scale, BN, DV, CAUSAL, STAGES,
    )  # fmt: skip
    _store_lse(lse_out, lse, at, begin, pitch, 0)
    # addresses computed anew rather than held over the loop
    token, inside, place = _rows_and_places(at, begin, pairs, DV)
    this = load_lambda(epilogue[0], token, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    o2 = gl.load(second + place, mask=inside[:, None], other=0.0).to(gl.float32)
    o = o - this[:, None] * o2
    _finish(o, at, outputs, epilogue, begin, pairs, DV, NORM, HAS_WEIGHT, SAVE)


@gluon.jit(do_not_specialize=_INTEGERS)
def forward(
    q_desc, k_desc, v_desc, out, second, normed, lse, rstd, lam, weight, n_q, n_k, n_tokens, pitch,
    blocks, side, n_sequences, pairs, groups, qk_scale, width, eps, out_scale, D: gl.constexpr,
    DV: gl.constexpr, BN: gl.constexpr, OWN_KEYS: gl.constexpr,
    PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr, CAUSAL: gl.constexpr, NORM: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, SAVE: gl.constexpr, IN_TURN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One block of queries of one pair."""
    queries: gl.constexpr = 128 if IN_TURN else 64
    block, z = schedule(gl.program_id(0), blocks, n_sequences * pairs, side, True)
    pair = z % pairs
    index = z // pairs
    group = pair // (pairs // groups)
    begin = block * queries
    high = n_k
    if CAUSAL:
        high = max(min(high, begin + queries + n_k - n_q), 0)

    together: gl.constexpr = 2 if OWN_KEYS and not IN_TURN else 1
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [queries // 32, 1, 64, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [together * STAGES, 1, BN, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, DV], v_desc.layout)
    k_full = ring(STAGES, 1)
    v_full = ring(STAGES, 1)
    k_empty = ring(STAGES, 2)
    v_empty = ring(STAGES, 2)
    q_full = ring(1, 1).index(0)

    sources = (q_desc, k_desc, v_desc)
    tiles = (q_tiles, k_tiles, v_tiles)
    ready = (k_full, k_empty, v_full, v_empty, q_full)
    at = (index, pair, group, begin, high, n_q, n_k)
    outputs = (out, second, normed, lse, rstd, pitch, n_tokens)
    epilogue = (lam, weight, width, eps, out_scale)
    if IN_TURN:
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _both_branches,
                    (
                        tiles, ready, at, outputs, epilogue, pairs, qk_scale, 0, BN, DV, PER_TOKEN,
                        PER_HEAD, CAUSAL, NORM, HAS_WEIGHT, SAVE, STAGES,
                    ),
                ),
                (
                    _both_branches,
                    (
                        tiles, ready, at, outputs, epilogue, pairs, qk_scale, 1, BN, DV, PER_TOKEN,
                        PER_HEAD, CAUSAL, NORM, HAS_WEIGHT, SAVE, STAGES,
                    ),
                ),
                (_produce, (sources, tiles, ready, at, BN, D, DV, OWN_KEYS, IN_TURN, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        o2_tile = gl.allocate_shared_memory(gl.float32, [64, DV], plain)
        o2_full = ring(1, 1).index(0)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _branch,
                    (
                        tiles, ready, at, outputs, epilogue, o2_tile, o2_full, pairs, qk_scale, 0,
                        BN, DV, OWN_KEYS, PER_TOKEN, PER_HEAD, CAUSAL, NORM, HAS_WEIGHT, SAVE,
                        STAGES,
                    ),
                ),
                (
                    _branch,
                    (
                        tiles, ready, at, outputs, epilogue, o2_tile, o2_full, pairs, qk_scale, 1,
                        BN, DV, OWN_KEYS, PER_TOKEN, PER_HEAD, CAUSAL, NORM, HAS_WEIGHT, SAVE,
                        STAGES,
                    ),
                ),
                (_produce, (sources, tiles, ready, at, BN, D, DV, OWN_KEYS, IN_TURN, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
