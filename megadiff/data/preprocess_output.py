"""The files of a preprocessing run: parts that grow, a journal of where it stands, a lock."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megadiff.data.documents import Problem
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import bin_path, idx_path, publish
from megadiff.data.inputs import Position


@dataclass(frozen=True)
class Encoded:
    """Token bytes, int32 sequence lengths and int32 sequences per document, for one key."""

    tokens: bytes
    lengths: bytes
    documents: bytes
    token_count: int
    longest: int  # document, in tokens


@dataclass(frozen=True)
class Totals:
    """What a run has read and written so far; `longest` is in tokens."""

    documents: int = 0
    empty: int = 0
    skipped: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """Where a run stands between two blocks: where reading goes on, how long the parts are."""

    position: Position
    sizes: list[int]
    totals: Totals


class Parts:
    """`.bin.part`, `.lengths.part`, `.documents.part` of each output, and the log of problems."""

    SUFFIXES = (".bin.part", ".lengths.part", ".documents.part")

    def __init__(self, output_prefix: str, outputs: Sequence[str]) -> None:
        self.outputs = list(outputs)
        self.problems = Path(output_prefix + ".errors.jsonl")
        self.paths = [Path(prefix + suffix) for prefix in outputs for suffix in self.SUFFIXES]
        self.paths.append(self.problems)
        self._files: list[BinaryIO] = []

    def take_back(self, sizes: Sequence[int]) -> None:
        """Undo what a run of parts of `sizes` bytes had published when it was interrupted."""
        for part, prefix, size in zip(self.paths[::3], self.outputs, sizes[::3], strict=False):
            whole = Path(bin_path(prefix))
            if not part.exists() and whole.is_file() and whole.stat().st_size == size:
                Path(idx_path(prefix)).unlink(missing_ok=True)
                whole.rename(part)

    def missing(self, sizes: Sequence[int]) -> list[Path]:
        """The parts that do not have `sizes` bytes."""
        return [
            path
            for path, size in zip(self.paths, sizes, strict=True)
            if size and not (path.is_file() and path.stat().st_size >= size)
        ]

    def open(self, sizes: Sequence[int]) -> None:
        """Open to append after `sizes` bytes; what an interrupted run wrote beyond is cut off."""
        for path, size in zip(self.paths, sizes, strict=True):
            path.touch()
            os.truncate(path, size)
            self._files.append(path.open("ab"))

    def append(self, encoded: Sequence[Encoded], problems: Sequence[Problem]) -> None:
        for number, one in enumerate(encoded):
            files = self._files[3 * number : 3 * number + 3]
            for file, data in zip(files, (one.tokens, one.lengths, one.documents), strict=True):
                file.write(data)
        for problem in problems:
            line = json.dumps(asdict(problem), ensure_ascii=False) + "\n"
            self._files[-1].write(line.encode("utf-8", "backslashreplace"))

    def sizes(self) -> list[int]:
        return [file.tell() for file in self._files]

    def save(self) -> None:
        """Make everything durable."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """What `save` did not make durable may be lost: on a full disk closing fails too."""
        for file in self._files:
            with suppress(OSError):
                file.close()
        self._files = []

    def remove(self) -> None:
        self.close()
        indices = [Path(idx_path(prefix) + ".part") for prefix in self.outputs]
        for path in self.paths + indices:
            path.unlink(missing_ok=True)

    def finish(self, dtype: np.dtype) -> None:
        """Turn the parts into datasets; until `clear` it can be taken back."""
        self.close()
        for number, prefix in enumerate(self.outputs):
            tokens, lengths_part, documents_part = self.paths[3 * number : 3 * number + 3]
            lengths = np.fromfile(lengths_part, dtype=np.int32)
            counts = np.fromfile(documents_part, dtype=np.int32)
            documents = np.zeros(len(counts) + 1, dtype=np.int64)
            np.cumsum(counts, out=documents[1:])
            publish(prefix, tokens, dtype, lengths, documents)

    def clear(self) -> None:
        """Remove what is left after `finish`; the log of problems stays if there are any."""
        for path in self.paths:
            if path != self.problems or not path.stat().st_size:
                path.unlink(missing_ok=True)


class Journal:
    """`PREFIX.journal`: what run this is, and after each partition where it stood."""

    def __init__(self, output_prefix: str, run: dict[str, object]) -> None:
        self.path = Path(output_prefix + ".journal")
        self.run = run

    def read(self, overwrite: bool) -> State | None:
        """Where an interrupted run of the same settings stood, if there is one.

        A run of other settings is an error, or with `overwrite` as if it were not there.
        """
        if not self.path.exists():
            return None
        saved = json.loads(self.path.read_text())
        differing = [name for name, value in self.run.items() if saved["run"].get(name) != value]
        if differing and overwrite:
            return None
        if differing:
            raise DataError(
                f"{self.path} is of an unfinished run whose {', '.join(differing)} differ: give "
                "its settings again to go on with it, or --overwrite to discard it"
            )
        return State(Position(**saved["position"]), saved["sizes"], Totals(**saved["totals"]))

    def write(self, reached: State) -> None:
        state = {"run": self.run, **asdict(reached)}
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def exclusive(output_prefix: str) -> Iterator[None]:
    """Holds `PREFIX.lock`; a second run on the same prefix is refused."""
    path = Path(output_prefix + ".lock")
    if not path.parent.is_dir():
        raise DataError(f"--output-prefix {output_prefix}: there is no folder {path.parent}")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
        except OSError:
            ours = False
        if not ours:
            raise DataError(f"another run is writing {output_prefix} (it holds {path})")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
