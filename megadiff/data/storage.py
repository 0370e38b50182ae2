"""Bytes of a `.bin`: memory-mapped, read in place, or fetched in blocks from an object store."""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.data.errors import DataError
from megadiff.libraries import need_library

BLOCK = 4 << 20  # bytes that are fetched from an object store at once
ATTEMPTS = 6  # of one fetch, with pauses of 1, 2, 4, ... seconds between them


class MappedBytes:
    """A local file, memory-mapped."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.size = Path(path).stat().st_size
        # an empty file cannot be mapped
        self._bytes = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)

    def read(self, begin: int, size: int) -> np.ndarray:
        if not 0 <= begin <= begin + size <= self.size:
            raise DataError(f"{self._path}: {self.size} bytes, {begin} to {begin + size} are asked")
        return self._bytes[begin : begin + size]


class FileBytes:
    """A local file, read where asked."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115 (open as long as this is)
        self.size = Path(path).stat().st_size

    def read(self, begin: int, size: int) -> np.ndarray:
        parts = []
        while size > 0:
            part = os.pread(self._file.fileno(), size, begin)
            if not part:
                raise DataError(f"{self._file.name}: ends at byte {begin}, {size} bytes early")
            parts.append(part)
            begin += len(part)
            size -= len(part)
        return np.frombuffer(b"".join(parts), dtype=np.uint8)


class RemoteBytes:
    """An object of a store that fsspec knows, in blocks that are kept in a local folder.

    All processes of a node share the folder. A fetch that fails is tried again; what another
    version of the object left in the folder is not used.
    """

    def __init__(self, url: str, folder: str) -> None:
        self._url = url
        self._fs, self._path = _filesystem(url)
        info = _with_retries(url, lambda: self._fs.info(self._path))
        self.size = int(info["size"])
        version = f"{url} {self.size} {self._fs.ukey(self._path)}"
        self._folder = Path(folder) / hashlib.sha256(version.encode()).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, begin: int, size: int) -> np.ndarray:
        end = begin + size
        if end > self.size:
            raise DataError(f"{self._url}: {self.size} bytes, {end} are needed")
        blocks = range(begin // BLOCK, -(-end // BLOCK)) if size else range(0)
        parts = []
        for number in blocks:
            first, last = number * BLOCK, min((number + 1) * BLOCK, self.size)
            with self._kept(f"{number:08d}", first, last).open("rb") as file:
                file.seek(max(begin - first, 0))
                parts.append(file.read(min(end, last) - max(begin, first)))
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def local_copy(self) -> Path:
        """The whole object as a local file."""
        return self._kept("whole", 0, self.size)

    def _kept(self, name: str, begin: int, end: int) -> Path:
        """The file `name` of the folder, with bytes `[begin, end)`; fetched if it is not there."""
        path = self._folder / name
        if not path.exists():
            part = path.with_name(f"{name}.part-{os.getpid()}-{time.monotonic_ns()}")
            try:
                with part.open("wb") as file:
                    for at in range(begin, end, BLOCK):
                        file.write(self._fetch(at, min(at + BLOCK, end)))
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)  # of a fetch that failed
        return path

    def _fetch(self, begin: int, end: int) -> bytes:
        def fetch() -> bytes:
            data = self._fs.cat_file(self._path, start=begin, end=end)
            if len(data) != end - begin:
                raise OSError(f"{len(data)} bytes came of {end - begin}")
            return data

        return _with_retries(f"{self._url}, bytes {begin} to {end}", fetch)


Bytes = MappedBytes | FileBytes | RemoteBytes
"""A file of `size` bytes; `read(begin, size)` gives bytes `[begin, begin + size)` as uint8."""


def _with_retries(what: str, call: Any) -> Any:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except FileNotFoundError:
            raise DataError(f"{what}: no such object") from None
        except Exception as error:  # stores raise errors of their own kinds
            if attempt == ATTEMPTS:
                raise DataError(f"{what}: {error} ({ATTEMPTS} attempts)") from error
            pause = 2.0 ** (attempt - 1)
            print(f"{what}: {error}; again in {pause:.0f} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    raise AssertionError("unreachable")


def is_remote(path: str) -> bool:
    return "://" in path


def _filesystem(url: str) -> tuple[Any, str]:
    fsspec = need_library("fsspec", url)
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # the store's own library is missing, or unknown
        raise DataError(f"{url}: {error}") from None
