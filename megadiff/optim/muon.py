"""Muon for matrices: momentum, orthogonalised by a Newton-Schulz iteration.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), with the update's
size matched to AdamW's (arXiv 2502.16982, section 2.2), so that both share a learning rate. The
momentum lies in flat ranges like every other state; whole matrices exist only within a step, each
on the one rank that orthogonalises it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.config import OptimizerConfig
from megadiff.optim.matrices import WholeMatrices
from megadiff.optim.shards import Range
from megadiff.parallel.parameter import Section

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, from the source above


def is_muon_matrix(section: Section) -> bool:
    """Two-dimensional matrices, but neither embeddings nor convolutions nor vectors."""
    return section.group == "matrix" and len(section.shape) == 2


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """About U V^T of x = U S V^T, for matrices `[..., rows, columns]`, in the dtype of `x`.

    With the usual 5 steps singular values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y


def muon_step(
    ranges: Sequence[Range],
    matrices: WholeMatrices,
    config: OptimizerConfig,
    lr: float,
    weight_decay: float,
    divisor: Tensor,
    skipped: Tensor,
) -> None:
    """Update `ranges` with `gradient / divisor` unless `skipped`; overwrites the gradients.

    All ranks of `matrices` call it, also those that own no range.
    """
    momentum = config.muon_momentum
    for r in ranges:
        r.gradient.div_(divisor).masked_fill_(skipped, 0.0)
        applied = (~skipped).to(r.weights.dtype)
        r.state["momentum_buffer"].lerp_(r.gradient, applied * (1.0 - momentum))
        r.gradient.lerp_(r.state["momentum_buffer"], momentum)
    updates = _orthogonalize_all(matrices.gather(), config.muon_num_ns_steps)
    for matrix, gradient, update in matrices.scatter(updates):
        size = config.muon_extra_scale_factor * math.sqrt(max(matrix.shape))
        gradient.copy_(update).mul_(size)
    for r in ranges:
        rate = (~skipped).to(r.weights.dtype) * lr
        r.weights.mul_(1.0 - rate * weight_decay).sub_(r.gradient.mul_(rate))


def _orthogonalize_all(matrices: list[Tensor], steps: int) -> list[Tensor]:
    """Matrices of one shape together, in batched products."""
    updates: dict[int, Tensor] = {}
    for shape in dict.fromkeys(m.shape for m in matrices):
        indices = [i for i, m in enumerate(matrices) if m.shape == shape]
        batch = orthogonalize(torch.stack([matrices[i] for i in indices]), steps)
        updates |= zip(indices, batch.unbind(), strict=True)
    return [updates[i] for i in range(len(matrices))]
