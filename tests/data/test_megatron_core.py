"""Our files and orders beside those of megatron-core, where that is installed."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megadiff.data.blended_dataset import build_blend_order, normalize
from megadiff.data.data_path import parse_split, split_range
from megadiff.data.gpt_dataset import build_order
from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.datasets import helpers, indexed_dataset  # type: ignore
from megatron.core.datasets.gpt_dataset import GPTDataset  # type: ignore


def make_documents(seed: int, count: int = 200) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(50_000) for _ in range(rng.choice([0, 1, 5, 30, 200]))] for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_same_bytes_and_each_reads_the_others(tmp_path: Path, dtype: type) -> None:
    documents = make_documents(1)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    with IndexedDatasetBuilder(ours, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    other = indexed_dataset.IndexedDatasetBuilder(theirs + ".bin", dtype=dtype)
    for document in documents:
        other.add_document(document, [len(document)] if document else [])
    other.finalize(theirs + ".idx")
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
    read_by_us, read_by_them = IndexedDataset(theirs), indexed_dataset.IndexedDataset(ours)
    assert len(read_by_us) == len(read_by_them)
    for i in range(len(read_by_us)):
        np.testing.assert_array_equal(read_by_us[i], read_by_them[i])
    np.testing.assert_array_equal(read_by_us.documents, read_by_them.document_indices)


def megatron_order(prefix: Path, lengths: np.ndarray, sequences, samples: int, seq: int, seed: int):
    """The three arrays of megatron-core for the sequences [first, last)."""
    dataset = GPTDataset.__new__(GPTDataset)
    dataset.config = SimpleNamespace(
        path_to_cache=None,
        mock=False,
        sequence_length=seq,
        add_extra_token_to_sequence=True,
        random_seed=seed,
        drop_last_partial_validation_sequence=True,
        defer_npy_index_mmap=False,
        fast_cache_load=False,
    )
    dataset.dataset = SimpleNamespace(sequence_lengths=lengths, path_prefix=str(prefix))
    dataset.indices = np.arange(*sequences, dtype=np.int32)
    dataset.num_samples = samples
    dataset.index_split = SimpleNamespace(name="train")
    dataset.unique_description = ""
    dataset.unique_description_hash = ""
    return dataset._build_document_sample_shuffle_indices()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")


@pytest.mark.parametrize("seed", range(12))
def test_sample_orders_are_equal(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lengths = np.array([len(d) for d in make_documents(seed) if d], dtype=np.int32)
    first = rng.randrange(10)
    last = len(lengths) - rng.randrange(10)
    seq = rng.choice([3, 16, 100])
    per_epoch = int(lengths[first:last].sum()) // seq
    samples = int(per_epoch * rng.choice([0.1, 1.0, 1.2, 1.75, 1.95, 3.3]))
    theirs = megatron_order(tmp_path / "x", lengths, (first, last), samples, seq, seed)
    ours = build_order(lengths, (first, last), samples, seq, seed)
    for mine, other in zip(vars(ours).values(), theirs, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert mine.dtype == other.dtype


@pytest.mark.parametrize("weights", [[1.0], [0.3, 0.7], [5, 1, 1, 0.001], [1 / 3] * 3])
def test_blends_are_equal(weights: list[float]) -> None:
    size, shares = 2000, normalize(weights)
    dataset_index = np.zeros(size, dtype=np.int16)
    sample_index = np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(
        dataset_index, sample_index, np.array(shares), len(shares), size, False
    )
    ours = build_blend_order(shares, size)
    np.testing.assert_array_equal(ours.dataset_index, dataset_index)
    np.testing.assert_array_equal(ours.dataset_sample_index, sample_index)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0.5,0.25,0.25", "100,0,0", "99,1,0", "7"])
def test_splits_are_equal(split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (  # type: ignore
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for count in (1, 7, 200, 12_345):
        for ours, theirs in zip(parse_split(split), matrix, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                begin, end = (round(bound * float(count)) for bound in theirs)
                assert split_range(ours, count) == (begin, end)
