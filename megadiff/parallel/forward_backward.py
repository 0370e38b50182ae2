"""Forward and backward of one global batch through this rank's part of the model, on any split."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megadiff.parallel.context import context_shard
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.pipeline import Pipeline, ScheduleName, sum_of_losses


class MicroBatch(Protocol):
    """Whole sequences of one micro-batch, on the device; see `megadiff.data.loader.MicroBatch`."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


class ForwardBackward:
    """Runs `chunks`, this rank's runs of layers (one without virtual stages), on micro-batches.

    All ranks of one data-parallel replica (its tensor, context and pipeline ranks) pass the same
    micro-batches. A chunk takes `(x, positions, labels, cu_seqlens)` as `models.Decoder` does.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: ParallelMesh,
        *,
        schedule: ScheduleName = "1f1b",
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.chunks, self.mesh = list(chunks), mesh
        self.pipeline = None
        if mesh.pp.size > 1:
            self.pipeline = Pipeline(
                chunks, mesh, schedule, hidden_size=hidden_size, dtype=dtype, device=device
            )

    def train(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Add the gradients of `factor` times the sum of this rank's unmasked token losses.

        Returns that sum without the factor, a float64 scalar on the device. It is 0 on pipeline
        stages before the last; sums of data and context ranks add up to that of the global batch.
        """
        if self.pipeline is not None:
            return self.pipeline.run(self._inputs(batches), len(batches), factor)
        sums = []
        for batch in batches:
            total = self._sum_of_losses(batch)
            (total * factor).backward()
            sums.append(total.detach())
        return torch.stack(sums).sum(dtype=torch.float64)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of this rank's unmasked token losses, as `train` returns it."""
        if self.pipeline is not None:
            return self.pipeline.run(self._inputs(batches), len(batches), None)
        return torch.stack([self._sum_of_losses(b) for b in batches]).sum(dtype=torch.float64)

    def _sum_of_losses(self, batch: MicroBatch) -> Tensor:
        x, positions, labels, mask = (
            context_shard(whole, self.mesh.cp)
            for whole in (batch.tokens, batch.positions, batch.labels, batch.loss_mask)
        )
        return sum_of_losses(self.chunks[0](x, positions, labels, batch.cu_seqlens), mask)

    def _inputs(self, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """All micro-batches together: torch's schedules cut them apart again."""
        inputs = {}
        for name in ("tokens", "positions", "labels", "loss_mask"):
            whole = torch.cat([getattr(batch, name) for batch in batches])
            inputs[name] = context_shard(whole, self.mesh.cp)
        documents = [b.cu_seqlens for b in batches if b.cu_seqlens is not None]
        if documents:
            inputs["cu_seqlens"] = torch.stack(documents)
        return inputs
