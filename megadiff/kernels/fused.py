"""Compilation of the memory-bound kernels: one pass over memory on a GPU, plain torch elsewhere."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """`function` compiled for CUDA tensors (its first argument decides); inside a compiled model,
    and on other devices, the function itself."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args[0].is_cuda and not torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
