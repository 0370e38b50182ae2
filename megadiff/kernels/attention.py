"""The attention operators: arguments, checks, choice of a backend, epilogue."""

from typing import Literal

from torch import Tensor

from megadiff.kernels import reference, sdpa
from megadiff.kernels.geometry import make_geometry
from megadiff.kernels.norm import rms_norm

Backend = Literal["auto", "reference", "sdpa"]


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dim() == k.dim() == v.dim()):
        raise ValueError(
            f"q, k and v must have the same number of dims; got {q.dim()}, {k.dim()}, {v.dim()}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in width: {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"k and v differ in batch or tokens: {tuple(k.shape[:-2])}, {tuple(v.shape[:-2])}"
        )
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise TypeError(
            f"q, k and v must share one float type; got {q.dtype}, {k.dtype}, {v.dtype}"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Standard attention, softmax(scale q k^T) v.

    q `[batch, seq, h, d]`; k `[batch, seq_k, h_kv, d]`; v `[batch, seq_k, h_kv, d_v]`; out
    `[batch, seq, h, d_v]` in q's dtype. Packed (`cu_seqlens_q` given): `[tokens, heads, width]`.
    The other arguments are those of `diff_attention`.
    """
    _check_heads(q, k, v)
    h, h_k, h_v = q.shape[-2], k.shape[-2], v.shape[-2]
    if h_k != h_v or h % h_v:
        raise ValueError(f"{h} query heads cannot share {h_k} key and {h_v} value heads")
    geometry = make_geometry(
        q,
        k,
        causal=causal,
        window=window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
    )
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    run = reference.attention if backend == "reference" else sdpa.attention
    return run(q, k, v, scale, geometry).to(q.dtype)


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_scale: float | None = None,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Differential attention, (softmax(scale q1 k1^T) - lam softmax(scale q2 k2^T)) v, per pair of
    heads.

    Args:
        q: `[batch, seq, 2h, d]`; heads 2i and 2i + 1 are the branches of pair i.
        k: `[batch, seq_k, 2 h_kv, d]`, branches interleaved likewise (DIFF V1), or `[batch, seq_k,
        h_kv, d]`
            when both branches read the same keys (DIFF V2). Pair i reads group `i // (h / h_kv)`.
        v: `[batch, seq_k, h_kv, d_v]`.
        lam: scalar, `[h]` or `[batch, seq, h]`, any sign and size; subtracted in at least float32.
        causal: a query sees no key after itself; queries and keys are aligned at their ends.
        scale: of the scores; default `d ** -0.5`.
        window: (left, right), keys seen before and after a query's own position, inclusive; -1: no
        limit. cu_seqlens_q, cu_seqlens_k: `[documents + 1]` int32: packed documents. q, k, v are
        then
            `[tokens, heads, width]` and lam at most `[tokens, h]`. Tokens after the last document
            are padding. cu_seqlens_k defaults to cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: bounds of the document lengths; they save work.
        seqused_k: `[batch]` (packed: `[documents]`) int32: keys in use of each row, as in a
        key/value cache. norm_weight, norm_eps, out_scale: with norm_eps, each head's output is
        RMS-normalised over d_v, times
            norm_weight `[d_v]` if given, times out_scale if given.
        deterministic: two runs are equal bit for bit.
        backend: "auto", or "reference" (holds the maps), "sdpa" (torch's kernels).

    Returns:
        `[batch, seq, h, d_v]` (packed: `[tokens, h, d_v]`) in q's dtype; exactly 0 before the norm,
        and without gradient, where a query sees no key.
    """
    _check_heads(q, k, v)
    h, h_k, h_kv = q.shape[-2] // 2, k.shape[-2], v.shape[-2]
    if q.shape[-2] % 2 or h_k not in (h_kv, 2 * h_kv) or h % h_kv:
        raise ValueError(
            f"{q.shape[-2]} query, {h_k} key and {h_kv} value heads form no pairs: with "
            "h pairs on h_kv groups, q has 2h heads, v h_kv, and k 2 h_kv (own keys) or h_kv "
            "(shared keys)"
        )
    if lam.dim() and tuple(lam.shape) not in ((h,), (*q.shape[:-2], h)):
        raise ValueError(
            f"lam must be a scalar, [{h}] or {[*q.shape[:-2], h]}; got {list(lam.shape)}"
        )
    if norm_eps is None and not (norm_weight is None and out_scale is None):
        raise ValueError("norm_weight and out_scale belong to the norm: give norm_eps too")
    geometry = make_geometry(
        q,
        k,
        causal=causal,
        window=window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
    )
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    run = reference.diff_attention if backend == "reference" else sdpa.diff_attention
    out = run(q, k, v, lam, scale, geometry)
    if norm_eps is not None:
        out = rms_norm(out, norm_weight, norm_eps)
        if out_scale is not None:
            out = out * out_scale
    return out.to(q.dtype)
