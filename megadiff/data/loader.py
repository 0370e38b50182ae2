"""Micro-batches of one data-parallel rank; the only module of the data room that uses torch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from megadiff.data.errors import DataError
from megadiff.data.gpt_dataset import Sample


class SampleDataset(Protocol):
    """What the loader reads: a `GPTDataset`, a blend or anything alike."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


@dataclass
class MicroBatch:
    """`tokens`, `labels` and `positions` int64 `[b, s]`; `loss_mask` float32 `[b, s]`.

    `cu_seqlens` int32 `[documents + 1]` over the `b * s` tokens, padded by repeating its last entry
    to one length for all micro-batches of the step; None where documents may attend to each other.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor | None = None


@dataclass(frozen=True)
class DocumentRules:
    """Megatron's `--reset-position-ids`, `--reset-attention-mask` and `--eod-mask-loss`.

    A document begins where a sequence of the dataset begins and after each `eod` token.
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


def sample_numbers(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> list[range]:
    """Dataset positions of each micro-batch of this rank in the step after `consumed_samples`.

    Megatron's sequential order: each round of micro-batches takes the next `micro * dp` samples,
    rank r of them the r-th run of `micro`.
    """
    per_round = micro_batch_size * data_parallel_size
    if global_batch_size % per_round:
        raise ValueError(
            f"global batch size {global_batch_size} is not a multiple of micro batch size "
            f"{micro_batch_size} times data-parallel size {data_parallel_size}"
        )
    first = consumed_samples + data_parallel_rank * micro_batch_size
    starts = range(first, first + global_batch_size, per_round)
    return [range(start, start + micro_batch_size) for start in starts]


def collate(samples: Sequence[Sample], rules: DocumentRules) -> MicroBatch:
    """One micro-batch of samples of equal length; `cu_seqlens` is not padded yet."""
    text = np.stack([sample.tokens for sample in samples])
    tokens, labels = text[:, :-1], text[:, 1:]
    batch, length = tokens.shape
    loss_mask = np.ones((batch, length), dtype=np.float32)
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod] = 0.0
    for row, sample in zip(loss_mask, samples, strict=True):
        if sample.filled is not None:
            row[max(sample.filled - 1, 0) :] = 0.0  # where the label is padding
    positions = np.tile(np.arange(length, dtype=np.int64), (batch, 1))
    cu_seqlens = None
    if rules.reset_position_ids or rules.reset_attention_mask:
        starts = [_document_starts(s, tokens[i], rules.eod) for i, s in enumerate(samples)]
        if rules.reset_position_ids:
            for row, begin in zip(positions, starts, strict=True):
                row -= np.repeat(begin, np.diff(begin, append=length))
        if rules.reset_attention_mask:
            flat = [begin + i * length for i, begin in enumerate(starts)]
            ends = np.concatenate([*flat, [batch * length]])
            cu_seqlens = torch.from_numpy(ends.astype(np.int32))
    return MicroBatch(
        tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        loss_mask=torch.from_numpy(loss_mask),
        positions=torch.from_numpy(positions),
        cu_seqlens=cu_seqlens,
    )


def _document_starts(sample: Sample, tokens: np.ndarray, eod: int | None) -> np.ndarray:
    starts = sample.starts
    if eod is not None:
        starts = np.union1d(starts, np.flatnonzero(tokens == eod) + 1)
    return starts[starts < len(tokens)]


def pad_cu_seqlens(batches: Sequence[MicroBatch], pin_memory: bool = False) -> None:
    """Bring `cu_seqlens` of all micro-batches to one length, a power of two plus one.

    They become rows of one tensor, in page-locked memory with `pin_memory`.
    """
    given = [batch.cu_seqlens for batch in batches if batch.cu_seqlens is not None]
    if not given:
        return
    documents = max(len(cu_seqlens) for cu_seqlens in given) - 1
    length = (1 << (documents - 1).bit_length()) + 1
    rows = torch.empty(len(batches), length, dtype=torch.int32, pin_memory=pin_memory)
    for batch, row, cu_seqlens in zip(batches, rows, given, strict=True):
        row[: len(cu_seqlens)] = cu_seqlens
        row[len(cu_seqlens) :] = cu_seqlens[-1]
        batch.cu_seqlens = row


class BatchLoader:
    """The micro-batches of one data-parallel rank, a function of the consumed samples alone.

    With `num_workers` threads the step after the one just given is made ahead, in page-locked
    memory with `pin_memory`. What is made ahead is only a guess: asking for another step is always
    right. `check` sees each micro-batch where it is made and raises what is wrong with it.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        rules: DocumentRules | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        check: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._numbers = partial(
            sample_numbers,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        self.rules = rules or DocumentRules()
        self.pin_memory = pin_memory
        self.check = check
        if self.rules.eod_mask_loss and self.rules.eod is None:
            raise DataError("--eod-mask-loss needs a tokenizer with an end-of-document token")
        self._threads = None
        if num_workers:
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="batches")
        self._ahead: tuple[tuple[int, int], list[Future[MicroBatch]]] | None = None

    def step(self, consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
        """The micro-batches of the step that begins after `consumed_samples`."""
        if self._threads is None:
            numbers = self._numbers(consumed_samples, global_batch_size)
            batches = [self._make(run) for run in numbers]
        else:
            asked = (consumed_samples, global_batch_size)
            if self._ahead is None or self._ahead[0] != asked:
                self._submit(*asked)
            assert self._ahead is not None
            batches = [future.result() for future in self._ahead[1]]
            self._submit(consumed_samples + global_batch_size, global_batch_size)
        pad_cu_seqlens(batches, self.pin_memory)
        return batches

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _submit(self, consumed_samples: int, global_batch_size: int) -> None:
        assert self._threads is not None
        if self._ahead is not None:
            for future in self._ahead[1]:
                future.cancel()
        numbers = self._numbers(consumed_samples, global_batch_size)
        futures = [self._threads.submit(self._make, run) for run in numbers]
        self._ahead = (consumed_samples, global_batch_size), futures

    def _make(self, numbers: Sequence[int]) -> MicroBatch:
        batch = collate([self.dataset[number] for number in numbers], self.rules)
        if self.check is not None:
            self.check(batch)
        if self.pin_memory:  # copies to a GPU do not wait; `pad_cu_seqlens` moves cu_seqlens
            for name in ("tokens", "labels", "loss_mask", "positions"):
                setattr(batch, name, getattr(batch, name).pin_memory())
        return batch
