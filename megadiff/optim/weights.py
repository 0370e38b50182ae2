"""Where the weights that the update rule sees come from, and how they return to the parameters.

An update of 1e-4 of a weight vanishes in bfloat16's 8 bits. Usually float32 main weights keep it; a
pure bfloat16 run keeps 2 bytes of compensation instead, or none and rounds at random.
"""

import hashlib
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["float32", "kahan", "stochastic"]


class MainWeights:
    """Parameters that are wide enough themselves: float32 and float64."""

    mode: Mode | None = None  # of those that `kernels.adamw_triton` updates
    behind: Tensor | None = None  # what it reads and writes beside the parameters

    def __init__(self, parameters: Tensor) -> None:
        self.parameters = parameters  # this rank's flat range, in the dtype of the model

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside the parameters."""
        return {}

    def load(self) -> Tensor:
        """The weights to update in place, in at least float32."""
        return self.parameters

    def store(self, updated: Tensor, step: int) -> None:
        """Bring updated weights, as `load` gave them, into the parameters."""

    def restore(self) -> None:
        """Bring the parameters up to date after `state` was loaded."""

    def reset(self) -> None:
        """Take the parameters as they are, after they were set from elsewhere."""


class Float32Weights(MainWeights):
    """A float32 copy of parameters of a lower precision."""

    mode = "float32"

    def __init__(self, parameters: Tensor) -> None:
        super().__init__(parameters)
        self.behind = self._main = parameters.float()

    def state(self) -> dict[str, Tensor]:
        return {"main_weight": self._main}

    def load(self) -> Tensor:
        return self._main

    def store(self, updated: Tensor, step: int) -> None:
        self.restore()

    def restore(self) -> None:
        self.parameters.copy_(self._main)

    def reset(self) -> None:
        self._main.copy_(self.parameters)


class KahanWeights(MainWeights):
    """Parameters and what rounding them lost, each in bfloat16: together 16 bits of mantissa."""

    mode = "kahan"

    def __init__(self, parameters: Tensor) -> None:
        super().__init__(parameters)
        self.behind = self._lost = torch.zeros_like(parameters)

    def state(self) -> dict[str, Tensor]:
        return {"compensation": self._lost}

    def load(self) -> Tensor:
        return self.parameters.float().add_(self._lost)

    def store(self, updated: Tensor, step: int) -> None:
        self.parameters.copy_(updated)
        self._lost.copy_(updated.sub_(self.parameters))

    def reset(self) -> None:
        self._lost.zero_()


class StochasticWeights(MainWeights):
    """Bfloat16 parameters alone, rounded up or down at random so that the mean is exact.

    The random bits depend on `name` and the step only: ranks that hold copies of a parameter round
    it alike.
    """

    mode = "stochastic"

    def __init__(self, parameters: Tensor, name: str) -> None:
        super().__init__(parameters)
        self._name = name

    def load(self) -> Tensor:
        return self.parameters.float()

    def store(self, updated: Tensor, step: int) -> None:
        generator = torch.Generator(updated.device).manual_seed(random_seed(self._name, step))
        round_stochastically(updated, generator, out=self.parameters)


def random_seed(name: str, step: int) -> int:
    """31 bits that depend on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:4], "little") >> 1


def round_stochastically(x: Tensor, generator: torch.Generator, out: Tensor) -> None:
    """Finite float32 `x` to bfloat16 `out`, to either neighbour with a probability by its nearness.

    Bfloat16 is the upper half of float32: random lower bits carry into it as often as they should.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(noise.view(torch.float32))


def make_main_weights(parameters: Tensor, mode: Mode, name: str) -> MainWeights:
    """What `mode` asks for; it concerns bfloat16 only, float16 always has float32 main weights."""
    if parameters.dtype.itemsize >= 4:
        return MainWeights(parameters)
    if parameters.dtype == torch.bfloat16 and mode == "kahan":
        return KahanWeights(parameters)
    if parameters.dtype == torch.bfloat16 and mode == "stochastic":
        return StochasticWeights(parameters, name)
    return Float32Weights(parameters)
