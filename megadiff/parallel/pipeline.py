"""Pipeline parallelism: who holds which layers, and torch's schedules over the stages.

Stage i is on pipeline rank i % pp; with virtual stages a rank holds several runs of layers
(arXiv 2104.04473). Every rank of a pipeline reads the same micro-batches, so that tokens,
positions, labels, masks and document boundaries are at hand on every stage and only the hidden
state travels.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from megadiff.parallel.mesh import ParallelMesh

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b"]
_SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}


def balanced_sizes(costs: Sequence[float], stages: int, first: float, last: float) -> list[int]:
    """Cut layers of `costs` into `stages` runs such that the dearest run is as cheap as possible.

    `first` and `last` are what the first and last stage do besides (embedding, output). Among
    equals the earlier stages are smaller: they hold the activations of more micro-batches.
    """
    n = len(costs)
    if n < stages:
        raise ValueError(f"{n} layers are fewer than {stages} stages")
    before = list(accumulate(costs, initial=0.0))

    @cache
    def best(end: int, runs: int) -> tuple[float, int]:
        """The least cost of the dearest of `runs` runs of the layers [0, end), and the last cut."""
        if runs == 1:
            return before[end] + first, 0
        extra = last if runs == stages else 0.0
        return min(
            (max(best(start, runs - 1)[0], before[end] - before[start] + extra), start)
            for start in range(runs - 1, end)
        )

    sizes, end = [], n
    for runs in range(stages, 0, -1):
        start = best(end, runs)[1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


class _Stage(nn.Module):
    """A run of layers as torch's schedules call it: cu_seqlens come as `[1, documents + 1]`."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(
        self, x: Tensor, positions: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        cu_seqlens = None if cu_seqlens is None else cu_seqlens[0]
        return self.chunk(x, positions, labels, cu_seqlens)


def sum_of_losses(losses: Tensor, mask: Tensor) -> Tensor:
    """The sum of the token losses `[b, s]` that `mask` `[b, s]` counts."""
    return (losses * mask).sum()


class Pipeline:
    """The stages of this rank under one schedule.

    `chunks` are this rank's runs of layers, in order; each takes `(x, positions, labels,
    cu_seqlens)` and returns the hidden state, the last one the loss of every token. The hidden
    state between stages is `[b, s, hidden_size]` of `dtype` (`[b, s / tp, hidden_size]` under
    sequence parallelism), s being this rank's part of the sequence.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: ParallelMesh,
        schedule: ScheduleName,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stages = [_Stage(chunk) for chunk in chunks]
        self.mesh, self.name = mesh, schedule
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self._shape: tuple[int, ...] = ()
        self._schedule: Any = None
        self._factor: Tensor | float | None = None
        self._sums: list[Tensor] = []

    def run(
        self, inputs: dict[str, Tensor], micro_batches: int, factor: Tensor | float | None
    ) -> Tensor:
        """Gradients of `factor` times the sum of unmasked token losses of all micro-batches.

        `inputs`: tokens, positions, labels and loss_mask `[n * b, s]` of n micro-batches, and
        cu_seqlens `[n, documents + 1]` if there are documents. Returns the sum without the factor,
        float64; 0 on stages before the last. Without a `factor` there are no gradients.
        """
        tokens = inputs["tokens"]
        shape = (micro_batches, *tokens.shape)
        if shape != self._shape:  # a schedule holds receive buffers of one shape
            self._shape, self._schedule = shape, None
            self._schedule = self._make_schedule(micro_batches, tokens)
        kwargs = {k: v for k, v in inputs.items() if k not in ("tokens", "loss_mask")}
        args = (tokens,) if self.mesh.pp.rank == 0 else ()
        self._factor, self._sums = factor, []
        step = self._schedule.eval if factor is None else self._schedule.step
        step(*args, target=inputs["loss_mask"], return_outputs=False, **kwargs)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([zero, *self._sums]).sum(dtype=torch.float64)

    def _loss(self, losses: Tensor, mask: Tensor) -> Tensor:
        total = sum_of_losses(losses, mask)
        self._sums.append(total.detach())
        return total if self._factor is None else total * self._factor

    def _make_schedule(self, micro_batches: int, tokens: Tensor) -> Any:
        batch, length = tokens.shape[0] // micro_batches, tokens.shape[1]
        part = length // (self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        count = self.mesh.pp.size * len(self.stages)

        def example(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(
                shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point
            )

        hidden = example((batch, part, self.hidden_size), self.dtype)
        losses = example((batch, length), torch.promote_types(self.dtype, torch.float32))
        stages = []
        for index, stage in enumerate(self.stages):
            number = index * self.mesh.pp.size + self.mesh.pp.rank
            first, last = number == 0, number == count - 1
            stages.append(
                PipelineStage(
                    stage,
                    number,
                    count,
                    self.device,
                    input_args=(example((batch, length), torch.int64) if first else hidden,),
                    output_args=(losses if last else hidden,),
                    group=self.mesh.pp.group,
                )
            )
        held = stages if self.name == "interleaved_1f1b" else stages[0]
        schedule = _SCHEDULES[self.name]
        return schedule(held, micro_batches, loss_fn=self._loss, scale_grads=False)
