"""Whole matrices for optimizers that need them: who gets which, and how the pieces travel.

A matrix is cut into blocks over tensor-parallel ranks, and the sharded optimizer cuts a block into
flat pieces over data-parallel ranks. Each matrix is assigned to one rank of the data x tensor grid.
`gather` brings it there by an all-to-all over each of the two groups, and `scatter` brings the
result back to everyone who holds a piece.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.optim.buckets import Buckets
from megadiff.optim.shards import Range, Shard, flat_sections
from megadiff.parallel.mesh import gather_objects
from megadiff.parallel.parameter import Section, record_of


@dataclass
class Matrix:
    """One global matrix, and this rank's part of it."""

    section: Section
    dim: int  # along which tensor-parallel ranks cut it
    block: torch.Size  # shape of this rank's block
    held: list[tuple[int, int]]  # [begin, end) of the flat block, by data-parallel rank
    range: Range | None  # where this rank's piece lies, and from which element
    at: int
    owner: tuple[int, int] = (0, 0)  # data- and tensor-parallel rank that gets the whole
    offsets: Sequence[int] = ()  # of the blocks along dim, by tensor-parallel rank

    @property
    def shape(self) -> tuple[int, ...]:
        return self.section.shape

    def held_size(self, data_rank: int) -> int:
        begin, end = self.held[data_rank]
        return end - begin

    def place(self, whole: Tensor, tensor_rank: int) -> Tensor:
        """The view of `whole` that is the block of `tensor_rank`."""
        return whole.narrow(self.dim, self.offsets[tensor_rank], self.block[self.dim])


class WholeMatrices:
    """The matrices that `select` picks among the sections in `shards`.

    They travel and are computed with in bfloat16, or in float64 where the model is.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        buckets: Buckets,
        tensor_group: dist.ProcessGroup | None,
        select: Callable[[Section], bool],
    ) -> None:
        self._sharded = buckets.sharded
        wide = any(shard.dtype == torch.float64 for shard in shards)
        self._empty = torch.empty(
            0,
            dtype=torch.float64 if wide else torch.bfloat16,
            device=shards[0].bucket.parameters.device,
        )
        self._data = _Ranks(buckets.group, self._empty)
        self._tensor = _Ranks(tensor_group, self._empty)
        self._matrices = [m for shard in shards for m in _matrices(shard, self._data.size, select)]
        self._exchange_offsets()
        self._assign_owners()
        self._mine = [m for m in self._matrices if m.owner[0] == self._data.rank]
        self._owned = [m for m in self._mine if m.owner[1] == self._tensor.rank]

    def _exchange_offsets(self) -> None:
        """Learn which block of each matrix the other tensor-parallel ranks hold."""
        own = [(m.section.offset, m.section.length) for m in self._matrices]
        every = gather_objects(own, self._tensor.group)
        for matrix, *blocks in zip(self._matrices, *every, strict=True):
            matrix.offsets = [offset for offset, _ in blocks]
            held = sum(length for _, length in set(blocks))
            if held != matrix.shape[matrix.dim]:
                raise ValueError(
                    f"{matrix.section.name} {matrix.shape}: the ranks of the tensor-parallel group "
                    f"hold {held} of {matrix.shape[matrix.dim]} along dim {matrix.dim}"
                )

    def _assign_owners(self) -> None:
        """Greedily: the most expensive matrix first, each to the rank with the least work."""

        def cost(matrix: Matrix) -> int:
            return math.prod(matrix.shape) * min(matrix.shape)

        work = {(d, t): 0 for d in range(self._data.size) for t in range(self._tensor.size)}
        for matrix in sorted(self._matrices, key=cost, reverse=True):
            matrix.owner = min(work, key=lambda rank: work[rank])
            work[matrix.owner] += cost(matrix)

    def gather(self) -> list[Tensor]:
        """The whole gradients of the matrices that this rank owns."""
        blocks = self._blocks()
        size = self._tensor.size
        outgoing = [
            [block for m, block in zip(self._mine, blocks, strict=True) if m.owner[1] == rank]
            for rank in range(size)
        ]
        incoming = self._tensor.exchange(outgoing, [[m.block.numel() for m in self._owned]] * size)
        wholes = []
        for index, matrix in enumerate(self._owned):
            whole = self._empty.new_empty(matrix.shape)
            for rank in range(size):
                matrix.place(whole, rank).copy_(incoming[rank][index].view(matrix.block))
            wholes.append(whole)
        return wholes

    def _blocks(self) -> list[Tensor]:
        """The flat blocks of `_mine`."""
        if not self._sharded:
            return [self._piece(m).to(self._empty.dtype) for m in self._mine]
        outgoing = [
            [self._piece(m).to(self._empty.dtype) for m in self._matrices if m.owner[0] == rank]
            for rank in range(self._data.size)
        ]
        sizes = [[m.held_size(rank) for m in self._mine] for rank in range(self._data.size)]
        incoming = self._data.exchange(outgoing, sizes)
        return [torch.cat(pieces) for pieces in zip(*incoming, strict=True)]

    def _piece(self, matrix: Matrix) -> Tensor:
        """This rank's flat piece of a matrix's gradient, maybe empty."""
        if matrix.range is None:
            return self._empty
        size = matrix.held_size(self._data.rank)
        return matrix.range.gradient[matrix.at : matrix.at + size]

    def scatter(self, wholes: Sequence[Tensor]) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Undo `gather`: `(matrix, gradient, value)` of this rank's piece of every matrix.

        `gradient` is the view from which the piece was taken; both are flat and of one size.
        """
        size = self._tensor.size
        outgoing = [
            [m.place(whole, rank).reshape(-1) for m, whole in zip(self._owned, wholes, strict=True)]
            for rank in range(size)
        ]
        sizes = [[m.block.numel() for m in self._mine if m.owner[1] == r] for r in range(size)]
        incoming = [iter(blocks) for blocks in self._tensor.exchange(outgoing, sizes)]
        blocks = [next(incoming[m.owner[1]]) for m in self._mine]

        size, me = self._data.size, self._data.rank
        outgoing = [
            [block[slice(*m.held[rank])] for m, block in zip(self._mine, blocks, strict=True)]
            for rank in range(size)
        ]
        sizes = [[m.held_size(me) for m in self._matrices if m.owner[0] == r] for r in range(size)]
        incoming = [iter(pieces) for pieces in self._data.exchange(outgoing, sizes)]
        for matrix in self._matrices:
            value = next(incoming[matrix.owner[0]])
            if matrix.range is not None:
                yield matrix, self._piece(matrix), value


