"""Embeddings: of the vocabulary, sharded over its rows, and of learned positions, replicated."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.parallel import collectives
from megadiff.parallel.linear import replicated
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import Init, Section, make_parameter


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """`vocab_size` rounded up so that every rank holds the same, well-aligned number of rows."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def vocab_parallel_weight(
    name: str,
    shape: tuple[int, int],
    tp: Axis,
    *,
    divisible_by: int,
    init: Init,
    **factory: Any,
) -> nn.Parameter:
    """This rank's rows of a matrix `[vocab, hidden]`; rows past the vocabulary are zero padding."""
    rows = padded_vocab_size(shape[0], divisible_by, tp.size) // tp.size
    offset = tp.rank * rows
    length = min(max(shape[0] - offset, 0), rows)
    sections = [Section(name, shape, 0, length, offset, "embedding", init)] if length else []
    return make_parameter((rows, shape[1]), sections, **factory)


def vocab_parallel_embedding(tokens: Tensor, weight: Tensor, mesh: ParallelMesh) -> Tensor:
    """Embed `tokens` `[b, s]` with `weight` `[vocab / tp, hidden]`.

    Returns `[b, s, hidden]`, under sequence parallelism `[b, s / tp, hidden]`.
    """
    if mesh.tp.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - mesh.tp.rank * weight.shape[0]
    elsewhere = (local < 0) | (local >= weight.shape[0])
    x = F.embedding(local.masked_fill(elsewhere, 0), weight)
    x = x.masked_fill(elsewhere.unsqueeze(-1), 0)
    if mesh.sequence_parallel:
        return collectives.scatter_sequence(x, mesh.tp)
    return collectives.reduce_from_group(x, mesh.tp)


class PositionEmbedding(nn.Module):
    """Learned positions, `[positions, hidden]`, added to `[b, s, hidden]` or this rank's part."""

    def __init__(
        self, shape: tuple[int, int], mesh: ParallelMesh, name: str, init: Init, **factory: Any
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = replicated(f"{name}.weight", shape, "embedding", init, mesh.tp, **factory)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`positions` `[b, s]` of the whole sequence."""
        weight = self.weight
        if self.mesh.sequence_parallel:
            (weight,) = collectives.sum_gradients(self.mesh.tp, weight)
            positions = positions.chunk(self.mesh.tp.size, dim=1)[self.mesh.tp.rank]
        return x + F.embedding(positions, weight)
