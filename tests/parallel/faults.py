"""Faults that a split could have, to show that the parity tests see them.

Each patches this process; it is a worker of one test, so nothing is put back.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megadiff.models import attention, build, delta_net, norm
from megadiff.parallel import context, forward_backward, head_exchange, linear, pipeline
from megadiff.parallel.parameter import record_of, set_record
from megadiff.training import engine, loop


def lambda_gradients_are_not_summed() -> None:
    """V1's lambda vectors and subln keep this rank's share of their gradients."""
    attention.sum_gradients = lambda axis, *tensors: tensors


def delta_norm_gradients_are_not_summed() -> None:
    """A delta layer's norm of heads keeps this rank's share of its gradient."""
    delta_net.sum_gradients = lambda axis, *tensors: tensors


def norm_gradients_are_not_summed() -> None:
    """Under sequence parallelism, block norms keep this rank's share of their gradients."""
    norm.sum_gradients = lambda axis, *tensors: tensors


def copied_key_gradients_are_not_summed() -> None:
    """Ranks that share a key/value group update their copies apart."""
    linear._SumRowGradients.apply = staticmethod(lambda weight, *_: weight)


def replicated_weights_count_twice() -> None:
    """Every copy counts in the gradient norm."""
    original = engine.build_model

    def build_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        for parameter in model.parameters():
            record = record_of(parameter)
            sections = tuple(replace(s, copy_index=0) for s in record.sections)
            set_record(parameter, replace(record, sections=sections))
        return model

    engine.build_model = build_model


def pairs_are_halves() -> None:
    """Head i is paired with head i + h of the same rank, not with its neighbour."""
    operator = attention.diff_attention

    def by_halves(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        half = q.shape[-2] // 2
        order = torch.arange(2 * half).view(2, half).T.flatten()
        return operator(q[..., order, :], *args, **kwargs)

    attention.diff_attention = by_halves


def loss_is_scaled_by_local_tokens() -> None:
    """Each data rank divides by its own number of tokens."""

    forward_backward = engine.NativeEngine.forward_backward

    def local(self: Any, batches: Any, tokens: int) -> Tensor:
        return forward_backward(self, batches, 2 * loop.unmasked(batches))

    engine.NativeEngine.forward_backward = local


def a_stage_drops_the_documents() -> None:
    """The second pipeline stage lets documents attend to each other."""
    forward = pipeline._Stage.forward

    def without(self: Any, x: Tensor, positions: Tensor, labels: Tensor, cu_seqlens: Any = None):
        if not self.chunk.stage.first:
            cu_seqlens = None
        return forward(self, x, positions, labels, cu_seqlens)

    pipeline._Stage.forward = without


def stages_count_layers_from_zero() -> None:
    """lambda_init follows the place in the stage instead of the global layer."""
    original = attention.lambda_init_of_layer
    attention.lambda_init_of_layer = lambda layer: original(layer % 2)


def tied_gradients_are_not_summed() -> None:
    """First and last stage update their copies of the embedding apart."""
    build.Model.tied_parameters = lambda self: []


def tied_copies_count_twice() -> None:
    """Both holders of the tied embedding count in the gradient norm."""
    build.as_copy = lambda record: record


def context_chunks_in_rank_order() -> None:
    """Gathered keys stay in the order of the ranks."""
    context.natural_order = lambda x, cp: x


def exchanged_sequences_in_rank_order() -> None:
    """Delta layers run over the gathered sequence in the order of the ranks."""
    head_exchange.natural_order = lambda x, cp: x


def context_positions_are_local() -> None:
    """Each context rank counts positions from zero."""
    original = forward_backward.context_shard

    def shard(x: Tensor, cp: Any) -> Tensor:
        part = original(x, cp)
        if x.dtype == torch.int64 and torch.equal(x[0], torch.arange(x.shape[1])):
            return torch.arange(part.shape[1]).expand_as(part)
        return part

    forward_backward.context_shard = shard


def inject(fault: str) -> None:
    """Break this process by the fault of that name."""
    globals()[fault]()
