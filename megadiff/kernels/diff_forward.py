# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportUnboundVariable=false
# (Triton kernels are compiled by Triton, whose types pyright does not know)
"""Triton forward kernels of differential attention.

`forward_joint` keeps the accumulators of both branches in registers and reads every value block
once: best for narrow heads. `forward_in_turn` runs branch 2, writes its output, runs branch 1 and
subtracts: for value widths whose two accumulators do not fit. Both end with the difference in
float32, the optional per-head RMSNorm, and save what the backward needs.
"""

import triton
import triton.language as tl

from megadiff.kernels.diff_common import (
    key_range,
    schedule,
    sequence,
    statistics_start,
    visible,
    zero_rows_outside,
)


@triton.jit
def _accumulate(scores, v, acc, top, total, qk_scale):
    """One block of the online softmax. A row that has seen no key keeps top = -inf, total = 0."""
    new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.math.exp2(scores * qk_scale - base[:, None])
    shrink = tl.math.exp2(top - base)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_top, total * shrink + tl.sum(p, 1)


@triton.jit
def _normalise(acc, top, total):
    """(output, log2 of the sum of exp2): 0 and +inf in rows without keys, so that exp2(s - lse) =
    0."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("inf"), top + tl.math.log2(safe))
    return acc / safe[:, None], lse


@triton.jit
def _branch_range(
    acc, top, total, q, k_desc, v_desc, row, k_col, v_col, begin, end, position, in_use, left,
    right, qk_scale, BN: tl.constexpr, MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT:
    tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    for j in tl.range(begin, end, BN):
        k = k_desc.load([row + j, k_col])
        scores = tl.dot(q, k.T)
        v = v_desc.load([row + j, v_col])
        if MASK:
            keys = j + tl.arange(0, BN)
            mask = visible(
                position[:, None], keys[None, :], in_use, left, right, HAS_LEFT, HAS_RIGHT
            )
            scores = tl.where(mask, scores, float("-inf"))
            if CLEAN:
                v = zero_rows_outside(v, keys, in_use)
        acc, top, total = _accumulate(scores, v, acc, top, total, qk_scale)
    return acc, top, total


@triton.jit
def _branch(
    q_desc, k_desc, v_desc, q_row, q_col, row, k_col, v_col, low, full_low, full_high, high,
    position, in_use, left, right, qk_scale, BM: tl.constexpr, BN: tl.constexpr, DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T) v of one branch for one block of queries, and its log-sum-exp."""
    q = q_desc.load([q_row, q_col])
    acc = tl.zeros([BM, DV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_LEFT:
        acc, top, total = _branch_range(
            acc, top, total, q, k_desc, v_desc, row, k_col, v_col, low, full_low, position, in_use,
            left, right, qk_scale, BN, True, HAS_LEFT, HAS_RIGHT, CLEAN,
        )  # fmt: skip
    acc, top, total = _branch_range(
        acc, top, total, q, k_desc, v_desc, row, k_col, v_col, full_low, full_high, position,
        in_use, left, right, qk_scale, BN, False, HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    acc, top, total = _branch_range(
        acc, top, total, q, k_desc, v_desc, row, k_col, v_col, full_high, high, position, in_use,
        left, right, qk_scale, BN, True, HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    return _normalise(acc, top, total)


@triton.jit
def _joint_range(
    acc1, top1, total1, acc2, top2, total2, q1, q2, k_desc, v_desc, row, k1_col, k2_col, v_col,
    begin, end, position, in_use, left, right, qk_scale, BN: tl.constexpr, OWN_KEYS: tl.constexpr,
    MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    for j in tl.range(begin, end, BN):
        k1 = k_desc.load([row + j, k1_col])
        scores1 = tl.dot(q1, k1.T)
        if OWN_KEYS:
            k2 = k_desc.load([row + j, k2_col])
        else:
            k2 = k1
        scores2 = tl.dot(q2, k2.T)
        v = v_desc.load([row + j, v_col])
        if MASK:
            keys = j + tl.arange(0, BN)
            mask = visible(
                position[:, None], keys[None, :], in_use, left, right, HAS_LEFT, HAS_RIGHT
            )
            scores1 = tl.where(mask, scores1, float("-inf"))
            scores2 = tl.where(mask, scores2, float("-inf"))
            if CLEAN:
                v = zero_rows_outside(v, keys, in_use)
        acc1, top1, total1 = _accumulate(scores1, v, acc1, top1, total1, qk_scale)
        acc2, top2, total2 = _accumulate(scores2, v, acc2, top2, total2, qk_scale)
    return acc1, top1, total1, acc2, top2, total2


@triton.jit
def _finish(
    o, out, normed, rstd, weight, rows, end, pair, pairs, n_tokens, width, eps, out_scale,
    DV: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Write the difference o `[BM, DV]` and, with NORM, its RMSNorm over `width` columns."""
    columns = tl.arange(0, DV)
    inside = rows < end
    at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + columns[None, :]
    if SAVE or not NORM:
        tl.store(out + at, o.to(out.dtype.element_ty), mask=inside[:, None])
    if NORM:
        r = tl.math.rsqrt(tl.sum(o * o, 1) / width + eps)
        y = o * r[:, None] * out_scale
        if HAS_WEIGHT:
            y = y * tl.load(weight + columns).to(tl.float32)[None, :]
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside[:, None])
        if SAVE:
            tl.store(rstd + pair * n_tokens.to(tl.int64) + rows, r, mask=inside)


@triton.jit
def load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr):
    if PER_TOKEN:
        return tl.load(lam + rows.to(tl.int64) * pairs + pair, mask=inside, other=0.0)
    if PER_HEAD:
        return tl.load(lam + pair) + tl.zeros_like(rows).to(tl.float32)
    return tl.load(lam) + tl.zeros_like(rows).to(tl.float32)


_INTEGERS = [
    "n_q", "n_k", "n_tokens", "pitch", "blocks", "side", "n_sequences", "pairs", "groups", "left",
    "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)
def forward_in_turn(
    q_desc, k_desc, v_desc, out, second, normed, lse, rstd, lam, weight, cu_q, cu_k, used, n_q, n_k,
    n_tokens, pitch, blocks, side, n_sequences, pairs, groups, left, right, qk_scale, width, eps,
    out_scale, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OWN_KEYS:
    tl.constexpr, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr, HAS_USED:
    tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr, NORM:
    tl.constexpr, HAS_WEIGHT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one pair; branch 2 first, its output read back for the difference."""
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
    end = q_start + n_q
    inside = rows < end
    branches: tl.constexpr = 2 if OWN_KEYS else 1
    k_col = group * branches * D

    o2, lse2 = _branch(
        q_desc, k_desc, v_desc, q_start + begin, (2 * pair + 1) * D, k_start, k_col + (branches - 1)
        * D, group * DV, low, full_low, full_high, high, position, in_use, left, right, qk_scale,
        BM, BN, DV, HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + tl.arange(0, DV)[None, :]
    tl.store(second + at, o2.to(second.dtype.element_ty), mask=inside[:, None])
    lse_at = (
        lse + 2 * pair * pitch.to(tl.int64) + statistics_start(q_start, n_q, index, PACKED) + begin
    )
    tl.store(lse_at + pitch + tl.arange(0, BM), lse2, mask=inside)

    o1, lse1 = _branch(
        q_desc, k_desc, v_desc, q_start + begin, 2 * pair * D, k_start, k_col, group * DV, low,
        full_low, full_high, high, position, in_use, left, right, qk_scale, BM, BN, DV, HAS_LEFT,
        HAS_RIGHT, CLEAN,
    )  # fmt: skip
    tl.store(lse_at + tl.arange(0, BM), lse1, mask=inside)
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    # addresses computed anew rather than held over the loops
    at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + tl.arange(0, DV)[None, :]
    o2 = tl.load(second + at, mask=inside[:, None], other=0.0).to(tl.float32)
    _finish(
        o1 - this[:, None] * o2, out, normed, rstd, weight, rows, end, pair, pairs, n_tokens, width,
        eps, out_scale, DV, NORM, HAS_WEIGHT, SAVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)
def forward_joint(
    q_desc, k_desc, v_desc, out, second, normed, lse, rstd, lam, weight, cu_q, cu_k, used, n_q, n_k,
    n_tokens, pitch, blocks, side, n_sequences, pairs, groups, left, right, qk_scale, width, eps,
    out_scale, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OWN_KEYS:
    tl.constexpr, PER_TOKEN: tl.constexpr, PER_HEAD: tl.constexpr, PACKED: tl.constexpr, HAS_USED:
    tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CLEAN: tl.constexpr, NORM:
    tl.constexpr, HAS_WEIGHT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one pair, both branches at once."""
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
    end = q_start + n_q
    inside = rows < end
    branches: tl.constexpr = 2 if OWN_KEYS else 1
    k1_col = group * branches * D
    k2_col = k1_col + (branches - 1) * D
    v_col = group * DV

    q1 = q_desc.load([q_start + begin, 2 * pair * D])
    q2 = q_desc.load([q_start + begin, (2 * pair + 1) * D])
    acc1 = tl.zeros([BM, DV], tl.float32)
    acc2 = tl.zeros([BM, DV], tl.float32)
    top1 = tl.full([BM], float("-inf"), tl.float32)
    top2 = tl.full([BM], float("-inf"), tl.float32)
    total1 = tl.zeros([BM], tl.float32)
    total2 = tl.zeros([BM], tl.float32)
    if HAS_LEFT:
        acc1, top1, total1, acc2, top2, total2 = _joint_range(
            acc1, top1, total1, acc2, top2, total2, q1, q2, k_desc, v_desc, k_start, k1_col, k2_col,
            v_col, low, full_low, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True,
            HAS_LEFT, HAS_RIGHT, CLEAN,
        )  # fmt: skip
    acc1, top1, total1, acc2, top2, total2 = _joint_range(
        acc1, top1, total1, acc2, top2, total2, q1, q2, k_desc, v_desc, k_start, k1_col, k2_col,
        v_col, full_low, full_high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, False,
        HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    acc1, top1, total1, acc2, top2, total2 = _joint_range(
        acc1, top1, total1, acc2, top2, total2, q1, q2, k_desc, v_desc, k_start, k1_col, k2_col,
        v_col, full_high, high, position, in_use, left, right, qk_scale, BN, OWN_KEYS, True,
        HAS_LEFT, HAS_RIGHT, CLEAN,
    )  # fmt: skip
    o1, lse1 = _normalise(acc1, top1, total1)
    o2, lse2 = _normalise(acc2, top2, total2)
    if SAVE:
        at = (rows.to(tl.int64) * pairs + pair)[:, None] * DV + tl.arange(0, DV)[None, :]
        tl.store(second + at, o2.to(second.dtype.element_ty), mask=inside[:, None])
        lse_at = (
            lse
            + 2 * pair * pitch.to(tl.int64)
            + statistics_start(q_start, n_q, index, PACKED)
            + begin
        )
        tl.store(lse_at + tl.arange(0, BM), lse1, mask=inside)
        tl.store(lse_at + pitch + tl.arange(0, BM), lse2, mask=inside)
    this = load_lambda(lam, rows, inside, pair, pairs, PER_TOKEN, PER_HEAD)
    _finish(
        o1 - this[:, None] * o2, out, normed, rstd, weight, rows, end, pair, pairs, n_tokens, width,
        eps, out_scale, DV, NORM, HAS_WEIGHT, SAVE,
    )  # fmt: skip
