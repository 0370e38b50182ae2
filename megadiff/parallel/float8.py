"""Projections in float8 on Hopper, by torchao: https://github.com/pytorch/ao (torchao.float8).

Each tensor is scaled so that its largest value is the largest of its type, anew at every use:
inputs and weights in e4m3, gradients in e5m2 (arXiv 2209.05433). Products add up in float32 and
return the type of the model. A tensor-parallel rank scales its own shard of a weight.

Imported only when used: torchao is an optional dependency.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8.float8_training_tensor import (
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import tensor_to_scale

from megadiff.parallel.linear import ColumnParallelLinear, Products, RowParallelLinear

_ALIGNMENT = 16  # of every size of a float8 product


def use_float8(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Compute the linear layers of `model` in float8 from now on; their names in the model.

    `emulate` rounds alike and multiplies in float32, on any device. Raises ValueError where a layer
    can not be computed in float8.
    """
    names = []
    products = Float8Products(emulate)
    for name, layer in model.named_modules():
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            continue
        rows, columns = layer.weight.shape
        if rows % _ALIGNMENT or columns % _ALIGNMENT:
            raise ValueError(
                f"{name} can not be computed in float8: this rank's part of its weight is "
                f"{rows} x {columns}, and both must be multiples of {_ALIGNMENT}"
            )
        layer.products = products
        names.append(name)
    return names


class Float8Products(Products):
    """Products of float8 tensors; each takes the scales that `scale` gave for its operands."""

    scaled = True

    def __init__(self, emulate: bool = False) -> None:
        output, gradient = ScaledMMConfig(emulate, True), ScaledMMConfig(emulate, False)
        config = LinearMMConfig(output, gradient, gradient)

        def compiled(function: Any) -> Any:  # fuses scaling, rounding and transposition
            return function if emulate else torch.compile(function, dynamic=True, fullgraph=True)

        def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype, role: GemmInputRole) -> Tensor:
            return hp_tensor_and_scale_to_float8(x, scale, dtype, config, role)

        def forward(x: Tensor, scale: Tensor, role: GemmInputRole) -> Tensor:
            return rounded(x, scale, torch.float8_e4m3fn, role)

        def backward(grad: Tensor, scale: Tensor) -> Tensor:
            return rounded(grad, scale, torch.float8_e5m2, GemmInputRole.GRAD_OUTPUT)

        # A function for each product: its compiled variants are counted for each.
        def output_of(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
            x = forward(x, x_scale, GemmInputRole.INPUT)
            return x @ forward(weight.T, w_scale, GemmInputRole.WEIGHT)

        def grad_input(grad: Tensor, weight: Tensor, g_scale: Tensor, w_scale: Tensor) -> Tensor:
            return backward(grad, g_scale) @ forward(weight, w_scale, GemmInputRole.WEIGHT)

        def grad_weight(grad: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor) -> Tensor:
            return backward(grad.T, g_scale) @ forward(x, x_scale, GemmInputRole.INPUT)

        self._scale = compiled(tensor_to_scale)
        self._output = compiled(output_of)
        self._grad_input, self._grad_weight = compiled(grad_input), compiled(grad_weight)

    def scale(self, x: Tensor, *, gradient: bool = False) -> Tensor:
        # detached, a parameter is a tensor like any other and needs no compiled variant of its own
        return self._scale(x.detach(), torch.float8_e5m2 if gradient else torch.float8_e4m3fn)

    def output(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *scales: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = self._output(x.flatten(0, -2), weight, *scales).unflatten(0, x.shape[:-1])
        if out is not None:
            return out.copy_(y)
        return y if bias is None else y + bias

    def grad_input(
        self, grad: Tensor, weight: Tensor, *scales: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        y = self._grad_input(grad.flatten(0, -2), weight, *scales).unflatten(0, grad.shape[:-1])
        return y if out is None else out.copy_(y)

    def grad_weight(self, grad: Tensor, x: Tensor, *scales: Tensor | None) -> Tensor:
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        if len(x) % _ALIGNMENT:
            raise ValueError(
                f"{len(x)} tokens in a micro-batch: float8 needs a multiple of {_ALIGNMENT}"
            )
        return self._grad_weight(grad, x, *scales)
