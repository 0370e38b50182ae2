"""Forward and backward of one global batch, whatever the split.

The loss is a mean over tokens: the sum of token losses over the number of unmasked tokens of the
whole global batch, which is counted before the first forward. Gradients are left as this rank's
share of that mean's gradient; the optimizer sums them over the ranks of `dp_cp`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.parallel.context import context_shard
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.pipeline import Pipeline, ScheduleName


class MicroBatch(Protocol):
    """Whole sequences of one micro-batch, on the device; see `megadiff.data.loader.MicroBatch`."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


class ForwardBackward:
    """Runs this rank's model (`chunks`, one without a pipeline) on the micro-batches of a step.

    All ranks of a data-parallel replica (its tensor, context and pipeline ranks) pass the same
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
        device: torch.device | str,
    ) -> None:
        self.chunks, self.mesh = list(chunks), mesh
        self.pipeline = None
        if mesh.pp.size > 1:
            self.pipeline = Pipeline(
                chunks,
                mesh,
                schedule,
                hidden_size=hidden_size,
                dtype=dtype,
                device=torch.device(device),
            )
        self.loss_dtype = torch.promote_types(dtype, torch.float32)

    def train(
        self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor | float = 1.0
    ) -> Tensor:
        """Add the gradients of `loss_scale` times the loss; returns the loss of the global batch.

        The loss, a float64 scalar on the device, is the same on every rank, and unscaled.
        """
        count = self.count_tokens(micro_batches)
        scale = loss_scale / count.clamp(min=1)
        total = self._run(micro_batches, scale.to(self.loss_dtype), backward=True)
        return self._sum_over_ranks(total) / loss_scale

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """The sum of token losses and the number of tokens of the global batch, float64 scalars.

        The same on every rank. No gradients; the chunks should be in evaluation mode.
        """
        one = torch.ones((), dtype=self.loss_dtype, device=micro_batches[0].tokens.device)
        total = self._run(micro_batches, one, backward=False)
        return self._sum_over_ranks(total), self.count_tokens(micro_batches)

    def count_tokens(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Unmasked tokens of the whole global batch, a float64 scalar, the same on every rank."""
        counts = [batch.loss_mask.sum(dtype=torch.float64) for batch in micro_batches]
        count = torch.stack(counts).sum()
        if self.mesh.dp.size > 1:
            dist.all_reduce(count, group=self.mesh.dp.group)
        return count

    def _run(self, micro_batches: Sequence[MicroBatch], weight: Tensor, backward: bool) -> Tensor:
        """This rank's share of the sum of `weight` times all unmasked token losses."""
        if self.pipeline is not None:
            losses = self._run_pipeline(self.pipeline, micro_batches, weight, backward)
        else:
            losses = [self._run_one(batch, weight, backward) for batch in micro_batches]
        if not losses:  # not the last stage
            return torch.zeros((), dtype=torch.float64, device=weight.device)
        return torch.stack(losses).sum(dtype=torch.float64)

    def _run_one(self, batch: MicroBatch, weight: Tensor, backward: bool) -> Tensor:
        cp = self.mesh.cp
        x, positions, labels, mask = (
            context_shard(t, cp)
            for t in (batch.tokens, batch.positions, batch.labels, batch.loss_mask)
        )
        with torch.set_grad_enabled(backward):
            losses = self.chunks[0](x, positions, labels, batch.cu_seqlens)
            loss = (losses * (mask.to(weight.dtype) * weight)).sum()
        if backward:
            loss.backward()
        return loss.detach()

    def _run_pipeline(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        weight: Tensor,
        backward: bool,
    ) -> list[Tensor]:
        def whole(name: str) -> Tensor:
            parts = torch.cat([getattr(batch, name) for batch in micro_batches])
            return context_shard(parts, self.mesh.cp)

        inputs = {name: whole(name) for name in ("tokens", "positions", "labels")}
        documents = [b.cu_seqlens for b in micro_batches if b.cu_seqlens is not None]
        if documents:
            inputs["cu_seqlens"] = torch.stack(documents)
        weights = whole("loss_mask").to(weight.dtype) * weight
        return pipeline.run(inputs, weights, len(micro_batches), backward=backward)

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        for axis in (self.mesh.dp_cp, self.mesh.pp):
            if axis.size > 1:
                dist.all_reduce(total, group=axis.group)
        return total
