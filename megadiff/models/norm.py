"""The norms of the blocks, on whole sequences or on their shards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import layer_norm, rms_norm
from megadiff.parallel.apex import find_apex_rms_norm, milliseconds
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.linear import replicated
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init, make_parameter


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, computed in at least float32.

    The weight itself is at least float32 too: it is small, and small updates would be lost below.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.epsilon, self.mesh = config.norm_epsilon, mesh
        self.layer_norm = config.normalization == "LayerNorm"
        self.rms_norm: Callable[..., Tensor] = rms_norm  # or Apex's
        wide = torch.promote_types(dtype, torch.float32)
        shape = (config.hidden_size,)
        section = replicated(f"{name}.weight", shape, "vector", Init(mean=1.0), mesh.tp)
        self.weight = make_parameter(shape, [section], dtype=wide, device=device)
        self.bias = None
        if self.layer_norm:
            section = replicated(f"{name}.bias", shape, "vector", Init(), mesh.tp)
            self.bias = make_parameter(shape, [section], dtype=wide, device=device)

    def forward(self, x: Tensor) -> Tensor:
        parameters: Sequence[Tensor] = (
            [self.weight] if self.bias is None else [self.weight, self.bias]
        )
        if self.mesh.sequence_parallel:  # each rank sees only its part of the sequence
            parameters = sum_gradients(self.mesh.tp, *parameters)
        if self.layer_norm:
            return layer_norm(x, parameters[0], parameters[1], self.epsilon)
        return self.rms_norm(x, parameters[0], self.epsilon)


def choose_rms_norm(model: nn.Module, tokens: int, dtype: torch.dtype) -> str:
    """Give the RMSNorms of `model` NVIDIA Apex's kernel where it is installed and faster.

    Forward and backward are timed on `[tokens, hidden]`. Says what was chosen; "" without Apex.
    """
    norms = [m for m in model.modules() if isinstance(m, Norm) and not m.layer_norm]
    kernel = find_apex_rms_norm()
    if kernel is None or not norms:
        return ""
    weight, epsilon = norms[0].weight.detach().requires_grad_(), norms[0].epsilon
    grad = torch.randn(tokens, len(weight), dtype=dtype, device=weight.device)
    x = grad.clone().requires_grad_()

    def run(norm: Callable[..., Tensor]) -> None:
        torch.autograd.grad(norm(x, weight, epsilon), (x, weight), grad)

    times = milliseconds([lambda: run(kernel), lambda: run(rms_norm)], weight.device)
    faster = times[0] < times[1]
    for norm in norms:
        norm.rms_norm = kernel if faster else rms_norm
    return (
        f"RMSNorm: {'NVIDIA Apex' if faster else 'megadiff'}'s kernel; {tokens} x {len(weight)} "
        f"take Apex {times[0]:.3f} ms and megadiff {times[1]:.3f} ms"
    )
