"""RMSNorm and LayerNorm, computed in at least float32 and rounded once."""

import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.device import on_triton
from megadiff.kernels.reference import wide


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; weight `[x.shape[-1]]` or None.

    Returned in x's dtype (arXiv 1910.07467).
    """
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)) in x's dtype, the sum rounded first; x alone where y is None."""
    if on_triton(x) and (y is None or (y.dtype, y.shape) == (x.dtype, x.shape)):
        from megadiff.kernels import norm_triton

        return norm_triton.add_rms_norm(x, y, weight, eps)
    x = x if y is None else x + y
    if weight is not None and weight.dtype != x.dtype:
        dtype = wide(x.dtype)
        return x, F.rms_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), eps).to(x.dtype)
    return x, F.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim, in x's dtype."""
    if any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
        dtype = wide(x.dtype)
        weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
        return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
