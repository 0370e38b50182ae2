# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
"""AdamW (arXiv 1711.05101) for 16-bit parameters in one pass over memory.

Gradient, moments and what stands behind a parameter (its float32 main weight, the compensation of
its rounding, or nothing) are read once, updated in float32 and written once, the rounded parameter
with them. Imported only when used: Triton is not a dependency."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _random_bits(seed, at, BLOCK: tl.constexpr):
    """32 random bits for each of BLOCK elements from `at` on, a function of seed and position."""
    lanes = at // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.randint4x(seed, lanes)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def _at_random(x, bits):
    """float32 x rounded to bfloat16, its upper half, up or down by 16 random bits."""
    carried = x.to(tl.uint32, bitcast=True) + bits
    return (carried & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _store_moment(at, x, bits, inside):
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at, _at_random(x, bits), mask=inside)
    else:
        tl.store(at, x, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    parameter, behind, gradient, exp_avg, exp_avg_sq, scalars, n, seed, lr, beta1, beta2, eps,
    decay, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars) == 0.0:  # the step is skipped
        return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    dtype = parameter.dtype.element_ty
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars + 1)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    if MODE == "float32":
        w = tl.load(behind + at, mask=inside, other=0.0)
    else:
        w = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
        if MODE == "kahan":
            w += tl.load(behind + at, mask=inside, other=0.0).to(tl.float32)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w -= lr * decay * w
    w -= lr * tl.load(scalars + 2) * m / (tl.sqrt(v) * tl.load(scalars + 3) + eps)
    bits = _random_bits(seed, start, BLOCK)  # the compiler drops it where nothing is so rounded
    _store_moment(exp_avg + at, m, bits >> 16, inside)
    _store_moment(exp_avg_sq + at, v, bits >> 16, inside)
    if MODE == "stochastic":
        rounded = _at_random(w, bits & 0xFFFF)
    else:
        rounded = w.to(dtype)
    tl.store(parameter + at, rounded, mask=inside)
    if MODE == "float32":
        tl.store(behind + at, w, mask=inside)
    if MODE == "kahan":
        lost = w - rounded.to(tl.float32)
        tl.store(behind + at, lost.to(behind.dtype.element_ty), mask=inside)


def adamw_(
    parameter: Tensor,
    behind: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    *,
    mode: str,
    seed: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update flat tensors of one length in place.

    Args:
        parameter: bfloat16 or float16 (stochastic: bfloat16).
        behind: mode "float32": the float32 main weights; "kahan": what rounding lost, in the
            parameter's dtype; "stochastic": None.
        gradient: of any float type; exp_avg, exp_avg_sq: float32, or bfloat16 rounded at random.
        scalars: float32 `[4]` on the device: 0 to change nothing, the gradient's factor,
            1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
        seed: of the random rounding, below 2^31.
    """
    n = parameter.numel()
    _adamw[(triton.cdiv(n, _BLOCK),)](
        parameter, parameter if behind is None else behind, gradient, exp_avg, exp_avg_sq, scalars,
        n, seed, lr, beta1, beta2, eps, weight_decay, MODE=mode, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
