# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportUnboundVariable=false
# (Triton kernels are compiled by Triton, whose types pyright does not know)
"""Triton backward kernels of differential attention, without atomic additions: equal bit for bit on
every run.

With G the gradient of the difference O = O1 - lam O2 (arXiv 2410.05258, eq. 1), P the maps, and D_b
the row sums of G * O_b:

    dP = G V^T              dS1 = P1 * (dP - D1)         dS2 = -lam P2 * (dP - D2)
    dV = (P1 - lam P2)^T G  dQ_b = scale dS_b K_b        dK_b = scale dS_b^T Q_b        dlam = -D2

`preprocess` makes G (through the norm, if there is one), D1 and D2. `backward_keys` makes dK and dV
of one block of keys, summed over the pairs of the group; `backward_queries` makes dQ of one block
of queries. Products are formed with the operand that comes from registers untransposed: Triton 3.4
to 3.7.0 miscompiles the transposed one on Hopper at some shapes."""

import triton
import triton.language as tl

from megadiff.kernels.diff_common import (
    key_range,
    query_range,
    schedule,
    sequence,
    statistics_start,
    visible,
    zero_rows_outside,
)
from megadiff.kernels.diff_forward import load_lambda

_INTEGERS = ["n_q", "n_k", "blocks", "side", "n_sequences", "pairs", "groups", "left", "right"]


@triton.jit(do_not_specialize=["n_q", "n_tokens", "pitch", "blocks", "pairs"])
def preprocess(
    dy, out, second, rstd, lam, weight, cu_q, g, delta, dlam, dweight, n_q, n_tokens, pitch, blocks,
    pairs, width, out_scale, DV: tl.constexpr, ROWS: tl.constexpr, PER_TOKEN: tl.constexpr,
    PER_HEAD: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """G in the activations' type, delta = (D1, D2) from that rounded G, dlam, partial sums of
    dweight.

    delta: `[pairs, 2, pitch]`, or with a lambda per token `[pairs, 3, pitch]`, -lambda in the last
    row. With y = O r w c, r = (mean(O^2) + eps)^-1/2: G = r (u - O r^2 mean(u * O)) where u = dy w
    c."""
    pair = tl.program_id(0) // blocks % pairs
    index = tl.program_id(0) // blocks // pairs
    q_start, n_q, _k, _n, _used = sequence(index, cu_q, cu_q, cu_q, n_q, n_q, PACKED, False)
    begin = tl.program_id(0) % blocks * ROWS
    rows = q_start + begin + tl.arange(0, ROWS)
    columns = tl.arange(0, DV)
    inside = rows < q_start + n_q
    at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + columns[None, :]
    grad = tl.load(dy + at, mask=inside[:, None], other=0.0)
    o = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        r = tl.load(rstd + pair * n_tokens.to(tl.int64) + rows, mask=inside, other=0.0)
        u = grad.to(tl.float32) * out_scale
        if HAS_WEIGHT:
            to = dweight + tl.program_id(0).to(tl.int64) * DV + columns
            tl.store(to, tl.sum(u * o * r[:, None], 0))
            u = u * tl.load(weight + columns).to(tl.float32)[None, :]
        mean = tl.sum(u * o, 1) / width
        grad = (r[:, None] * (u - o * (r * r * mean)[:, None])).to(g.dtype.element_ty)
        tl.store(g + at, grad, mask=inside[:, None])
    grad = grad.to(tl.float32)
    o2 = tl.load(second + at, mask=inside[:, None], other=0.0).to(tl.float32)
    d2 = tl.sum(grad * o2, 1)
    tl.store(dlam + rows.to(tl.int64) * pairs + pair, -d2, mask=inside)
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    row_count: tl.constexpr = 3 if PER_TOKEN else 2
    to = (
        delta
        + row_count * pair * pitch.to(tl.int64)
        + statistics_start(q_start, n_q, index, PACKED)
        + begin
    )
    to += tl.arange(0, ROWS)
    tl.store(to, tl.sum(grad * o, 1) + this * d2, mask=inside)
    tl.store(to + pitch, d2, mask=inside)
    if PER_TOKEN:
        tl.store(to + 2 * pitch, -this, mask=inside)


@triton.jit
def _keys_range(
    dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse_desc, delta_desc, head_lam, q_start, statistics,
    n_q, pair, begin, end, shift, keys, in_use, left, right, qk_scale, BM: tl.constexpr, D:
    tl.constexpr, DV: tl.constexpr, OWN_KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, MASK:
    tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr, WANT_DK:
    tl.constexpr, WANT_DV: tl.constexpr,
):  # fmt: skip
    """Add what the queries [begin, end) of one pair give; tiles are `[keys, queries]`."""
    row_count: tl.constexpr = 3 if PER_TOKEN else 2
    for i in tl.range(begin, end, BM):
        at = q_start + i
        stat = statistics + i
        q1 = q_desc.load([at, 2 * pair * D])
        q2 = q_desc.load([at, (2 * pair + 1) * D])
        g = g_desc.load([at, pair * DV])
        rows = i + tl.arange(0, BM)
        if MASK:
            mask = visible(
                (rows + shift)[None, :], keys[:, None], in_use, left, right, HAS_LEFT, HAS_RIGHT
            )
            mask &= (rows < n_q)[None, :]
            if CLEAN:
                q1 = zero_rows_outside(q1, rows, n_q)
                q2 = zero_rows_outside(q2, rows, n_q)
                g = zero_rows_outside(g, rows, n_q)
        p1 = tl.math.exp2(tl.dot(k1, q1.T) * qk_scale - lse_desc.load([2 * pair, stat]))
        p2 = tl.math.exp2(tl.dot(k2, q2.T) * qk_scale - lse_desc.load([2 * pair + 1, stat]))
        if PER_TOKEN:
            p2 = p2 * delta_desc.load([row_count * pair + 2, stat])
        else:
            p2 = p2 * -head_lam
        if MASK:
            p1 = tl.where(mask, p1, 0.0)
            p2 = tl.where(mask, p2, 0.0)
        if WANT_DV:
            dv = tl.dot((p1 + p2).to(g.dtype), g, dv)
        if WANT_DK:
            dp = tl.dot(v, g.T)
            ds1 = p1 * (dp - delta_desc.load([row_count * pair, stat]))
            ds2 = p2 * (dp - delta_desc.load([row_count * pair + 1, stat]))
            if MASK:  # delta of a row outside may be anything
                ds1 = tl.where(mask, ds1, 0.0)
                ds2 = tl.where(mask, ds2, 0.0)
            dk1 = tl.dot(ds1.to(q1.dtype), q1, dk1)
            if OWN_KEYS:
                dk2 = tl.dot(ds2.to(q2.dtype), q2, dk2)
            else:
                dk1 = tl.dot(ds2.to(q2.dtype), q2, dk1)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=_INTEGERS)
