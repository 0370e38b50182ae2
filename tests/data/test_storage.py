"""Datasets in an object store: ranged reads, a local cache, retries, other versions."""

from pathlib import Path

import numpy as np
import pytest

from megadiff.data import storage
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

fsspec = pytest.importorskip("fsspec")

DOCUMENTS = [list(range(n, n + 50)) for n in range(40)]


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of a dataset in fsspec's store in memory."""
    monkeypatch.setattr(storage, "BLOCK", 256)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    upload(tmp_path, DOCUMENTS)
    return "memory://bucket/corpus"


def upload(folder: Path, documents: list[list[int]]) -> None:
    with IndexedDatasetBuilder(str(folder / "local"), np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
    store = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        store.pipe_file(f"/bucket/corpus{suffix}", (folder / f"local{suffix}").read_bytes())


def test_reads_what_a_local_dataset_reads(remote: str, tmp_path: Path) -> None:
    dataset = IndexedDataset(remote, cache_path=str(tmp_path / "cache"))
    assert [sequence.tolist() for sequence in map(dataset.get, range(40))] == DOCUMENTS
    assert dataset.get(7, 10, 3).tolist() == [17, 18, 19]
    assert dataset[39].tolist() == DOCUMENTS[39]


def test_blocks_are_fetched_once(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fsspec.filesystem("memory")
    fetched: list[tuple[int, int]] = []
    cat_file = type(store).cat_file

    def count(self, path, start=None, end=None, **options):
        fetched.append((start, end))
        return cat_file(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(store), "cat_file", count)
    dataset = IndexedDataset(remote, cache_path=str(tmp_path / "cache"))
    fetched.clear()
    dataset.get(0)  # bytes 0 to 100
    dataset.get(2)  # bytes 200 to 300: the next block too
    dataset.get(1)
    assert fetched == [(0, 256), (256, 512)]
    IndexedDataset(remote, cache_path=str(tmp_path / "cache")).get(2)
    assert len(fetched) == 2


def test_failures_are_tried_again(
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = fsspec.filesystem("memory")
    cat_file = type(store).cat_file
    failures = iter([OSError("reset by peer"), b"short", TimeoutError("slow")])

    def flaky(self, path, start=None, end=None, **options):
        failure = next(failures, None)
        if isinstance(failure, Exception):
            raise failure
        return failure or cat_file(self, path, start=start, end=end, **options)

    dataset = IndexedDataset(remote, cache_path=str(tmp_path / "cache"))
    monkeypatch.setattr(type(store), "cat_file", flaky)
    assert dataset.get(3).tolist() == DOCUMENTS[3]
    err = capsys.readouterr().err
    assert "reset by peer; again in 1 s" in err and "5 bytes came of 256; again in 2 s" in err

    def broken(self, path, **options):
        raise OSError("no route")

    monkeypatch.setattr(type(store), "cat_file", broken)
    with pytest.raises(DataError, match=r"bytes 2048 to 2304: no route \(6 attempts\)"):
        dataset.get(21)
    assert not list((tmp_path / "cache").rglob("*.part-*"))


def test_another_version_is_not_mixed_with_the_old(remote: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert IndexedDataset(remote, cache_path=cache).get(0).tolist() == DOCUMENTS[0]
    upload(tmp_path, [[9] * 50] * 40)  # of the same size
    assert IndexedDataset(remote, cache_path=cache).get(0).tolist() == [9] * 50


def test_missing_objects_and_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/absent\.idx: no such object"):
        IndexedDataset("memory://bucket/absent", cache_path=str(tmp_path))
    with pytest.raises(DataError, match=r"nowhere://x\.idx"):
        IndexedDataset("nowhere://x", cache_path=str(tmp_path))
