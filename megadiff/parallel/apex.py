"""NVIDIA Apex's fused kernels, where it is installed and faster: https://github.com/NVIDIA/apex.

It is told by its compiled extensions: the package that registries call `apex` is another one.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
NOT_INSTALLED = "NVIDIA Apex with its CUDA extensions is not installed"


def milliseconds(
    functions: Sequence[Callable[[], object]], device: torch.device, repeats: int = 10
) -> list[float]:
    """Median time of each function on `device`, a mean over all ranks: they shall choose alike."""
    medians = []
    for function in functions:
        times = []
        for _ in range(repeats + 3):
            begin = time.perf_counter()
            function()
            torch.get_device_module(device).synchronize(device)
            times.append(1000 * (time.perf_counter() - begin))
        medians.append(statistics.median(times[3:]))
    means = torch.tensor(medians, device=device)
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    return means.tolist()


def everywhere(found: T | None, device: torch.device) -> T | None:
    """`found` if no rank has None: only then may one time, and choose, with the others."""
    missing = torch.tensor(found is None, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(missing)
    return None if missing.item() else found


def find_apex_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor] | None:
    """Apex's RMSNorm of x with a weight and epsilon, as `kernels.rms_norm`; None without Apex."""
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine
    except Exception:  # a build for another torch fails with whatever its loader raises
        return None

    def apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Apex wants one type for both; ours rounds once, at the end
        dtype = torch.promote_types(x.dtype, weight.dtype)
        y = fused_rms_norm_affine(x.to(dtype), weight.to(dtype), weight.shape, eps)
        return y.to(x.dtype)

    return apply


def find_apex_adam() -> Callable[..., None] | None:
    """Apex's capturable Adam kernel, applied to lists of tensors; None without a working Apex."""
    try:
        import amp_C  # first: it does not exist beside the other apex
        from apex.multi_tensor_apply import multi_tensor_applier
    except Exception:  # a build for another torch fails with whatever its loader raises
        return None
    if not multi_tensor_applier.available:
        return None
    return partial(multi_tensor_applier, amp_C.multi_tensor_adam_capturable)


def apex_adamw(
    kernel: Callable[..., None],
    tensors: Sequence[list[Tensor]],
    updates: Tensor,
    divisor: Tensor,
    skipped: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """AdamW on float32 `tensors`, the lists (weights, gradients, exp_avg, exp_avg_sq).

    Like torch's fused kernel it divides the gradients by `divisor`, and does nothing where
    `skipped`; `updates` counts this step. Nothing waits for the device.
    """
    weights, gradients, first, second = tensors
    kernel(
        skipped.int(),
        [gradients, weights, first, second],
        torch.full_like(divisor, lr, dtype=torch.float32),
        beta1,
        beta2,
        eps,
        updates.int(),
        1,  # decoupled weight decay
        1,  # bias correction
        weight_decay,
        divisor.reciprocal().float(),
    )
