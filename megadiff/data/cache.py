"""Index arrays kept on disk, made once and memory-mapped by every process that needs them.

Processes agree through files alone: the first to make a lock file builds, the others wait for the
result, on a shared disk as on disks of their own. The result is the same whoever builds it and gets
its name when it is whole, so that a lock that fails costs time, never correctness.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from megadiff.data.errors import DataError

HEARTBEAT = 5.0  # seconds between signs of life of the process that builds
STALE = 60.0  # seconds without one after which its lock counts as left behind


def digest(array: np.ndarray) -> str:
    """A hash of the array's content, so that the cache follows the data and not its path."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.blake2b(flat.data, digest_size=16).hexdigest()


def load_or_make(
    folder: str | None, key: dict, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays that `make` returns; with a `folder`, from its entry for `key` once it is there.

    `key["kind"]` begins the entry's name, the rest of it and every other value go into its hash.
    Raises DataError when `folder` cannot be used.
    """
    if folder is None:
        return make()
    text = json.dumps(key, sort_keys=True, indent=1)
    entry = Path(folder) / f"{key['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    lock = entry.with_name(entry.name + ".lock")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        while not entry.is_dir():
            with _locked(lock) as ours:
                if ours and not entry.is_dir():
                    _store(entry, text, make())
            if not ours:
                _wait(entry, lock)
        return {path.stem: np.load(path, mmap_mode="r") for path in entry.glob("*.npy")}
    except OSError as error:
        raise DataError(
            f"cannot keep sample indices in {folder} ({error.strerror}: {error.filename}); give "
            "another --data-cache-path"
        ) from error


def _store(entry: Path, description: str, arrays: dict[str, np.ndarray]) -> None:
    part = entry.with_name(f"{entry.name}.part-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        for name, array in arrays.items():
            with (part / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                os.fsync(file.fileno())
        (part / "description.json").write_text(description)
        with suppress(OSError):  # another process was first: its entry holds the same
            part.rename(entry)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if not entry.is_dir():
        raise OSError(f"{entry}: cannot be written")


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process holds the lock file; it touches the file for as long as it does."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        yield False
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            with suppress(OSError):
                path.touch()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield True
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def _wait(entry: Path, lock: Path) -> None:
    """Until `entry` is there or its lock is gone. A lock whose time stamp stands still for long is
    removed; clocks of hosts are not compared."""
    stamp, since, told = -1.0, 0.0, time.monotonic()
    while not entry.is_dir():
        try:
            found = lock.stat().st_mtime
        except FileNotFoundError:
            return
        now = time.monotonic()
        if found != stamp:
            stamp, since = found, now
        elif now - since > STALE:
            print(f"removing {lock}: its process gave no sign of life", file=sys.stderr, flush=True)
            lock.unlink(missing_ok=True)
        if now - told > 30.0:
            print(f"waiting for another process to build {entry}", file=sys.stderr, flush=True)
            told = now
        time.sleep(0.2)
