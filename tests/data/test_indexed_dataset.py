import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.errors import DataError
from megadiff.data.gpt_dataset import GPTDataset, build_order
from megadiff.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    best_dtype,
    convert,
    publish,
)

DOCUMENTS = [[1, 2, 3, 99], [4, 5, 99], [], [6, 7, 8, 9, 10, 99], [11, 99]]


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    with IndexedDatasetBuilder(str(prefix), dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    index = Path(prefix + ".idx").read_bytes()
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 6)
    expected += struct.pack("<4i", 4, 3, 6, 2)
    expected += struct.pack("<4q", 0, 8, 14, 26)
    expected += struct.pack("<6q", 0, 1, 2, 2, 3, 4)
    assert index == expected
    assert len(index) == 130
    tokens = [token for document in DOCUMENTS for token in document]
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<15H", *tokens)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_reads_what_was_written(tmp_path: Path, mmap: bool, dtype: type) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", DOCUMENTS, dtype), mmap=mmap)
    assert dataset.dtype == dtype
    assert dataset.document_count == 5
    assert [dataset.document(i).tolist() for i in range(5)] == DOCUMENTS
    assert dataset.get(2, offset=1, length=3).tolist() == [7, 8, 9]
    with pytest.raises(IndexError):
        dataset[4]


@pytest.mark.parametrize("mmap", [True, False])
def test_empty_dataset(tmp_path: Path, mmap: bool) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", []), mmap=mmap)
    assert len(dataset) == dataset.document_count == 0


def test_appending_datasets_is_writing_their_documents(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", DOCUMENTS * 2)
    part = IndexedDataset(write(tmp_path / "part", DOCUMENTS))
    with IndexedDatasetBuilder(str(tmp_path / "merged"), np.uint16) as builder:
        builder.add_dataset(part)
        builder.add_dataset(part)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == Path(whole + suffix).read_bytes()


def test_sequences_of_one_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "d"), np.int32) as builder:
        builder.add_sequence([1, 2])
        builder.add_sequence([3, 4, 5])
        builder.end_document()
    dataset = IndexedDataset(str(tmp_path / "d"))
    assert [s.tolist() for s in dataset] == [[1, 2], [3, 4, 5]]  # type: ignore[attr-defined]
    assert dataset.document(0).tolist() == [1, 2, 3, 4, 5]


def test_dtype_follows_megatron() -> None:
    assert best_dtype(65499) == np.uint16
    for vocab_size in range(65500, 65538):
        assert best_dtype(vocab_size) == np.int32


def test_ids_never_wrap() -> None:
    with pytest.raises(DataError, match="65536 does not fit uint16"):
        convert(np.array([1, 65536]), np.dtype(np.uint16))
    with pytest.raises(DataError, match="-1 does not fit"):
        convert(np.array([-1, 5]), np.dtype(np.uint16))


def test_nothing_appears_before_it_is_whole(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError),
        IndexedDatasetBuilder(str(tmp_path / "d"), np.uint16) as builder,
    ):
        builder.add_document([1, 2])
        builder.add_document([70000])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    builder = IndexedDatasetBuilder(str(tmp_path / "d"), np.uint16)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"), builder:
        builder.add_document([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    bin_file, idx_file = Path(prefix + ".bin"), Path(prefix + ".idx")
    with pytest.raises(DataError, match=r"without \.bin"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(DataError, match=r"without \.idx"):  # nor is it there
        IndexedDataset(prefix + "_absent.idx")
    with pytest.raises(DataError, match="no such dataset"):
        IndexedDataset(str(tmp_path / "other"))
    made = write(tmp_path / "web_text_document", DOCUMENTS)
    with pytest.raises(DataError, match=f"missing\\); there is {made}$"):
        IndexedDataset(str(tmp_path / "web"))
    whole = bin_file.read_bytes()
    bin_file.write_bytes(whole[:-2])
    with pytest.raises(DataError, match="28 bytes, but its index needs 30"):
        IndexedDataset(prefix)
    bin_file.write_bytes(whole)
    idx_file.write_bytes(idx_file.read_bytes()[:-8])
    with pytest.raises(DataError, match="cut off or damaged"):
        IndexedDataset(prefix)
    idx_file.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"not a \.idx file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("mmap", [True, False])
def test_more_tokens_than_32_bits_count(tmp_path: Path, mmap: bool) -> None:
    lengths = np.array([2**30, 2**30, 2**30, 3], dtype=np.int32)
    part = tmp_path / "large.part"
    with part.open("wb") as file:  # sparse: 6 GB of zeros that take no room
        file.seek(3 * 2**31)
        file.write(np.array([7, 8, 9], dtype=np.uint16).tobytes())
    documents = np.array([0, 2, 4])
    publish(str(tmp_path / "large"), part, np.dtype(np.uint16), lengths, documents)
    dataset = IndexedDataset(str(tmp_path / "large"), mmap=mmap)
    assert dataset.pointers.tolist() == [0, 2**31, 2**32, 3 * 2**31]
    assert dataset[3].tolist() == [7, 8, 9]
    order = build_order(dataset.lengths, (0, 4), None, 2**20, seed=1)
    sample = GPTDataset(dataset, order, 2**20)[0]
    assert len(sample.tokens) == 2**20 + 1
    assert len(order.shuffle_index) == (3 * 2**30 + 2) // 2**20
