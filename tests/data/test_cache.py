"""The index cache: made once, keyed by content, safe among processes and against interruption."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from megadiff.data import cache
from megadiff.data.build import build_train_valid_test_datasets
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDatasetBuilder

KEY = {"kind": "Thing", "number": 3}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_made_once(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(5), "b": np.zeros((2, 2), dtype=np.int16)}

    for _ in range(3):
        arrays = cache.load_or_make(str(tmp_path / "cache"), KEY, make)
        assert isinstance(arrays["a"], np.memmap)
        np.testing.assert_array_equal(arrays["a"], np.arange(5))
        assert arrays["b"].dtype == np.int16
    assert len(made) == 1
    cache.load_or_make(str(tmp_path / "cache"), KEY | {"number": 4}, make)
    assert len(made) == 2 and len(entries(tmp_path / "cache")) == 2


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        cache.load_or_make(str(tmp_path), KEY, fail)
    assert entries(tmp_path) == []


def _make_slowly(folder: str, log: str) -> None:
    def make() -> dict[str, np.ndarray]:
        with Path(log).open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return {"a": np.arange(7)}

    arrays = cache.load_or_make(folder, KEY, make)
    assert arrays["a"].sum() == 21


def test_processes_wait_for_the_one_that_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = str(tmp_path / "cache"), str(tmp_path / "log")
    processes = [context.Process(target=_make_slowly, args=(folder, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert Path(log).read_text() == "made\n"
    assert len(entries(tmp_path / "cache")) == 1  # the lock is gone


def test_a_lock_that_was_left_behind_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.load_or_make(str(tmp_path), KEY, lambda: {"a": np.arange(3)})
    (entry,) = tmp_path.iterdir()
    lock = entry.with_name(entry.name + ".lock")
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    lock.touch()
    monkeypatch.setattr(cache, "STALE", 0.3)
    arrays = cache.load_or_make(str(tmp_path), KEY, lambda: {"a": np.arange(4)})
    assert len(arrays["a"]) == 4
    assert "no sign of life" in capsys.readouterr().err


def test_a_lock_with_signs_of_life_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "STALE", 0.6)
    monkeypatch.setattr(cache, "HEARTBEAT", 0.1)
    context = multiprocessing.get_context("fork")
    folder, log = str(tmp_path / "cache"), str(tmp_path / "log")
    processes = [context.Process(target=_make_very_slowly, args=(folder, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert Path(log).read_text() == "made\n"


def _make_very_slowly(folder: str, log: str) -> None:
    def make() -> dict[str, np.ndarray]:
        with Path(log).open("a") as file:
            file.write("made\n")
        time.sleep(1.5)
        return {"a": np.arange(7)}

    cache.load_or_make(folder, KEY, make)


def build(prefix: Path, folder: Path) -> int:
    train, _, _ = build_train_valid_test_datasets(
        data_path=[str(prefix)],
        split="1",
        samples=(None, 0, 0),
        seq_length=4,
        seed=1,
        cache_path=str(folder),
    )
    assert train is not None
    return len(train)


def write(prefix: Path, documents: int) -> None:
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for _ in range(documents):
            builder.add_document([1, 2, 3, 4])


def test_new_data_under_an_old_name_is_new(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "cache"
    write(data, 10)
    stamp = Path(f"{data}.idx").stat().st_mtime_ns
    assert build(data, folder) == 9
    write(data, 20)
    os.utime(f"{data}.idx", ns=(stamp, stamp))
    assert build(data, folder) == 19
    write(tmp_path / "copy", 20)  # the same content elsewhere: the same entry
    assert build(tmp_path / "copy", folder) == 19
    assert len(entries(folder)) == 2


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot keep sample indices in .*--data-cache-path"):
        cache.load_or_make(str(tmp_path / "file"), {"kind": "x"}, lambda: {"a": np.arange(3)})
