"""Best-fit packing: nothing cut that fits, nothing lost, little padding."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadiff.data.build import build_train_valid_test_datasets
from megadiff.data.gpt_dataset import NoSamples
from megadiff.data.indexed_dataset import IndexedDatasetBuilder
from megadiff.data.loader import DocumentRules, collate
from megadiff.data.packed_dataset import PackedDataset, build_packed_order, pack

SEQ = 16


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=80), st.just(20))
def test_bins_hold_what_they_can(lengths: list[int], capacity: int) -> None:
    sizes = np.array(lengths)
    bins = pack(sizes, capacity)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= capacity and filled.min() > 0
    # no two bins could be one, which bounds any-fit packing at twice the least number of bins
    two_emptiest = np.sort(filled)[:2]
    assert len(filled) == 1 or two_emptiest.sum() > capacity


def test_packing_is_tight_on_text_like_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 600, size=20_000) + 1, 4097)
    bins = pack(lengths, 4097)
    assert lengths.sum() / ((bins.max() + 1) * 4097) > 0.999


def test_every_document_is_read_once_an_epoch_and_cut_only_if_too_long() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 60, size=500).astype(np.int32)
    order = build_packed_order(lengths, (100, 400), None, SEQ, seed=3)
    pieces = sorted(zip(order.sequence, order.offset, order.length, strict=True))
    expected = []
    for sequence in range(100, 400):
        for offset in range(0, max(lengths[sequence] - 1, 0), SEQ):
            expected.append((sequence, offset, min(lengths[sequence] - offset, SEQ + 1)))
    assert pieces == expected
    for begin, end in zip(order.first[:-1], order.first[1:], strict=True):
        assert order.length[begin:end].sum() <= SEQ + 1


def test_epochs_differ_and_are_repeatable() -> None:
    lengths = np.full(300, 5, dtype=np.int32)
    order = build_packed_order(lengths, (0, 300), 250, SEQ, seed=3)
    assert len(order.first) - 1 >= 250  # 3 documents a sample, 100 samples an epoch: 3 epochs
    assert np.bincount(order.sequence).tolist() == [3] * 300
    assert sorted(order.sequence[:300]) == sorted(order.sequence[300:600])
    assert order.sequence[:300].tolist() != order.sequence[300:600].tolist()
    again = build_packed_order(lengths, (0, 300), 250, SEQ, seed=3)
    for a, b in zip(vars(order).values(), vars(again).values(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(NoSamples):
        build_packed_order(np.array([1, 1], dtype=np.int32), (0, 2), 5, SEQ, seed=3)


def test_padding_has_no_loss_and_is_no_part_of_a_document(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document(list(range(1, 11)))
        builder.add_document([21, 22, 23])
    (train, _, _) = build_train_valid_test_datasets(
        data_path=[prefix],
        split="1",
        samples=(None, 0, 0),
        seq_length=SEQ,
        seed=1,
        cache_path=str(tmp_path / "cache"),
        packing="best-fit",
    )
    assert isinstance(train, PackedDataset) and len(train) == 1
    sample = train[0]
    assert sample.filled == 13 and sample.starts.tolist() == [0, 10, 13]
    assert sample.tokens.tolist() == [*range(1, 11), 21, 22, 23, 0, 0, 0, 0]
    batch = collate([sample], DocumentRules(reset_attention_mask=True, reset_position_ids=True))
    assert batch.loss_mask[0].tolist() == [1.0] * 12 + [0.0] * 4
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 10, 13, 16]
    assert batch.positions[0].tolist() == [*range(10), 0, 1, 2, 0, 1, 2]
