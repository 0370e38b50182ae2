"""Samples of `seq_length + 1` tokens in Megatron's order, from one indexed dataset.

The order is that of Megatron-LM's GPTDataset: sequences shuffled per run of epochs into a document
index, its tokens cut into samples that overlap by one token, the samples shuffled again. It is a
pure function of (sequence lengths, range of sequences, samples asked for, seq_length, seed).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset

_CHUNK = 1 << 20  # documents per step of the scan: its arrays stay in the cache


class NoSamples(DataError):
    """A range of sequences holds no whole sample."""


@dataclass(frozen=True)
class SampleOrder:
    """What `GPTDataset` reads: three arrays, in memory or memory-mapped.

    `document_index` `[epochs * sequences]`: sequence numbers; `sample_index` `[samples + 1, 2]`:
    where each sample begins, as (position in document_index, token offset); `shuffle_index`
    `[samples]`.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


@dataclass(frozen=True)
class Epochs:
    """How often the sequences are read, how many samples that gives, and how many of these, from
    the last epoch, are shuffled apart from the others."""

    count: int
    samples: int
    samples_apart: int


def plan_epochs(tokens: int, samples: int | None, seq_length: int) -> Epochs:
    """The fewest epochs of `tokens` tokens that give `samples` samples (None: one epoch).

    The last epoch is shuffled apart when less than 80 % of its samples are wanted, so that the rest
    of them does not thin out the earlier epochs.
    """
    count = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // tokens))
    total, before = ((n * tokens - 1) // seq_length for n in (count, count - 1))
    apart = 0
    if samples is not None and count > 1:
        per_epoch = (tokens - 1) // seq_length
        apart = total - before if samples - before < int(0.80 * per_epoch) else 0
    return Epochs(count, total, apart)


def build_order(
    lengths: np.ndarray, sequences: tuple[int, int], samples: int | None, seq_length: int, seed: int
) -> SampleOrder:
    """The order over sequences `[first, last)` of `lengths` (int32) for at least `samples` samples.

    Raises NoSamples when the sequences hold no whole sample.
    """
    first, last = sequences
    tokens = int(lengths[first:last].sum(dtype=np.int64))
    if tokens == 0:
        raise NoSamples("no tokens")
    epochs = plan_epochs(tokens, samples, seq_length)
    if epochs.samples == 0:
        raise NoSamples(f"{tokens} tokens, less than the {seq_length + 1} of one sample")
    rng = np.random.RandomState(seed)
    one_epoch = np.arange(first, last, dtype=np.int32 if last <= 2**31 else np.int64)
    document_index = np.tile(one_epoch, epochs.count)
    _shuffle(document_index, len(one_epoch) if epochs.samples_apart else 0, rng)
    sample_index = _sample_index(lengths, document_index, epochs.samples, seq_length)
    dtype = np.int64 if epochs.samples >= 2**32 - 2 else np.uint32
    shuffle_index = np.arange(epochs.samples, dtype=dtype)
    _shuffle(shuffle_index, epochs.samples_apart, rng)
    return SampleOrder(document_index, sample_index, shuffle_index)


def _shuffle(order: np.ndarray, apart: int, rng: np.random.RandomState) -> None:
    """Shuffle all but the last `apart` entries among themselves, then these."""
    split = len(order) - apart
    rng.shuffle(order[:split])
    rng.shuffle(order[split:])


def _sample_index(
    lengths: np.ndarray, document_index: np.ndarray, samples: int, seq_length: int
) -> np.ndarray:
    """Where tokens 0, seq_length, 2 * seq_length, ... of the stream lie; linear in time."""
    fits = max(len(document_index), int(lengths.max(initial=0))) < 2**31
    index = np.zeros((samples + 1, 2), dtype=np.int32 if fits else np.int64)
    row = 1
    before = 0  # tokens before the chunk
    for begin in range(0, len(document_index), _CHUNK):
        ends = before + np.cumsum(lengths[document_index[begin : begin + _CHUNK]], dtype=np.int64)
        total = int(ends[-1])
        last = min((total - 1) // seq_length, samples)
        if last >= row:
            targets = np.arange(row, last + 1, dtype=np.int64) * seq_length
            position = np.searchsorted(ends, targets, side="right")
            starts = np.concatenate(([before], ends[:-1]))
            index[row : last + 1, 0] = begin + position
            index[row : last + 1, 1] = targets - starts[position]
            row = last + 1
        before = total
    return index


@dataclass(frozen=True)
class Piece:
    """Part of a sample: `length` tokens of sequence `sequence` from token `offset` on."""

    sequence: int
    offset: int
    length: int


@dataclass(frozen=True)
class Sample:
    """`tokens` int64 `[seq_length + 1]`; `starts` int32: the positions at which sequences begin.

    The first entry of `starts` is 0 even where the sample begins inside a sequence. Tokens from
    `filled` on are padding (None: there is none).
    """

    tokens: np.ndarray
    starts: np.ndarray
    filled: int | None = None


@dataclass(frozen=True, eq=False)
class PiecewiseDataset(ABC):
    """Samples of `seq_length + 1` tokens that are made of pieces of the sequences of `dataset`."""

    dataset: IndexedDataset
    order: Any
    seq_length: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _pieces(self, index: int) -> Iterator[Piece]: ...

    def pieces(self, index: int) -> Iterator[Piece]:
        """Which tokens of which sequences sample `index` is made of, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} ({self.dataset.prefix})")
        return self._pieces(index)

    def __getitem__(self, index: int) -> Sample:
        tokens = np.zeros(self.seq_length + 1, dtype=np.int64)
        starts: list[int] = []
        filled = 0
        for piece in self.pieces(index):
            starts.append(filled)
            end = filled + piece.length
            tokens[filled:end] = self.dataset.get(piece.sequence, piece.offset, piece.length)
            filled = end
        if filled == len(tokens):
            return Sample(tokens, np.array(starts, dtype=np.int32))
        return Sample(tokens, np.array([*starts, filled], dtype=np.int32), filled)


class GPTDataset(PiecewiseDataset):
    """Item i is sample i of the order, as a `Sample`."""

    order: SampleOrder

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def _pieces(self, index: int) -> Iterator[Piece]:
        row = int(self.order.shuffle_index[index])
        position, offset = (int(x) for x in self.order.sample_index[row])
        left = self.seq_length + 1
        while left:
            sequence = int(self.order.document_index[position])
            length = min(int(self.dataset.lengths[sequence]) - offset, left)
            if length:
                yield Piece(sequence, offset, length)
            left -= length
            position, offset = position + 1, 0
