"""Norms around linear attention, over the width of a head; their backward passes keep inputs only.

Computed in at least float32 and rounded once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.device import refuse_second_derivative
from megadiff.kernels.reference import wide


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim, in x's dtype. A row of zeros stays zeros."""
    return _L2Norm.apply(x, eps)  # type: ignore[return-value]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """RMSNorm(x) * weight * SiLU(gate) over the last dim, in x's dtype; `gate` has x's shape."""
    return _GatedRMSNorm.apply(x, gate, weight, eps)  # type: ignore[return-value]


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        y = x.to(wide(x.dtype))
        return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        (x,) = ctx.saved_tensors
        y = x.to(wide(x.dtype))
        scale = torch.rsqrt(y.square().sum(-1, keepdim=True) + ctx.eps)
        y = y * scale
        d_y = d_y.to(y.dtype)
        return (scale * (d_y - y * (y * d_y).sum(-1, keepdim=True))).to(x.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        dtype = wide(x.dtype)
        y = x.to(dtype)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
        return (y * F.silu(gate.to(dtype))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        x, gate, weight = ctx.saved_tensors
        dtype = wide(x.dtype)
        d_y, w, g = d_y.to(dtype), weight.to(dtype), gate.to(dtype)
        normed = x.to(dtype)
        scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + ctx.eps)
        normed = normed * scale
        d_gate = torch.ops.aten.silu_backward(d_y * normed * w, g)
        d_product = d_y * F.silu(g)  # the gradient of normed * weight
        d_weight = (d_product * normed).flatten(0, -2).sum(0)
        d_normed = d_product * w
        d_x = scale * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True))
        return d_x.to(x.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype), None
