"""RMSNorm and LayerNorm, computed in at least float32 and rounded once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.fused import fused
from megadiff.kernels.reference import wide


@fused
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; weight `[x.shape[-1]]` or None.

    Returned in x's dtype (arXiv 1910.07467).
    """
    wide_x = x.to(wide(x.dtype))
    y = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)


@fused
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim, in x's dtype."""
    dtype = wide(x.dtype)
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)
