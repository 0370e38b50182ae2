"""Raw text to indexed datasets: a reader, tokenizing workers, and a writer that can be resumed.

The reader cuts inputs into blocks of whole documents, workers turn a block into token bytes, the
writer appends these in the order of the blocks, so that the result does not depend on the number of
workers. After every partition the writer makes its parts durable and notes in a journal where
reading goes on.
"""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from megadiff.data.documents import Problem, read_documents
from megadiff.data.indexed_dataset import DataError, best_dtype, publish
from megadiff.data.inputs import Block, Position, list_inputs, read_blocks
from megadiff.data.parallel_map import ordered_map
from megadiff.data.progress import Progress
from megadiff.data.sentences import split_sentences
from megadiff.data.tokenizers import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class TokenizerSettings:
    """Arguments of `build_tokenizer`."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "cl100k"

    def build(self) -> Tokenizer:
        return build_tokenizer(**asdict(self))

    def fingerprint(self) -> dict[str, object]:
        """The settings with the files' content in place of their paths."""
        values = asdict(self)
        for name in ("tokenizer_model", "vocab_file", "merge_file"):
            path = values[name] and Path(values[name])
            if path and path.is_dir():
                path = path / "tokenizer.json"
            if path:
                values[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return values


@dataclass(frozen=True)
class PreprocessSettings:
    """What to read, how to tokenize it and where to write; see the flags of the tool."""

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: TokenizerSettings
    keys: Sequence[str] = ("text",)
    input_format: Literal["auto", "jsonl", "text"] = "auto"
    separator: str | None = None
    append_eod: bool = False
    bos: bool = False
    split_sentences: bool = False
    workers: int = 1
    partition_bytes: int = 1 << 28
    on_error: Literal["stop", "skip"] = "stop"
    max_errors: int = 1000
    overwrite: bool = False
    log_interval: int = 100_000

    @property
    def separator_bytes(self) -> bytes | None:
        return self.separator.encode() if self.separator else None

    def outputs(self) -> list[str]:
        """The prefixes of the datasets, one for each key, named as Megatron names them."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.output_prefix}_{key}_{level}" for key in self.keys]


@dataclass
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
class Encoded:
    """Token bytes, int32 sequence lengths and int32 sequences per document, for one key."""

    tokens: bytes
    lengths: bytes
    documents: bytes
    longest: int


@dataclass(frozen=True)
class BlockResult:
    """A block after a worker; `after` and `disk_bytes` as in `Block`."""

    encoded: list[Encoded]
    documents: int
    empty: int
    text_bytes: int
    problems: list[Problem]
    after: Position
    disk_bytes: int


_worker: tuple[PreprocessSettings, Tokenizer, np.dtype]  # of this process, set once when it starts


def _start(settings: PreprocessSettings) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are the parallelism
    tokenizer = settings.tokenizer.build()
    _worker = settings, tokenizer, best_dtype(tokenizer.vocab_size)


def _process(block: Block) -> BlockResult:
    settings, tokenizer, dtype = _worker
    problems: list[Problem] = []
    texts: list[list[str]] = []
    for document in read_documents(block, settings.keys, settings.separator_bytes):
        if isinstance(document, Problem):
            problems.append(document)
        else:
            texts.append(document)
    encoded, empty = [], 0
    for key in range(len(settings.keys)):
        kept = [document[key] for document in texts if document[key].strip()]
        empty += len(texts) - len(kept)
        encoded.append(_encode(kept, settings, tokenizer, dtype))
    size = sum(len(text.encode()) for document in texts for text in document)
    return BlockResult(encoded, len(texts), empty, size, problems, block.after, block.disk_bytes)


def _encode(
    texts: list[str], settings: PreprocessSettings, tokenizer: Tokenizer, dtype: np.dtype
) -> Encoded:
    """Token bytes of all `texts`, each with its `bos` and `eod`."""
    parts = [split_sentences(text) for text in texts] if settings.split_sentences else None
    flat = texts if parts is None else [sentence for part in parts for sentence in part]
    ids = tokenizer.encode_batch(flat)
    counts = [1] * len(texts) if parts is None else [len(part) for part in parts]
    tokens = array("H" if dtype == np.uint16 else "i")
    lengths, longest, at = array("i"), 0, 0
    for count in counts:
        begin = len(tokens)
        for number in range(at, at + count):
            before = len(tokens)
            if settings.bos and number == at:
                tokens.append(_required(tokenizer.bos, "--bos"))
            tokens.frombytes(np.asarray(ids[number], dtype=dtype).tobytes())
            if settings.append_eod and number == at + count - 1:
                tokens.append(_required(tokenizer.eod, "--append-eod"))
            lengths.append(len(tokens) - before)
        longest = max(longest, len(tokens) - begin)
        at += count
    return Encoded(tokens.tobytes(), lengths.tobytes(), array("i", counts).tobytes(), longest)


def _required(token: int | None, flag: str) -> int:
    if token is None:
        raise DataError(f"{flag}: this tokenizer has no such token")
    return token


class _Parts:
    """The growing files of one run; `save` makes them durable, `Journal` says how long they
    were."""

    SUFFIXES = (".bin.part", ".lengths.part", ".documents.part")

    def __init__(self, settings: PreprocessSettings) -> None:
        self.paths = [Path(p + s) for p in settings.outputs() for s in self.SUFFIXES]
        self.paths.append(Path(settings.output_prefix + ".errors.jsonl"))
        self._files: list[BinaryIO] = []

    def open(self, sizes: Sequence[int]) -> None:
        for path, size in zip(self.paths, sizes, strict=True):
            path.touch()
            os.truncate(path, size)
            self._files.append(path.open("ab"))

    def append(self, result: BlockResult) -> None:
        for number, encoded in enumerate(result.encoded):
            files = self._files[3 * number : 3 * number + 3]
            files[0].write(encoded.tokens)
            files[1].write(encoded.lengths)
            files[2].write(encoded.documents)
        for problem in result.problems:
            line = json.dumps(asdict(problem), ensure_ascii=False) + "\n"
            self._files[-1].write(line.encode("utf-8", "backslashreplace"))

    def save(self) -> list[int]:
        sizes = []
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            sizes.append(os.fstat(file.fileno()).st_size)
        return sizes

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def remove(self) -> None:
        self.close()
        for path in self.paths:
            path.unlink(missing_ok=True)


class _Journal:
    """`PREFIX.journal`: the settings of the run, and after each partition where it stood."""

    def __init__(self, settings: PreprocessSettings, inputs: list[str]) -> None:
        self.path = Path(settings.output_prefix + ".journal")
        self.run = {
            "inputs": [_identity(path) for path in inputs],
            "tokenizer": settings.tokenizer.fingerprint(),
            "keys": list(settings.keys),
            "input_format": settings.input_format,
            "separator": settings.separator,
            "append_eod": settings.append_eod,
            "bos": settings.bos,
            "split_sentences": settings.split_sentences,
        }

    def read(self) -> tuple[Position, list[int], Totals] | None:
        """Where an interrupted run of the same settings stood, if there is one."""
        if not self.path.exists():
            return None
        saved = json.loads(self.path.read_text())
        differing = [name for name, value in self.run.items() if saved["run"].get(name) != value]
        if differing:
            raise DataError(
                f"{self.path} is of an unfinished run whose {', '.join(differing)} differ: "
                "give its settings again to go on with it, or --overwrite to discard it"
            )
        return Position(**saved["position"]), saved["sizes"], Totals(**saved["totals"])

    def write(self, position: Position, sizes: list[int], totals: Totals) -> None:
        state = {
            "run": self.run,
            "position": asdict(position),
            "sizes": sizes,
            "totals": asdict(totals),
        }
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.path)


def _identity(path: str) -> list[object]:
    if path == "-":
        return [path]
    stat = Path(path).stat()
    return [path, stat.st_size, stat.st_mtime_ns]


@contextmanager
def _exclusive(prefix: str) -> Iterator[None]:
    """Holds `PREFIX.lock`; a second run on the same prefix is refused."""
    path = Path(prefix + ".lock")
    if not path.parent.is_dir():
        raise DataError(f"--output-prefix {prefix}: there is no folder {path.parent}")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another run is writing {prefix} (it holds {path})") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def preprocess(settings: PreprocessSettings) -> Totals:
    """Run the whole; returns what was written. Raises DataError for bad input or settings."""
    inputs = list_inputs(settings.inputs)
    tokenizer = settings.tokenizer.build()
    dtype = best_dtype(tokenizer.vocab_size)
    if settings.append_eod:
        _required(tokenizer.eod, "--append-eod")
    if settings.bos:
        _required(tokenizer.bos, "--bos")
    with _exclusive(settings.output_prefix):
        parts, journal = _Parts(settings), _Journal(settings, inputs)
        if settings.overwrite:
            parts.remove()
            journal.path.unlink(missing_ok=True)
        else:
            for prefix in settings.outputs():
                if Path(prefix + ".idx").exists():
                    raise DataError(f"{prefix}.idx exists; give --overwrite to replace it")
        position, sizes, totals = Position(), [0] * len(parts.paths), Totals()
        if state := journal.read():
            position, sizes, totals = state
            print(f"going on after {totals.documents} documents of an interrupted run", flush=True)
        parts.open(sizes)
        try:
            _run(settings, inputs, position, totals, parts, journal)
        finally:
            parts.close()
        if totals.tokens == 0:
            parts.remove()
            journal.path.unlink(missing_ok=True)
            raise DataError("no document with text in the input; nothing was written")
        for prefix in settings.outputs():
            _finish(prefix, dtype)
        journal.path.unlink(missing_ok=True)
        if not totals.skipped:
            parts.paths[-1].unlink()
    return totals


def _run(
    settings: PreprocessSettings,
    inputs: list[str],
    position: Position,
    totals: Totals,
    parts: _Parts,
    journal: _Journal,
) -> None:
    blocks = read_blocks(
        inputs,
        position,
        keys=settings.keys,
        separator=settings.separator_bytes,
        input_format=settings.input_format,
    )
    resumable = "-" not in inputs
    input_sizes = [0 if path == "-" else Path(path).stat().st_size for path in inputs]
    progress = Progress(sum(input_sizes), settings.log_interval)
    since_save = 0
    results = ordered_map(_process, blocks, settings.workers, _start, (settings,))
    try:
        for result in results:
            _count(totals, result, settings)
            parts.append(result)
            since_save += result.text_bytes
            if resumable and since_save >= settings.partition_bytes:
                journal.write(result.after, parts.save(), totals)
                since_save = 0
            read = sum(input_sizes[: result.after.file]) + result.disk_bytes
            progress.update(read, totals.documents, totals.text_bytes, totals.tokens)
    finally:
        results.close()  # type: ignore[attr-defined]
        progress.close()
    parts.save()


def _count(totals: Totals, result: BlockResult, settings: PreprocessSettings) -> None:
    """Add a block to the totals; raises the first problem that may not be passed over."""
    if result.problems and settings.on_error == "stop":
        raise DataError(f"{result.problems[0]} (--on-error skip passes over such documents)")
    totals.documents += result.documents
    totals.empty += result.empty
    totals.text_bytes += result.text_bytes
    totals.skipped += len(result.problems)
    for problem in result.problems:
        kind = problem.reason.split(":")[0]
        totals.reasons[kind] = totals.reasons.get(kind, 0) + 1
        if totals.skipped > settings.max_errors:
            raise DataError(
                f"more than --max-errors {settings.max_errors} problems; last: {problem}"
            )
    for encoded in result.encoded:
        totals.tokens += len(encoded.tokens) // _itemsize(encoded)
        totals.longest = max(totals.longest, encoded.longest)


def _itemsize(encoded: Encoded) -> int:
    count = int(np.frombuffer(encoded.lengths, dtype=np.int32).sum(dtype=np.int64))
    return len(encoded.tokens) // count if count else 1


def _finish(prefix: str, dtype: np.dtype) -> None:
    """Turn the parts of one key into its dataset."""
    lengths_part, documents_part = Path(prefix + ".lengths.part"), Path(prefix + ".documents.part")
    lengths = np.fromfile(lengths_part, dtype=np.int32)
    counts = np.fromfile(documents_part, dtype=np.int32)
    documents = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=documents[1:])
    publish(prefix, Path(prefix + ".bin.part"), dtype, lengths, documents)
    lengths_part.unlink()
    documents_part.unlink()
