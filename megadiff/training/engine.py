"""What the loop asks of an engine, and the native one.

An engine has two seams: forward and backward of one global batch, and the optimizer's step. How a
global batch runs through micro-batches, pipeline stages or another library is its own matter.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from megadiff.config import Config
from megadiff.data.loader import MicroBatch
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer, StepResult
from megadiff.parallel.parameter import initialize
from megadiff.training.setup import Environment


class Engine(Protocol):
    """This rank's part of the model and of its optimizer."""

    model: Decoder
    optimizer: Optimizer

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Gradients of one global batch, in which all ranks together have `tokens` unmasked tokens.

        Returns this rank's share of the loss, a scalar on the device: the sum of its unmasked token
        losses over `tokens`. The shares of all data-parallel ranks add up to the loss.
        """
        ...

    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        """Clip the gradients and update the weights."""
        ...

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of this rank's unmasked token losses, a float64 scalar on the device."""
        ...


class NativeEngine:
    """megadiff's own model, gradient reduction and optimizer, without pipeline stages."""

    def __init__(self, config: Config, env: Environment) -> None:
        self.device = env.device
        self.model = Decoder(
            config.model,
            env.mesh,
            max_positions=config.training.seq_length,
            dtype=env.dtype,
            device=env.device,
        )
        initialize(self.model, config.training.seed)
        self.optimizer = Optimizer(
            self.model,
            config.optimizer,
            data_parallel_group=env.mesh.dp_cp.group,
            model_parallel_group=env.mesh.model.group,
            tensor_parallel_group=env.mesh.tp.group,
        )

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        self.optimizer.zero_grad(len(batches))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            loss = self._sum_of_losses(batch) / tokens
            self.optimizer.scale_loss(loss).backward()
            total += loss.detach()
        return total

    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        return self.optimizer.step(learning_rate, weight_decay)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            total += self._sum_of_losses(batch)
        return total

    def _sum_of_losses(self, batch: MicroBatch) -> Tensor:
        batch = to_device(batch, self.device)
        losses = self.model(batch.tokens, batch.positions, batch.labels, batch.cu_seqlens)
        return (losses * batch.loss_mask).sum()


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch on `device`; the copies do not wait for it."""
    moved: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        moved[field.name] = None if value is None else value.to(device, non_blocking=True)
    return MicroBatch(**moved)
