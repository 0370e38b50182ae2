"""SwiGLU (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.device import on_triton
from megadiff.kernels.reference import wide


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; `[..., 2 F]` = [gate | up] -> `[..., F]`, computed in at least float32."""
    if on_triton(gate_up):
        from megadiff.kernels import small_triton

        return small_triton.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    dtype = wide(gate_up.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate_up.dtype)