def backward_keys(
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc, dk_out, dv_out, lam, cu_q, cu_k, used,
    n_q, n_k, blocks, side, n_sequences, pairs, groups, left, right, qk_scale, scale, D:
    tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OWN_KEYS: tl.constexpr,
    PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr, HAS_USED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
):  # fmt: skip
    """dK and dV (or one of them) of one block of keys of one group, over all pairs of the group."""
    block, z = schedule(tl.program_id(0), blocks, n_sequences * groups, side, False)
    group = z % groups
    index = z // groups
    q_start, n_q, k_start, n_k, in_use = sequence(
        index, cu_q, cu_k, used, n_q, n_k, PACKED, HAS_USED
    )
    statistics = statistics_start(q_start, n_q, index, PACKED)
    begin = block * BN
    if begin >= n_k:
        return
    shift = in_use - n_q
    low, full_low, full_high, high = query_range(
        begin, min(begin + BN, n_k), shift, n_q, in_use, left, right, BM, HAS_LEFT, HAS_RIGHT
    )
    keys = begin + tl.arange(0, BN)
    branches: tl.constexpr = 2 if OWN_KEYS else 1
    k1 = k_desc.load([k_start + begin, group * branches * D])
    if OWN_KEYS:
        k2 = k_desc.load([k_start + begin, (2 * group + 1) * D])
    else:
        k2 = k1
    if WANT_DK:
        v = v_desc.load([k_start + begin, group * DV])
    else:
        v = k1
    dk1 = tl.zeros([BN, D], tl.float32)
    dk2 = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, DV], tl.float32)
    per_group = pairs // groups
    for pair in tl.range(group * per_group, (group + 1) * per_group):
        head_lam = 0.0
        if PER_HEAD:
            head_lam = tl.load(lam + pair)
        elif not PER_TOKEN:
            head_lam = tl.load(lam)
        dk1, dk2, dv = _keys_range(
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse_desc, delta_desc, head_lam, q_start,
            statistics, n_q, pair, low, full_low, shift, keys, in_use, left, right, qk_scale, BM, D,
            DV, OWN_KEYS, PER_TOKEN, True, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
        )  # fmt: skip
        dk1, dk2, dv = _keys_range(
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse_desc, delta_desc, head_lam, q_start,
            statistics, n_q, pair, full_low, full_high, shift, keys, in_use, left, right, qk_scale,
            BM, D, DV, OWN_KEYS, PER_TOKEN, False, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
        )  # fmt: skip
        # what remains is a tail of queries, a window's edge, or a block that holds unused keys
        dk1, dk2, dv = _keys_range(
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse_desc, delta_desc, head_lam, q_start,
            statistics, n_q, pair, full_high, high, shift, keys, in_use, left, right, qk_scale, BM,
            D, DV, OWN_KEYS, PER_TOKEN, True, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
        )  # fmt: skip
    inside = (keys < n_k)[:, None]
    token = (k_start + keys).to(tl.int64)[:, None]
    if WANT_DK:
        columns = tl.arange(0, D)[None, :]
        at = (token * groups + group) * branches * D + columns
        tl.store(dk_out + at, (dk1 * scale).to(dk_out.dtype.element_ty), mask=inside)
        if OWN_KEYS:
            tl.store(dk_out + at + D, (dk2 * scale).to(dk_out.dtype.element_ty), mask=inside)
    if WANT_DV:
        at = (token * groups + group) * DV + tl.arange(0, DV)[None, :]
        tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=inside)


