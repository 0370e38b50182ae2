"""What a log line tells about the steps since the last one."""

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.models.build import Model
from megadiff.optim.optimizer import StepResult
from megadiff.training.setup import Environment


@dataclass(frozen=True)
class Outcome:
    """What became of a step; the same on all ranks."""

    iteration: int
    first_sample: int  # its data are the samples `[first_sample, first_sample + batch_size)`
    batch_size: int
    loss: float
    grad_norm: float
    skipped: bool  # the gradient was not finite and nothing changed
    loss_scale: float


@dataclass
class Interval:
    """The steps since the last log line; what the device knows of them stays there until `read`."""

    outcomes: list[Outcome] = field(default_factory=list)
    learning_rate: float = 0.0  # of the last step
    _unread: list[tuple[Tensor, StepResult, tuple[int, int, int]]] = field(default_factory=list)

    def add(
        self,
        iteration: int,
        first_sample: int,
        batch_size: int,
        loss: Tensor,
        result: StepResult,
        learning_rate: float,
    ) -> None:
        """`loss` is this rank's share of the step's loss."""
        self._unread.append((loss, result, (iteration, first_sample, batch_size)))
        self.learning_rate = learning_rate

    def read(self, env: Environment) -> list[Outcome]:
        """What became of the steps that were not read yet. Waits for the device."""
        if not self._unread:
            return []
        shares, results, steps = zip(*self._unread, strict=True)
        losses = sum_over_data(torch.stack(shares), env)
        numbers = [[r.grad_norm, r.skipped, r.loss_scale] for r in results]
        rows = torch.stack([torch.stack([x.double() for x in row]) for row in numbers])
        new = [
            Outcome(iteration, first, size, loss, norm, bool(skipped), scale)
            for (iteration, first, size), loss, (norm, skipped, scale) in zip(
                steps, losses.tolist(), rows.tolist(), strict=True
            )
        ]
        self._unread.clear()
        self.outcomes += new
        return new

    def summary(self) -> dict[str, Any]:
        """Means over the steps that were read.

        Skipped steps and those whose loss is not a number are counted apart from the mean loss.
        """
        steps, last = self.outcomes, self.outcomes[-1]
        good = [o.loss for o in steps if not o.skipped and math.isfinite(o.loss)]
        return {
            "lm_loss": sum(good) / len(good) if good else math.nan,
            "grad_norm": last.grad_norm,
            "loss_scale": last.loss_scale,
            "learning_rate": self.learning_rate,
            "skipped_iterations": sum(o.skipped for o in steps),
            "nan_iterations": sum(not math.isfinite(o.loss) for o in steps),
        }


def sum_over_data(value: Tensor, env: Environment) -> Tensor:
    """The sum of the shares that data-parallel (and context-parallel) ranks hold, on every rank.

    Other tensor-parallel ranks hold copies of a share, and earlier pipeline stages none.
    """
    counts = env.mesh.tp.rank == 0 and env.mesh.pp.rank == env.mesh.pp.size - 1
    total = value.clone() if counts else torch.zeros_like(value)
    if env.control is not None:
        dist.all_reduce(total)
    return total


def mean_lambdas(model: Model, env: Environment) -> dict[str, float]:
    """The mean lambda of each differential layer in the last forward pass, over all ranks."""
    layers = model.config.num_layers
    sums = torch.zeros(2, layers, dtype=torch.float64, device=env.device)
    for layer, value in model.mean_lambdas().items():
        sums[0, layer], sums[1, layer] = value, 1.0
    if env.control is not None:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    return {str(i): total[i] / count[i] for i in range(layers) if count[i]}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch has allocated on a GPU, the largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train_line(values: dict[str, Any], iteration: int, train_iters: int) -> str:
    """Megatron-LM's log line of an interval, and what else is good to know."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    digits = 1 if values["tflops_per_device"] >= 10 else 4
    line = (
        f" [{now}] iteration {iteration:8d}/{train_iters:8d} |"
        f" consumed samples: {values['consumed_samples']:12d} |"
        f" elapsed time per iteration (ms): {values['iteration_ms']:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {values['tflops_per_device']:.{digits}f} |"
        f" tokens/s/device: {values['tokens_per_second_per_device']:.0f} |"
        f" learning rate: {values['learning_rate']:.6E} |"
        f" global batch size: {values['global_batch_size']:5d} |"
        f" lm loss: {values['lm_loss']:.6E} |"
        f" loss scale: {values['loss_scale']:.1f} |"
        f" grad norm: {values['grad_norm']:.3f} |"
        f" number of skipped iterations: {values['skipped_iterations']:3d} |"
        f" number of nan iterations: {values['nan_iterations']:3d} |"
        f" memory (GB): {values['memory_bytes'] / 1e9:.2f} |"
        f" time left: {timedelta(seconds=round(values['seconds_left']))} |"
    )
    if values["lambda"]:
        line += " lambda: " + " ".join(f"{v:.3f}" for v in values["lambda"].values()) + " |"
    return line


def evaluation_line(name: str, loss: float, iteration: int) -> str:
    """Megatron-LM's line of an evaluation."""
    perplexity = math.exp(min(loss, 20.0))
    return (
        f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {perplexity:.6E} |"
    )


class Clock:
    """Seconds of training alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self._excluded = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here is not training; the steps before it are waited for."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self._excluded += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed = now - self._started - self._excluded
        self._started, self._excluded = now, 0.0
        return elapsed
