"""Triton backward kernels of differential attention, without atomic additions: equal bit for bit on every run.

With G the gradient of the difference O = O1 - lam O2 (arXiv 2410.05258, eq. 1), P the maps, and D_b the row
sums of G * O_b:

    dP = G V^T              dS1 = P1 * (dP - D1)         dS2 = -lam P2 * (dP - D2)
    dV = (P1 - lam P2)^T G  dQ_b = scale dS_b K_b        dK_b = scale dS_b^T Q_b        dlam = -D2

`preprocess` makes G (through the norm, if there is one), D1 and D2. `backward_keys` makes dK and dV of one block
of keys, summed over the pairs of the group; `backward_queries` makes dQ of one block of queries. Products are
formed with the operand that comes from registers untransposed: Triton 3.4 to 3.7.0 miscompiles the
transposed one on Hopper at some shapes.
"""

import triton
import triton.language as tl

from megadiff.kernels.diff_common import (
    key_range,
    query_range,
    schedule,
    sequence,
    visible,
    zero_rows_outside,
)
from megadiff.kernels.diff_forward import load_lambda

_INTEGERS = ["n_q", "n_k", "n_tokens", "left", "right", "blocks"]


@triton.jit(do_not_specialize=["n_tokens"])
def preprocess(
    dy, out, second, rstd, lam, weight, g, delta, dweight, n_tokens, pairs, width, out_scale,
    DV: tl.constexpr, ROWS: tl.constexpr, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr,
    NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """G in the activations' type, delta = (D1, D2) from that rounded G, and partial sums of dweight.

    With y = O r w c, r = (mean(O^2) + eps)^-1/2: G = r (u - O r^2 mean(u * O)) where u = dy w c.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1)
    columns = tl.arange(0, DV)
    inside = rows < n_tokens
    at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + columns[None, :]
    grad = tl.load(dy + at, mask=inside[:, None], other=0.0)
    o = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        r = tl.load(rstd + pair.to(tl.int64) * n_tokens + rows, mask=inside, other=0.0)
        u = grad.to(tl.float32) * out_scale
        if HAS_WEIGHT:
            partial = tl.sum(u * o * r[:, None], 0)
            slot = tl.program_id(0) * pairs + pair
            tl.store(dweight + slot.to(tl.int64) * DV + columns, partial)
            u = u * tl.load(weight + columns).to(tl.float32)[None, :]
        mean = tl.sum(u * o, 1) / width
        grad = (r[:, None] * (u - o * (r * r * mean)[:, None])).to(g.dtype.element_ty)
        tl.store(g + at, grad, mask=inside[:, None])
    grad = grad.to(tl.float32)
    o2 = tl.load(second + at, mask=inside[:, None], other=0.0).to(tl.float32)
    d2 = tl.sum(grad * o2, 1)
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    first = delta + (2 * pair).to(tl.int64) * n_tokens + rows
    tl.store(first, tl.sum(grad * o, 1) + this * d2, mask=inside)
    tl.store(first + n_tokens, d2, mask=inside)


@triton.jit
def _keys_range(
    dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse, delta, lam, head_lam, q_start, n_q, pair, pairs, n_tokens,
    begin, end, shift, keys, in_use, left, right, qk_scale, BM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, OWN_KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, MASK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
):  # fmt: skip
    """Add what the queries [begin, end) of one pair give; tiles are `[keys, queries]`."""
    first = 2 * pair * n_tokens.to(tl.int64) + q_start
    for i in tl.range(begin, end, BM):
        rows = i + tl.arange(0, BM)
        q1 = q_desc.load([q_start + i, 2 * pair * D])
        q2 = q_desc.load([q_start + i, (2 * pair + 1) * D])
        g = g_desc.load([q_start + i, pair * DV])
        at = first + rows
        factor = -head_lam
        if MASK:
            inside = rows < n_q
            lse1 = tl.load(lse + at, mask=inside, other=float("inf"))
            lse2 = tl.load(lse + n_tokens + at, mask=inside, other=float("inf"))
            if PER_TOKEN:
                factor = -tl.load(lam + (q_start + rows).to(tl.int64) * pairs + pair, mask=inside, other=0.0)[None, :]
            if CLEAN:
                q1 = zero_rows_outside(q1, rows, n_q)
                q2 = zero_rows_outside(q2, rows, n_q)
                g = zero_rows_outside(g, rows, n_q)
        else:
            lse1 = tl.load(lse + at)
            lse2 = tl.load(lse + n_tokens + at)
            if PER_TOKEN:
                factor = -tl.load(lam + (q_start + rows).to(tl.int64) * pairs + pair)[None, :]
        p1 = tl.math.exp2(tl.dot(k1, q1.T) * qk_scale - lse1[None, :])
        p2 = tl.math.exp2(tl.dot(k2, q2.T) * qk_scale - lse2[None, :])
        if MASK:
            mask = visible((rows + shift)[None, :], keys[:, None], in_use, left, right, HAS_LEFT, HAS_RIGHT)
            mask &= inside[None, :]
            p1 = tl.where(mask, p1, 0.0)
            p2 = tl.where(mask, p2, 0.0)
        p2 = p2 * factor
        if WANT_DV:
            dv = tl.dot((p1 + p2).to(g.dtype), g, dv)
        if WANT_DK:
            dp = tl.dot(v, g.T)
            if MASK:
                d1 = tl.load(delta + at, mask=inside, other=0.0)
                d2 = tl.load(delta + n_tokens + at, mask=inside, other=0.0)
            else:
                d1 = tl.load(delta + at)
                d2 = tl.load(delta + n_tokens + at)
            ds1 = (p1 * (dp - d1[None, :])).to(q1.dtype)
            dk1 = tl.dot(ds1, q1, dk1)
            ds2 = (p2 * (dp - d2[None, :])).to(q2.dtype)
            if OWN_KEYS:
                dk2 = tl.dot(ds2, q2, dk2)
            else:
                dk1 = tl.dot(ds2, q2, dk1)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=_INTEGERS)
def backward_keys(
    q_desc, k_desc, v_desc, g_desc, dk_out, dv_out, lse, delta, lam, cu_q, cu_k, used, n_q, n_k, n_tokens,
    blocks, n_sequences, pairs, groups, left, right, qk_scale, scale,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    OWN_KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr,
    HAS_USED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
):  # fmt: skip
    """dK and dV (or one of them) of one block of keys of one group, over all pairs of the group."""
    block, z = schedule(tl.program_id(0), blocks, n_sequences * groups, GROUP, False)
    group = z % groups
    q_start, n_q, k_start, n_k, in_use = sequence(
        z // groups, cu_q, cu_k, used, n_q, n_k, PACKED, HAS_USED
    )
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
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse, delta, lam, head_lam, q_start, n_q, pair, pairs,
            n_tokens, low, full_low, shift, keys, in_use, left, right, qk_scale, BM, D, DV, OWN_KEYS,
            PER_TOKEN, True, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
        )  # fmt: skip
        dk1, dk2, dv = _keys_range(
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse, delta, lam, head_lam, q_start, n_q, pair, pairs,
            n_tokens, full_low, full_high, shift, keys, in_use, left, right, qk_scale, BM, D, DV, OWN_KEYS,
            PER_TOKEN, False, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
        )  # fmt: skip
        # what remains is a tail of queries, a window's edge, or a block that holds unused keys
        dk1, dk2, dv = _keys_range(
            dk1, dk2, dv, k1, k2, v, q_desc, g_desc, lse, delta, lam, head_lam, q_start, n_q, pair, pairs,
            n_tokens, full_high, high, shift, keys, in_use, left, right, qk_scale, BM, D, DV, OWN_KEYS,
            PER_TOKEN, True, HAS_LEFT, HAS_RIGHT, CLEAN, WANT_DK, WANT_DV,
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
    dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, row, k1_col, k2_col, v_col, begin, end, position,
    in_use, left, right, qk_scale, BN: tl.constexpr, OWN_KEYS: tl.constexpr, MASK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
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
            mask = visible(position[:, None], keys[None, :], in_use, left, right, HAS_LEFT, HAS_RIGHT)
            p1 = tl.where(mask, p1, 0.0)
            p2 = tl.where(mask, p2, 0.0)
        dq1 = tl.dot((p1 * (dp - d1[:, None])).to(k1.dtype), k1, dq1)
        dq2 = tl.dot((p2 * (dp - d2[:, None])).to(k2.dtype), k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=_INTEGERS)
def backward_queries(
    q_desc, k_desc, v_desc, g_desc, dq_out, lse, delta, lam, cu_q, cu_k, used, n_q, n_k, n_tokens, blocks,
    n_sequences, pairs, groups, left, right, qk_scale, scale,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    OWN_KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr,
    HAS_USED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """dQ of both branches of one pair for one block of queries."""
    block, z = schedule(tl.program_id(0), blocks, n_sequences * pairs, GROUP, True)
    pair = z % pairs
    group = pair // (pairs // groups)
    q_start, n_q, k_start, n_k, in_use = sequence(
        z // pairs, cu_q, cu_k, used, n_q, n_k, PACKED, HAS_USED
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
    at = (2 * pair).to(tl.int64) * n_tokens + rows
    lse1 = tl.load(lse + at, mask=inside, other=float("inf"))
    lse2 = tl.load(lse + n_tokens + at, mask=inside, other=float("inf"))
    d1 = tl.load(delta + at, mask=inside, other=0.0)
    d2 = tl.load(delta + n_tokens + at, mask=inside, other=0.0)
    dq1 = tl.zeros([BM, D], tl.float32)
    dq2 = tl.zeros([BM, D], tl.float32)
    if HAS_LEFT:
        dq1, dq2 = _queries_range(
            dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col, low,
            full_low, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True, HAS_LEFT, HAS_RIGHT, CLEAN,
        )  # fmt: skip
    dq1, dq2 = _queries_range(
        dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col, full_low,
        full_high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, False, HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    dq1, dq2 = _queries_range(
        dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, k_desc, v_desc, k_start, k1_col, k2_col, v_col, full_high,
        high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True, HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    dtype = dq_out.dtype.element_ty
    to = dq_out + (rows.to(tl.int64) * pairs + pair)[:, None] * (2 * D) + tl.arange(0, D)[None, :]
    tl.store(to, (dq1 * scale).to(dtype), mask=inside[:, None])
    tl.store(to + D, (dq2 * (-scale * this)[:, None]).to(dtype), mask=inside[:, None])
