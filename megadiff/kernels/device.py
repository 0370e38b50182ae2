"""Where the small Triton kernels serve."""

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def on_triton(x: Tensor) -> bool:
    """An eager CUDA call in float32 or less. A compiler fuses the plain torch form itself."""
    return (
        x.is_cuda
        and HAS_TRITON
        and x.dtype != torch.float64
        and x.numel() > 0
        and not torch.compiler.is_compiling()
    )
