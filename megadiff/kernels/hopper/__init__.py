"""Differential attention's kernels for Hopper, in Gluon, whose interface belongs to one version of
Triton."""

import functools
from importlib.metadata import PackageNotFoundError, version

import torch

from megadiff.kernels.geometry import Geometry

TRITON = "3.6"
WIDTHS = ((128, 256, True), (64, 128, True), (128, 128, False), (64, 64, False))


@functools.cache  # a third of a millisecond
def _installed() -> str | None:
    """Triton's version."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


@torch.compiler.assume_constant_result
def _why_not_here(device: str, capability: tuple[int, int]) -> str | None:
    installed = _installed()
    if installed is None:
        return "Triton is not installed"
    if installed.split(".")[:2] != TRITON.split("."):
        return f"it is written for Triton {TRITON}, and {installed} is installed"
    if device != "cuda" or torch.version.hip is not None:
        return "the tensors are not on an NVIDIA GPU"
    if capability != (9, 0):
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, not 9.0"
    return None


def why_not(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, geometry: Geometry
) -> str | None:
    """Why these kernels cannot serve a call, or None if they can."""
    cuda = q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q.device) if cuda else (0, 0)
    reason = _why_not_here(q.device.type, capability)
    if reason is not None:
        return reason
    own_keys = k.shape[-2] != v.shape[-2]
    if q.dtype != torch.bfloat16:
        return f"it takes bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if (q.shape[-1], v.shape[-1], own_keys) not in WIDTHS:
        return "it takes heads of 64 and 128 with values twice as wide (V1) or as wide (V2)"
    if geometry.packed:
        return "documents are packed"
    if geometry.seqused_k is not None:
        return "seqused_k is given"
    if geometry.left is not None or geometry.right not in (None, 0):
        return "a window is given"
    if scale <= 0:
        return f"the softmax scale {scale} is not positive"
    if 0 in (q.numel(), k.numel(), v.numel()):
        return "a tensor is empty"
    return None
