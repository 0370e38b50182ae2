"""The attention operators: arguments, checks, choice of a backend, epilogue."""

import functools
import logging
import os
from typing import Literal

import torch
from torch import Tensor

from megadiff.kernels import hopper, reference, sdpa
from megadiff.kernels.device import HAS_TRITON
from megadiff.kernels.geometry import Geometry, make_geometry
from megadiff.kernels.norm import rms_norm

Backend = Literal["auto", "reference", "sdpa", "triton", "hopper"]

_log = logging.getLogger(__name__)


@torch.compiler.assume_constant_result
def _why_no_triton(device: str, capability: tuple[int, int]) -> str | None:
    """What keeps Triton kernels from running on a device, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU"
    if device == "cuda" and capability < (8, 0):
        return f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None if device in ("cpu", "cuda") else f"the tensors are on {device}"


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    """Why the fused kernel cannot serve a call, or None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > 128 or v.shape[-1] > 256:
        return f"head widths {q.shape[-1]} and {v.shape[-1]} exceed 128 (q, k) and 256 (v)"
    if scale <= 0:
        return f"the softmax scale {scale} is not positive"
    if 0 in (q.numel(), k.numel(), v.numel()):
        return "a tensor is empty"
    device = q.device.type
    return _why_no_triton(
        device, torch.cuda.get_device_capability(q.device) if device == "cuda" else (0, 0)
    )


def _why_not_sdpa(q: Tensor, needs_grad: bool, deterministic: bool) -> str | None:
    if deterministic and needs_grad and q.device.type == "cuda":
        return "the backward of torch's CUDA kernels is not deterministic"
    return None


@functools.cache
def _say_once(operator: str, backend: str, reason: str) -> None:
    _log.info("%s runs on backend %s%s", operator, backend, f": {reason}" if reason else "")


def _choose(
    backend: str,
    device: str,
    geometry: Geometry,
    needs_grad: bool,
    no_hopper: str | None,
    no_triton: str | None,
    no_sdpa: str | None,
) -> str:
    """The backend that runs; a named one that cannot serve the call is refused with the reason."""
    if backend == "auto":
        chosen, reason = "hopper", ""
        if no_hopper is not None:
            chosen, reason = "triton", f"hopper is not possible, {no_hopper}"
        if device == "cpu":  # also where Triton's interpreter could run
            chosen, reason = "sdpa", "the tensors are on the CPU"
        elif no_triton is not None:
            chosen, reason = "sdpa", f"triton is not possible, {no_triton}"
        elif not needs_grad and no_sdpa is None and (geometry.max_seqlen_q or 0) <= 16:
            chosen, reason = "sdpa", "with few queries torch's kernels divide the keys"
        if chosen == "sdpa" and no_sdpa is not None:
            chosen, reason = "reference", f"{reason}; sdpa is not possible, {no_sdpa}"
        if not torch.compiler.is_compiling():
            _say_once("diff_attention", chosen, reason)
        return chosen
    why_not = {"hopper": no_hopper, "triton": no_triton, "sdpa": no_sdpa, "reference": None}
    if backend not in why_not:
        raise ValueError(f"unknown backend {backend!r}; known: auto, {', '.join(why_not)}")
    if why_not[backend] is not None:
        raise ValueError(f"backend {backend!r} cannot serve this call: {why_not[backend]}")
    return backend


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dim() == k.dim() == v.dim()):
        raise ValueError(
            f"q, k and v must have the same number of dims; got {q.dim()}, {k.dim()}, {v.dim()}"
        )
    if 0 in (q.shape[-2], k.shape[-2], v.shape[-2], q.shape[-1]):
        raise ValueError(
            f"q, k and v must have heads and a width; got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
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
        q, k, causal=causal, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
    )  # fmt: skip
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if backend not in ("auto", "reference", "sdpa"):
        raise ValueError(
            f"backend {backend!r} does not serve attention; known: auto, reference, sdpa"
        )
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
        k: `[batch, seq_k, 2 h_kv, d]`, branches interleaved likewise (DIFF V1), or
            `[batch, seq_k, h_kv, d]` when both branches read the same keys (DIFF V2). Pair i reads
            group `i // (h / h_kv)`.
        v: `[batch, seq_k, h_kv, d_v]`.
        lam: scalar, `[h]` or `[batch, seq, h]`, any sign and size; subtracted in at least float32.
        causal: a query sees no key after itself; queries and keys are aligned at their ends.
        scale: of the scores; default `d ** -0.5`.
        window: (left, right), keys seen before and after a query's own position, inclusive;
            negative: no limit.
        cu_seqlens_q, cu_seqlens_k: `[documents + 1]` int32 or int64, rising from 0: packed
            documents. q, k, v are then `[tokens, heads, width]` and lam at most `[tokens, h]`.
            Tokens after the last document are padding. cu_seqlens_k defaults to cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: bounds of the document lengths; they save work.
        seqused_k: `[batch]` (packed: `[documents]`) int32 or int64: keys in use of each row, at
            most all, as in a key/value cache.
        norm_weight, norm_eps, out_scale: with norm_eps, each head's output is RMS-normalised over
            d_v, times norm_weight `[d_v]` if given, times out_scale if given.
        deterministic: two runs are equal bit for bit.
        backend: "auto", or "reference" (holds the maps), "sdpa" (torch's kernels), "triton" (fused;
            bfloat16 and float16, d up to 128, d_v up to 256), "hopper" (fused for one GPU
            generation; bfloat16, d 64 or 128, causal or full).

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
    if norm_weight is not None and norm_weight.shape != v.shape[-1:]:
        raise ValueError(f"norm_weight must be [{v.shape[-1]}]; got {list(norm_weight.shape)}")
    if norm_eps is None and not (norm_weight is None and out_scale is None):
        raise ValueError("norm_weight and out_scale belong to the norm: give norm_eps too")
    if norm_eps is not None:  # compiled kernels take float32: an integer has another type
        norm_eps, out_scale = float(norm_eps), None if out_scale is None else float(out_scale)
    geometry = make_geometry(
        q, k, causal=causal, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k,
    )  # fmt: skip
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    tensors = [x for x in (q, k, v, lam, norm_weight) if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    chosen = _choose(
        backend,
        q.device.type,
        geometry,
        needs_grad,
        hopper.why_not(q, k, v, scale, geometry),
        _why_not_triton(q, k, v, scale),
        _why_not_sdpa(q, needs_grad, deterministic),
    )
    if chosen in ("triton", "hopper"):
        from megadiff.kernels import diff_triton  # needs Triton, which is optional

        return diff_triton.diff_attention(
            q, k, v, lam, scale, geometry, norm_weight, norm_eps, out_scale,
            hopper=chosen == "hopper", save=needs_grad,
        )  # fmt: skip
    run = reference.diff_attention if chosen == "reference" else sdpa.diff_attention
    out = run(q, k, v, lam, scale, geometry)
    if norm_eps is not None:
        if out_scale is not None:
            ones = out.new_ones(out.shape[-1]) if norm_weight is None else norm_weight.to(out.dtype)
            norm_weight = ones * out_scale  # not in 16 bits
        out = rms_norm(out, norm_weight, norm_eps)
    return out.to(q.dtype)
