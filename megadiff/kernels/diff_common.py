# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportUnboundVariable=false
# (Triton kernels are compiled by Triton, whose types pyright does not know)
"""Parts shared by the Triton kernels of differential attention.

All tensors are seen as `[tokens, heads * width]` with one row per token of the whole batch; a
*sequence* is a batch row or a packed document, given by its first token and its length. Scores are
in base 2: `p = exp2(qk_scale * q k^T - lse)` with `qk_scale = scale * log2(e)`.
"""

import triton
import triton.language as tl


@triton.jit
def schedule(pid, blocks, heads, side, REVERSED: tl.constexpr):
    """1-D grid -> (block, head). `side` heads run side by side, so that their keys stay in L2;
    within them the blocks with most work under a causal mask come first."""
    first = pid // (blocks * side) * side
    size = min(side, heads - first)
    inside = pid - first * blocks
    block = inside // size
    if REVERSED:
        block = blocks - 1 - block
    return block, first + inside % size


@triton.jit
def sequence(index, cu_q, cu_k, used, n_q, n_k, PACKED: tl.constexpr, HAS_USED: tl.constexpr):
    """(first query token, queries, first key token, keys, keys in use) of a sequence."""
    if PACKED:
        q_start = tl.load(cu_q + index)
        n_q = tl.load(cu_q + index + 1) - q_start
        k_start = tl.load(cu_k + index)
        n_k = tl.load(cu_k + index + 1) - k_start
    else:
        q_start = index * n_q
        k_start = index * n_k
    in_use = n_k
    if HAS_USED:
        in_use = min(tl.load(used + index), n_k)
    return q_start, n_q, k_start, n_k, in_use


@triton.jit
def statistics_start(q_start, n_q, index, PACKED: tl.constexpr):
    """Where the per-query statistics of a sequence begin in their rows: on a multiple of 4, as the
    copy engine wants; in a batch, at equal distances. Sequences do not overlap, and a row takes
    tokens + 4 * sequences entries."""
    if PACKED:
        return (q_start // 4 + index) * 4
    return index * (n_q // 4 + 1) * 4


@triton.jit
def visible(position, keys, in_use, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys are seen from a position; the two broadcast against each other."""
    mask = (keys < in_use) & (position == position)
    if HAS_RIGHT:
        mask &= keys <= position + right
    if HAS_LEFT:
        mask &= keys >= position - left
    return mask


@triton.jit
def key_range(
    begin,
    end,
    shift,
    in_use,
    left,
    right,
    BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(low, full_low, full_high, high): queries [begin, end) see keys of [low, high) and all of
    [full_low, full_high); all but `high` are multiples of BLOCK. Query i stands at i + shift."""
    high = in_use
    full_high = in_use
    if HAS_RIGHT:
        high = min(high, end + shift + right)
        full_high = min(full_high, begin + shift + right + 1)
    high = max(high, 0)
    full_high = max(full_high, 0) // BLOCK * BLOCK
    low = 0
    full_low = 0
    if HAS_LEFT:
        low = max(begin + shift - left, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(max(end - 1 + shift - left, 0), BLOCK) * BLOCK
        full_low = max(min(full_low, tl.cdiv(high, BLOCK) * BLOCK), low)
    return low, full_low, max(full_high, full_low), high


@triton.jit
def query_range(
    begin,
    end,
    shift,
    n_q,
    in_use,
    left,
    right,
    BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """The same for keys [begin, end): the queries that see some of them, and those that see all."""
    low = 0
    full_low = 0
    if HAS_RIGHT:
        low = max(begin - shift - right, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(max(end - 1 - shift - right, 0), BLOCK) * BLOCK
    high = n_q
    full_high = n_q
    if HAS_LEFT:
        high = min(high, min(end, in_use) - shift + left)
        full_high = min(full_high, begin - shift + left + 1)
    high = max(high, 0)
    full_high = max(full_high, 0) // BLOCK * BLOCK
    if begin >= in_use:
        high = 0
    if end > in_use:
        full_high = 0
    full_low = max(min(full_low, tl.cdiv(high, BLOCK) * BLOCK), low)
    return low, full_low, max(full_high, full_low), high


@triton.jit
def zero_rows_outside(x, rows, end):
    """Rows of another sequence or of padding set to 0: a product with 0 does not silence a NaN."""
    return tl.where((rows < end)[:, None], x, tl.zeros_like(x))
