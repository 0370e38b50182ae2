"""Pure functions on tensors: attention, delta rule, norms, rotary, SwiGLU, cross entropy."""
# ruff: noqa: F401  what others import from here

from megadiff.kernels.activation import swiglu
from megadiff.kernels.attention import attention, diff_attention
from megadiff.kernels.delta_rule import delta_rule
from megadiff.kernels.head_norm import gated_rms_norm, l2_norm
from megadiff.kernels.loss import cross_entropy_grad, cross_entropy_partials
from megadiff.kernels.norm import add_rms_norm, layer_norm, rms_norm
from megadiff.kernels.rotary import rotary, rotary_cos_sin, split_rotary
from megadiff.kernels.short_convolution import short_convolution
