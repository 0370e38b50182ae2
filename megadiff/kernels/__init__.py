"""Pure functions on tensors: attention, norms, rotary embedding, SwiGLU, cross entropy."""

from megadiff.kernels.activation import swiglu
from megadiff.kernels.attention import attention, diff_attention
from megadiff.kernels.loss import (
    cross_entropy,
    cross_entropy_grad,
    cross_entropy_partials,
)
from megadiff.kernels.norm import layer_norm, rms_norm
from megadiff.kernels.rotary import rotary, rotary_cos_sin

__all__ = [
    "attention",
    "cross_entropy",
    "cross_entropy_grad",
    "cross_entropy_partials",
    "diff_attention",
    "layer_norm",
    "rms_norm",
    "rotary",
    "rotary_cos_sin",
    "swiglu",
]
