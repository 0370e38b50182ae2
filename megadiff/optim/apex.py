"""NVIDIA Apex's fused Adam, where it is installed: https://github.com/NVIDIA/apex.

It is told by its compiled extension: the package that registries call `apex` is another one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def find_apex_adam() -> Callable[..., None] | None:
    """Apex's capturable Adam kernel, applied to lists of tensors; None without a working Apex."""
    try:
        import amp_C  # first: it does not exist beside the other apex
        from apex.multi_tensor_apply import multi_tensor_applier
    except Exception:  # a build for another torch fails with whatever its loader raises
        return None
    if not multi_tensor_applier.available:
        return None
    kernel = amp_C.multi_tensor_adam_capturable

    def apply(*arguments: Any) -> None:
        multi_tensor_applier(kernel, *arguments)

    return apply


def apex_adamw(
    kernel: Callable[..., None],
    tensors: Sequence[list[Tensor]],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    updates: Tensor,
    divisor: Tensor,
    skipped: Tensor,
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
