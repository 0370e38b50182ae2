"""Samples of whole documents: best-fit packing instead of concatenation.

Documents are put into samples so that none is cut that fits into one ("Fewer Truncations Improve
Language Modeling", Ding et al. 2024): longest first, each into the fullest sample that has room. A
document longer than a sample gives full samples, which overlap by one token as concatenated ones
do, and a rest that is packed like a document. What stays free in a sample is padding without loss.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megadiff.data.gpt_dataset import NoSamples, Piece, PiecewiseDataset


@dataclass(frozen=True)
class PackedOrder:
    """`sequence` `[pieces]` and `offset`, `length` int32 `[pieces]` of the pieces by sample;
    `first` int64 `[samples + 1]`: where the pieces of each sample begin, in the order of
    training."""

    sequence: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    first: np.ndarray


def build_packed_order(
    lengths: np.ndarray, sequences: tuple[int, int], samples: int | None, seq_length: int, seed: int
) -> PackedOrder:
    """At least `samples` samples (None: one epoch) of sequences `[first, last)` of `lengths`.

    Every epoch is packed and shuffled anew. Raises NoSamples when there are no tokens.
    """
    rng = np.random.RandomState(seed)
    cut = _cut(lengths, sequences, seq_length)
    if not len(cut[0]):
        raise NoSamples("no document of two tokens")
    epochs: list[tuple[np.ndarray, ...]] = []
    total = 0
    while not epochs or total < (samples or 0):
        shuffled = rng.permutation(len(cut[0]))
        sequence, offset, length = (array[shuffled] for array in cut)
        sample = pack(length, seq_length + 1)
        count = int(sample.max()) + 1
        sample = rng.permutation(count)[sample]
        order = np.argsort(sample, kind="stable")
        sizes = np.bincount(sample, minlength=count)
        epochs.append((sequence[order], offset[order], length[order], sizes))
        total += count
    sequence, offset, length, sizes = (
        np.concatenate(arrays) for arrays in zip(*epochs, strict=True)
    )
    first = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    return PackedOrder(sequence, offset, length, first)


def _cut(
    lengths: np.ndarray, sequences: tuple[int, int], seq_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequence, offset and length of pieces of at most `seq_length + 1` and at least 2 tokens."""
    part = lengths[sequences[0] : sequences[1]].astype(np.int64)
    # each piece predicts all of its tokens but the first: n tokens give ceil((n - 1) / seq) pieces
    pieces = np.where(part >= 2, -(-(part - 1) // seq_length), 0)
    sequence = np.repeat(np.arange(sequences[0], sequences[1]), pieces)
    ends = np.cumsum(pieces)
    number = np.arange(len(sequence)) - np.repeat(ends - pieces, pieces)
    offset = number * seq_length
    length = np.minimum(lengths[sequence] - offset, seq_length + 1)
    return sequence, offset.astype(np.int32), length.astype(np.int32)


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each item of `lengths` (int, at most `capacity`), by best fit, longest items first.

    Items of one length are placed together, so that the time grows with the number of different
    lengths and, slowly, with the number of items.
    """
    result = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[by_length], prepend=-1, append=-1))
    free: dict[int, list[np.ndarray]] = {}  # bins by the room left in them
    rooms: list[int] = []  # the keys of `free`, sorted
    bins = 0

    def put_back(numbers: np.ndarray, room: int) -> None:
        if room < 2 or not len(numbers):
            return
        if room not in free:
            free[room] = []
            insort(rooms, room)
        free[room].append(numbers)

    for begin, end in pairwise(bounds):
        items = by_length[begin:end]
        size = int(lengths[items[0]])
        while len(items):
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms.pop(at)
                open_bins = np.concatenate(free.pop(room))
            else:
                room = capacity
                open_bins = np.arange(bins, bins + -(-len(items) // (capacity // size)))
                bins += len(open_bins)
            # spread evenly as far as there is room; the last bin that is used may get fewer
            each = min(room // size, -(-len(items) // len(open_bins)))
            used = min(len(open_bins), -(-len(items) // each))
            taken = min(len(items), used * each)
            result[items[:taken]] = np.repeat(open_bins[:used], each)[:taken]
            full = taken // each
            put_back(open_bins[:full], room - each * size)
            put_back(open_bins[full:used], room - (taken - full * each) * size)
            put_back(open_bins[used:], room)
            items = items[taken:]
    return result


class PackedDataset(PiecewiseDataset):
    """Item i is sample i of the order: whole pieces, then padding with token 0."""

    order: PackedOrder

    def __len__(self) -> int:
        return len(self.order.first) - 1

    def _pieces(self, index: int) -> Iterator[Piece]:
        order = self.order
        for i in range(int(order.first[index]), int(order.first[index + 1])):
            yield Piece(int(order.sequence[i]), int(order.offset[i]), int(order.length[i]))
