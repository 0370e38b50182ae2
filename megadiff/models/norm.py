"""The norms of the blocks, on whole sequences or on their shards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import add_rms_norm, layer_norm
from megadiff.kernels.reference import wide
from megadiff.parallel.apex import everywhere, find_apex_rms_norm, milliseconds
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.linear import replicated
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init
from megadiff.parallel.recompute import forget


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, computed in at least float32.

    It forms the residual sum that it normalises, and returns both, so that neither the sum nor the
    sum of its two gradients needs a pass over memory of its own.

    `recompute`: the projections behind it compute its result again in backward.
    The weight itself is at least float32 too: it is small, and small updates would be lost below.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, name: str, **factory: Any) -> None:
        super().__init__()
        self.epsilon, self.mesh, self.recompute = config.norm_epsilon, mesh, False
        self.layer_norm = config.normalization == "LayerNorm"
        self.add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm  # or Apex's
        factory["dtype"] = wide(factory["dtype"])
        shape, ones = (config.hidden_size,), Init(mean=1.0)
        self.weight = replicated(f"{name}.weight", shape, "vector", ones, mesh.tp, **factory)
        self.bias = None
        if self.layer_norm:
            self.bias = replicated(f"{name}.bias", shape, "vector", Init(), mesh.tp, **factory)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + y, norm(x + y)); without y (x, norm(x))."""
        parameters: Sequence[Tensor] = [p for p in (self.weight, self.bias) if p is not None]
        if self.mesh.sequence_parallel:  # each rank sees only its part of the sequence
            parameters = sum_gradients(self.mesh.tp, *parameters)
        x, normed = self._add_norm(x, y, *parameters)
        if self.recompute:
            forget(normed, lambda x, *p: self._add_norm(x, None, *p)[1], x, *parameters)
        return x, normed

    def _add_norm(self, x: Tensor, y: Tensor | None, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        if not self.layer_norm:
            return self.add_rms_norm(x, y, *parameters, self.epsilon)
        x = x if y is None else x + y
        return x, layer_norm(x, *parameters, eps=self.epsilon)


def choose_rms_norm(model: nn.Module, tokens: int, dtype: torch.dtype) -> str:
    """Give the RMSNorms of `model` NVIDIA Apex's kernel where it is installed and faster.

    Forward and backward are timed on `[tokens, hidden]`, with the residual sum. Says what was
    chosen; "" without Apex.
    """
    norms = [m for m in model.modules() if isinstance(m, Norm) and not m.layer_norm]
    if not norms:
        return ""
    kernel = everywhere(find_apex_rms_norm(), norms[0].weight.device)
    if kernel is None:
        return ""
    weight, epsilon = norms[0].weight.detach().requires_grad_(), norms[0].epsilon
    grad = torch.randn(tokens, len(weight), dtype=dtype, device=weight.device)
    x, y = grad.clone().requires_grad_(), grad.clone().requires_grad_()

    def apex(x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        x = x if y is None else x + y
        return x, kernel(x, weight, epsilon)

    def run(norm: Callable[..., tuple[Tensor, Tensor]]) -> None:
        torch.autograd.grad(norm(x, y, weight, epsilon), (x, y, weight), (grad, grad))

    times = milliseconds([lambda: run(apex), lambda: run(add_rms_norm)], weight.device)
    faster = times[0] < times[1]
    for norm in norms:
        norm.add_rms_norm = apex if faster else add_rms_norm
    return (
        f"RMSNorm: {'NVIDIA Apex' if faster else 'megadiff'}'s kernel; {tokens} x {len(weight)} "
        f"take Apex {times[0]:.3f} ms and megadiff {times[1]:.3f} ms"
    )
