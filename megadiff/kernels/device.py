"""Where Triton kernels serve, and where they may be launched without a registered operator."""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

HAS_TRITON = find_spec("triton") is not None


def on_triton(x: Tensor) -> bool:
    """Whether the small Triton kernels serve: a plain CUDA call in float32 or less.

    A compiler fuses the plain torch form itself.
    """
    return (
        x.is_cuda and HAS_TRITON and x.dtype != torch.float64 and x.numel() > 0 and is_plain_call(x)
    )


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether nothing watches the operators: no compiler, mode, transform or subclass."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or any(type(x) is not Tensor and type(x) is not Parameter for x in tensors)
    )


def refuse_second_derivative() -> None:
    """In a backward that autograd can not follow: raise where it is asked to.

    torch's `once_differentiable` does not where the gradient that arrives is a constant, as that of
    a sum is; what depends on the saved tensors would then be missing without a word.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("a kernel has no second derivative: create_graph=True is refused")
