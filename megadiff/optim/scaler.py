"""Loss scaling for float16, kept on the device so that no step waits for it."""

import torch
from torch import Tensor

from megadiff.config import OptimizerConfig


class LossScaler:
    """Megatron-LM's dynamic loss scale, or a constant one where `loss_scale` is set.

    After `hysteresis` overflows the scale is halved, down to `min_loss_scale`, and by every further
    one; `loss_scale_window` steps in a row without overflow double it and restore the hysteresis.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self._config = config
        self.dynamic = config.loss_scale is None
        initial = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._tolerance = torch.full((), config.hysteresis, dtype=torch.int64, device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step; `overflow` is a bool scalar, the same on every rank."""
        if not self.dynamic:
            return
        config = self._config
        good = torch.where(overflow, 0, self._good_steps + 1)
        tolerance = self._tolerance - overflow.long()
        backoff = overflow & (tolerance <= 0)
        grow = good == config.loss_scale_window
        halved = (self.scale * 0.5).clamp(min=config.min_loss_scale)
        self.scale.copy_(
            torch.where(backoff, halved, torch.where(grow, self.scale * 2, self.scale))
        )
        self._good_steps.copy_(torch.where(grow, 0, good))
        self._tolerance.copy_(torch.where(grow, config.hysteresis, tolerance))

    def state(self) -> dict[str, float]:
        """For a checkpoint; waits for the device."""
        return {
            "loss_scale": self.scale.item(),
            "good_steps": self._good_steps.item(),
            "tolerance": self._tolerance.item(),
        }

    def load(self, state: dict[str, float]) -> None:
        """A constant scale stays what the configuration says."""
        if self.dynamic:
            self.scale.fill_(state["loss_scale"])
            self._good_steps.fill_(int(state["good_steps"]))
            self._tolerance.fill_(int(state["tolerance"]))
