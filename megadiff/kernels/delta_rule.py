"""The delta rule, a linear attention whose state is overwritten at a key instead of added to.

Per head, with a state S `[key width, value width]` that starts at zero or at a given value:

    S <- exp(g) S                        (gated only)
    S <- S + k u^T,  u = beta (v - S^T k)
    o  = scale S^T q

`delta_rule_reference` is this recurrence, and `delta_rule_chunks` its form for training.
"""

from torch import Tensor

from megadiff.kernels import fla
from megadiff.kernels.delta_rule_chunks import chunk_delta_rule


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over every sequence (or document) and head, differentiable in all inputs.

    q, k `[batch, sequence, heads, key width]`; v `[batch, sequence, heads, value width]`;
    beta, the writing strength, and g <= 0, the log of the decay (None: no decay),
    `[batch, sequence, heads]`, best in float32. `scale` multiplies q (default: key width ** -0.5).

    With `cu_seqlens` `[documents + 1]` over the `batch * sequence` tokens each document starts
    anew; documents may be empty. `initial_state`: `[batch or documents, heads, key width, value
    width]`, default zeros.

    Returns the output, like v, and the final state, like `initial_state`, or None if it is not
    asked for; states are float32, or float64 where an input is. A token with k = 0 and beta = 0
    leaves the state as it was (but for the decay).

    On a GPU fla-core's kernels run where they pass a self-test (`kernels.fla`), else
    `chunk_delta_rule` does; a line in the log says which and why.
    """
    _check(q, k, v, beta, g)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype if q.dtype == k.dtype == v.dtype else None
    operator = fla.DeltaRule(dtype, q.shape[2], q.shape[3], v.shape[3], g is not None)
    variant = fla.Variant(cu_seqlens is not None, initial_state is not None, output_final_state)
    run = fla.kernel_for(operator, variant, q.device, chunk_delta_rule) or chunk_delta_rule
    return run(q, k, v, beta, g, factor, initial_state, cu_seqlens, output_final_state)


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> None:
    per_head = [beta] if g is None else [beta, g]
    if (
        q.dim() != 4
        or k.shape != q.shape
        or v.shape[:-1] != q.shape[:-1]
        or any(x.shape != q.shape[:-1] for x in per_head)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, *per_head))
        raise ValueError(
            "delta_rule takes q and k [batch, sequence, heads, key width], v [batch, sequence, "
            f"heads, value width], beta and g [batch, sequence, heads]; got {shapes}"
        )
    if not all(x.is_floating_point() for x in (q, k, v, *per_head)):
        types = ", ".join(str(x.dtype) for x in (q, k, v, *per_head))
        raise TypeError(f"delta_rule takes float types; got {types}")