class _Ranks:
    """A process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, empty: Tensor) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.group, self._empty = group, empty

    def exchange(self, outgoing: list[list[Tensor]], sizes: list[list[int]]) -> list[list[Tensor]]:
        """Send flat tensors to each rank; from rank i come tensors of `sizes[i]` elements."""
        if self.size == 1:
            return outgoing
        received = self._empty.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            torch.cat([self._empty, *(t for tensors in outgoing for t in tensors)]),
            [sum(s) for s in sizes],
            [sum(t.numel() for t in tensors) for tensors in outgoing],
            group=self.group,
        )
        parts = iter(received.split([n for s in sizes for n in s]))
        return [[next(parts) for _ in s] for s in sizes]


def _matrices(shard: Shard, data_size: int, select: Callable[[Section], bool]) -> Iterator[Matrix]:
    """The selected matrices of which this rank holds a block."""
    bucket = shard.bucket
    own = bucket.shard_end - bucket.shard_start
    sharded = own < len(bucket.parameters)
    lows = [rank * own if sharded else 0 for rank in range(data_size)]
    for slot in bucket.slots:
        dim = record_of(slot.parameter).dim
        for begin, end, section in flat_sections(slot):
            if not select(section):
                continue
            block = list(section.shape)
            block[dim] = section.length
            if math.prod(block) != end - begin:
                raise ValueError(f"{section.name}: its local block {block} is not contiguous")
            start, end = slot.start + begin, slot.start + end
            cuts = [(max(start, low), min(end, low + own)) for low in lows]
            held = [(a - start, b - start) if a < b else (0, 0) for a, b in cuts]
            first = max(start, bucket.shard_start)
            place = next((r for r in shard.ranges if r.start <= first < min(r.end, end)), None)
            at = first - place.start if place is not None else 0
            yield Matrix(section, dim, torch.Size(block), held, place, at)
