"""A small model with parameter records, split over tensor-parallel ranks by hand."""

import torch
from torch import Tensor, nn

from megadiff.parallel.parameter import Init, Section, initialize, make_parameter


class Toy(nn.Module):
    """x -> tanh(x w1) w2 * scale + lambda, with a fused first weight and odd sizes."""

    def __init__(self, dtype: torch.dtype, width: int = 6, hidden: int = 10, seed: int = 0) -> None:
        super().__init__()
        normal = Init(0.5)
        self.first = make_parameter(
            (hidden, width),
            [
                Section("first.a.weight", (4, width), 0, 4, 0, "matrix", normal),
                Section("first.b.weight", (hidden - 4, width), 4, hidden - 4, 0, "lambda", normal),
            ],
            dtype=dtype,
            device="cpu",
        )
        self.second = self._plain("second.weight", (3, hidden), "matrix", normal, dtype)
        self.scale = self._plain("scale", (3,), "vector", Init(0.0, 1.0), dtype)
        self.lam = self._plain("lambda", (1,), "lambda", Init(0.1), dtype)
        self.unused = self._plain("unused", (5,), "vector", normal, dtype)
        initialize(self, seed)

    @staticmethod
    def _plain(name, shape, group, init, dtype) -> nn.Parameter:
        section = Section(name, shape, 0, shape[0], 0, group, init)
        return make_parameter(shape, [section], dtype=dtype, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.first.T) @ self.second.T) * self.scale + self.lam


def batch(step: int, dtype: torch.dtype, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)
