"""Micro-batches: who gets which samples, and what documents do to masks and positions."""

import numpy as np
import pytest
import torch

from megadiff.data.gpt_dataset import Sample
from megadiff.data.loader import BatchLoader, DocumentRules, MicroBatch, collate, sample_numbers

EOD = 0


class Numbers:
    """Sample i is tokens 1000 i + 1, 1000 i + 2, ...; a sequence begins at `starts`."""

    def __init__(self, size: int = 96, seq_length: int = 8, starts: tuple[int, ...] = (0,)) -> None:
        self.size, self.seq_length, self.starts = size, seq_length, np.array(starts, np.int32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(index)
        tokens = 1000 * index + 1 + np.arange(self.seq_length + 1, dtype=np.int64)
        return Sample(tokens, self.starts)


def samples_of(batches: list[MicroBatch]) -> list[int]:
    return [int(token) // 1000 for batch in batches for token in batch.tokens[:, 0]]


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_each_global_batch(micro: int, ranks: int) -> None:
    for consumed in (0, 24, 48):
        of_ranks = [
            samples_of(
                BatchLoader(
                    Numbers(),
                    micro_batch_size=micro,
                    data_parallel_rank=rank,
                    data_parallel_size=ranks,
                ).step(consumed, 24)
            )
            for rank in range(ranks)
        ]
        together = [sample for samples in of_ranks for sample in samples]
        assert sorted(together) == list(range(consumed, consumed + 24))


def test_order_is_megatrons() -> None:
    # rank 1 of 2 with micro batches of 2: the second pair of every four samples
    assert sample_numbers(100, 12, 2, 1, 2) == [range(102, 104), range(106, 108), range(110, 112)]
    with pytest.raises(ValueError, match="10 is not a multiple of micro batch size 2 times"):
        sample_numbers(0, 10, 2, 0, 2)


def test_labels_follow_tokens() -> None:
    (batch,) = BatchLoader(Numbers(), micro_batch_size=2).step(4, 2)
    assert batch.tokens.tolist() == [list(range(4001, 4009)), list(range(5001, 5009))]
    torch.testing.assert_close(batch.labels, batch.tokens + 1)
    torch.testing.assert_close(batch.positions, torch.arange(8).expand(2, 8))
    assert batch.loss_mask.dtype == torch.float32 and batch.loss_mask.min() == 1
    assert batch.cu_seqlens is None


def document_sample() -> Sample:
    # a sequence begins at 0 and at 3; token 4 ends a document inside a sequence
    return Sample(np.array([5, 6, 7, 8, EOD, 9, 10, 11, EOD]), np.array([0, 3], np.int32))


def test_documents_reset_positions_and_attention() -> None:
    rules = DocumentRules(EOD, reset_position_ids=True, reset_attention_mask=True)
    batch = collate([document_sample(), document_sample()], rules)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]] * 2
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 11, 13, 16]
    assert batch.loss_mask.min() == 1


def test_eod_has_no_loss() -> None:
    batch = collate([document_sample()], DocumentRules(EOD, eod_mask_loss=True))
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 0, 1, 1, 1]]
    assert batch.positions.tolist() == [list(range(8))]
    with pytest.raises(ValueError, match="end-of-document token"):
        BatchLoader(Numbers(), micro_batch_size=1, rules=DocumentRules(eod_mask_loss=True))


def test_an_eod_at_the_end_begins_no_document() -> None:
    tokens = np.array([1, 2, 3, EOD, 4])
    batch = collate(
        [Sample(tokens, np.array([0, 4], np.int32))], DocumentRules(EOD, reset_attention_mask=True)
    )
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 4]


def test_cu_seqlens_of_a_step_have_one_length() -> None:
    class Growing(Numbers):
        def __getitem__(self, index: int) -> Sample:
            starts = np.arange(min(index + 1, self.seq_length), dtype=np.int32)
            return Sample(super().__getitem__(index).tokens, starts)

    loader = BatchLoader(
        Growing(), micro_batch_size=1, rules=DocumentRules(reset_attention_mask=True)
    )
    batches = loader.step(0, 5)  # 1 to 5 documents: padded to 8
    assert [batch.cu_seqlens.tolist() for batch in batches][1] == [0, 1, 8, 8, 8, 8, 8, 8, 8]  # type: ignore[union-attr]
    assert {len(batch.cu_seqlens) for batch in batches} == {9}  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(workers: int) -> None:
    plain = BatchLoader(Numbers(), micro_batch_size=2)
    ahead = BatchLoader(Numbers(), micro_batch_size=2, num_workers=workers)
    # a jump as a resume makes, a change of batch size, the last samples of the dataset
    for consumed, size in [(0, 8), (8, 8), (40, 8), (48, 16), (64, 16), (80, 16), (0, 8)]:
        for a, b in zip(plain.step(consumed, size), ahead.step(consumed, size), strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.positions, b.positions)
    ahead.close()


def test_an_error_of_a_thread_is_raised() -> None:
    loader = BatchLoader(Numbers(size=10), micro_batch_size=2, num_workers=1)
    loader.step(0, 8)
    with pytest.raises(IndexError):
        loader.step(8, 8)
    loader.close()


def test_resume_on_another_number_of_ranks_reads_the_same_samples() -> None:
    def step(consumed: int, ranks: int, micro: int) -> set[int]:
        return {
            sample
            for rank in range(ranks)
            for sample in samples_of(
                BatchLoader(
                    Numbers(),
                    micro_batch_size=micro,
                    data_parallel_rank=rank,
                    data_parallel_size=ranks,
                ).step(consumed, 24)
            )
        }

    for consumed in (0, 24, 48, 72):
        assert step(consumed, 2, 3) == step(consumed, 4, 1) == step(consumed, 1, 8)
