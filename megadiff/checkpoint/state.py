"""What a checkpoint holds: global tensors, of which each rank has rectangles.

Nothing here knows a model or an optimizer. A parameter's record (`parallel/parameter.py`) says
which global tensors a local tensor holds; the functions below turn local tensors, or flat ranges of
them, into pieces of those.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megadiff.parallel.parameter import ParameterRecord, Section, local_view, record_of


@dataclass
class Piece:
    """A rectangle of a global tensor, held here: `data` (maybe a strided view) begins at `offset`.

    Exactly one rank has `write` for each element; every rank reads into its own pieces.
    """

    offset: tuple[int, ...]
    data: torch.Tensor
    write: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


class ComputedPiece(Piece):
    """A piece to write whose data are computed when their turn comes, and not kept."""

    def __init__(
        self, offset: tuple[int, ...], sizes: tuple[int, ...], compute: Callable[[], torch.Tensor]
    ):
        self.offset, self.write = offset, True
        self._sizes, self._compute = sizes, compute

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self._compute()


@dataclass
class ShardedTensor:
    """A global tensor of `shape`; a rank may hold none, one or several pieces of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)


Tensors = dict[str, ShardedTensor]
"""What one rank holds of a checkpoint, by global name."""


def add_piece(tensors: Tensors, name: str, shape: Sequence[int], piece: Piece) -> None:
    """Add `piece` to the global tensor `name` of `shape`, whose dtype is that of its first piece.

    Raises ValueError when the piece lies outside of the shape or is of another dtype.
    """
    shape = tuple(shape)
    tensor = tensors.setdefault(name, ShardedTensor(shape, piece.data.dtype))
    inside = len(piece.offset) == len(piece.sizes) == len(shape) and all(
        first >= 0 and first + size <= limit
        for first, size, limit in zip(piece.offset, piece.sizes, shape, strict=True)
    )
    if tensor.shape != shape or tensor.dtype != piece.data.dtype or not inside:
        raise ValueError(
            f"{name}: a piece of {piece.sizes} {piece.data.dtype} at {piece.offset} does not fit "
            f"into {tensor.shape} {tensor.dtype}"
        )
    tensor.pieces.append(piece)


def module_tensors(module: nn.Module, replica: int = 0, replicas: int = 1) -> Tensors:
    """The parameters of `module` (and of all its chunks, if it is a ModuleList) by global name.

    `replicas` ranks (data and context parallel) hold the same values and this one is number
    `replica`; each section is written by one of them, all writing about as many bytes.
    """
    tensors: Tensors = {}
    load = [0] * replicas
    for parameter in module.parameters():
        record = record_of(parameter)
        for section in record.sections:
            data = local_view(parameter.detach(), section, record.dim)
            writer = load.index(min(load))
            if section.copy_index == 0:
                load[writer] += data.numel() * data.element_size()
            piece = Piece(
                _offset(section, record.dim, [0] * data.dim(), section.start),
                data,
                write=section.copy_index == 0 and writer == replica,
            )
            add_piece(tensors, section.name, section.shape, piece)
    return tensors


def flat_pieces(
    record: ParameterRecord,
    local_shape: Sequence[int],
    start: int,
    flat_data: torch.Tensor,
    write: bool = True,
) -> Iterator[tuple[Section, Piece]]:
    """The pieces that a flat range of a local parameter holds of its sections.

    `flat_data` `[n]` are the elements from `start` on of a contiguous tensor of `local_shape` (a
    main weight or a moment of a rank that owns just this range). The pieces are views of it, at
    most three per section of a matrix; padding, which no section covers, is left out. `write` says
    whether this rank writes what it owns; ranks with a further copy never do.
    """
    dim = record.dim
    first = 0  # the rectangles follow each other in the flat range
    for offset, sizes in _boxes(start, start + flat_data.numel(), tuple(local_shape)):
        box = flat_data[first : first + math.prod(sizes)].view(sizes)
        first += box.numel()
        for section in record.sections:
            low = max(offset[dim], section.start)
            high = min(offset[dim] + sizes[dim], section.start + section.length)
            if low < high:
                data = box.narrow(dim, low - offset[dim], high - low)
                where = _offset(section, dim, offset, low)
                yield section, Piece(where, data, write and section.copy_index == 0)


def _offset(section: Section, dim: int, local: Sequence[int], at: int) -> tuple[int, ...]:
    """The global offset of the local offset `local`, whose entry along `dim` is `at`."""
    offset = list(local)
    offset[dim] = section.offset + at - section.start
    return tuple(offset)


def _boxes(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat range `[start, stop)` of a tensor of `shape` into rectangles: (offset, sizes).

    A matrix gives at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    head = min(-(-start // row) * row, stop)  # [start, head) is the rest of a row
    tail = max(stop // row * row, head)  # [tail, stop) is the beginning of one
    for offset, sizes in _boxes(start % row, start % row + head - start, shape[1:]):
        yield (start // row, *offset), (1, *sizes)
    if head < tail:
        yield (head // row, *(0 for _ in shape[1:])), ((tail - head) // row, *shape[1:])
    for offset, sizes in _boxes(0, stop - tail, shape[1:]):
        yield (tail // row, *offset), (1, *sizes)