@triton.jit
def _queries_range(
    dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, row, k1_col, k2_col, v_col, begin, end,
    position, in_use, left, right, qk_scale, BN: tl.constexpr, OWN_KEYS: tl.constexpr, MASK:
    tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    for j in tl.range(begin, end, BN):
        k1 = k_desc.load([row + j, k1_col])
        if OWN_KEYS:
            k2 = k_desc.load([row + j, k2_col])
        v = v_desc.load([row + j, v_col])
        if MASK:
            keys = j + tl.arange(0, BN)
            if CLEAN:
                k1 = zero_rows_outside(k1, keys, in_use)
                if OWN_KEYS:
                    k2 = zero_rows_outside(k2, keys, in_use)
                v = zero_rows_outside(v, keys, in_use)
        if not OWN_KEYS:
            k2 = k1
        p1 = tl.math.exp2(tl.dot(q1, k1.T) * qk_scale - lse1[:, None])
        p2 = tl.math.exp2(tl.dot(q2, k2.T) * qk_scale - lse2[:, None])
        dp = tl.dot(g, v.T)
        if MASK:
            mask = visible(
                position[:, None], keys[None, :], in_use, left, right, HAS_LEFT, HAS_RIGHT
            )
            p1 = tl.where(mask, p1, 0.0)
            p2 = tl.where(mask, p2, 0.0)
        dq1 = tl.dot((p1 * (dp - d1[:, None])).to(k1.dtype), k1, dq1)
        dq2 = tl.dot((p2 * (dp - d2[:, None])).to(k2.dtype), k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=[*_INTEGERS, "pitch"])
def backward_queries(
    q_desc, k_desc, v_desc, g_desc, dq_out, lse, delta, lam, cu_q, cu_k, used, n_q, n_k, pitch,
    blocks, side, n_sequences, pairs, groups, left, right, qk_scale, scale, D: tl.constexpr, DV:
    tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OWN_KEYS: tl.constexpr, PER_TOKEN:
    tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr, HAS_USED: tl.constexpr, HAS_LEFT:
    tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """dQ of both branches of one pair for one block of queries."""
    block, z = schedule(tl.program_id(0), blocks, n_sequences * pairs, side, True)
    pair = z % pairs
    group = pair // (pairs // groups)
    index = z // pairs
    q_start, n_q, k_start, n_k, in_use = sequence(
        index, cu_q, cu_k, used, n_q, n_k, PACKED, HAS_USED
    )
    begin = block * BM
    if begin >= n_q:
        return
    shift = in_use - n_q
    low, full_low, full_high, high = key_range(
        begin, min(begin + BM, n_q), shift, in_use, left, right, BN, HAS_LEFT, HAS_RIGHT
    )
    position = begin + tl.arange(0, BM) + shift
    rows = q_start + begin + tl.arange(0, BM)
    inside = rows < q_start + n_q
    branches: tl.constexpr = 2 if OWN_KEYS else 1
    k1_col = group * branches * D
    k2_col = k1_col + (branches - 1) * D
    v_col = group * DV

    q1 = q_desc.load([q_start + begin, 2 * pair * D])
    q2 = q_desc.load([q_start + begin, (2 * pair + 1) * D])
    g = g_desc.load([q_start + begin, pair * DV])
    row_count: tl.constexpr = 3 if PER_TOKEN else 2
    stat = statistics_start(q_start, n_q, index, PACKED) + begin + tl.arange(0, BM)
    at = 2 * pair * pitch.to(tl.int64) + stat
    lse1 = tl.load(lse + at, mask=inside, other=float("inf"))
    lse2 = tl.load(lse + pitch + at, mask=inside, other=float("inf"))
    at = row_count * pair * pitch.to(tl.int64) + stat
    d1 = tl.load(delta + at, mask=inside, other=0.0)
    d2 = tl.load(delta + pitch + at, mask=inside, other=0.0)
    dq1 = tl.zeros([BM, D], tl.float32)
    dq2 = tl.zeros([BM, D], tl.float32)
    if HAS_LEFT:
        dq1, dq2 = _queries_range(
            dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col,
            low, full_low, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True, HAS_LEFT,
            HAS_RIGHT, CLEAN,
        )  # fmt: skip
    dq1, dq2 = _queries_range(
        dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col,
        full_low, full_high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, False, HAS_LEFT,
        HAS_RIGHT, CLEAN,
    )  # fmt: skip
    dq1, dq2 = _queries_range(
        dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col,
        full_high, high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True, HAS_LEFT,
        HAS_RIGHT, CLEAN,
    )  # fmt: skip
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    dtype = dq_out.dtype.element_ty
    to = dq_out + (rows.to(tl.int64) * pairs + pair)[:, None] * (2 * D) + tl.arange(0, D)[None, :]
    tl.store(to, (dq1 * scale).to(dtype), mask=inside[:, None])
    tl.store(to + D, (dq2 * (-scale * this)[:, None]).to(dtype), mask=inside[:, None])
