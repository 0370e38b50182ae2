"""Raw text to indexed datasets: a reader, tokenizing workers, and a writer that can be resumed.

The reader cuts inputs into blocks of whole documents, workers turn a block into token bytes, the
writer appends these in the order of the blocks, so that the result does not depend on the number of
workers. After every partition, and when it has to stop, the writer makes its parts durable and
notes in a journal where reading goes on.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from megadiff.data.documents import Problem, read_documents
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import best_dtype, origin_path, refuse_existing
from megadiff.data.inputs import Block, Position, list_inputs, read_blocks
from megadiff.data.long_text import encode_all
from megadiff.data.parallel_map import ordered_map
from megadiff.data.preprocess_output import Encoded, Journal, Parts, State, Totals, exclusive
from megadiff.data.progress import Progress
from megadiff.data.sentences import split_sentences
from megadiff.data.tokenizers import Tokenizer, TokenizerSettings


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

    def identity(self, inputs: Sequence[str]) -> dict[str, object]:
        """What a run must have in common with an interrupted one to go on from there."""
        names = ("input_format", "separator", "append_eod", "bos", "split_sentences")
        return {
            "inputs": [_file_identity(path) for path in inputs],
            "tokenizer": self.tokenizer.fingerprint(),
            "keys": list(self.keys),
            **{name: getattr(self, name) for name in names},
        }


def _file_identity(path: str) -> list[object]:
    if path == "-":
        return [path]
    stat = Path(path).stat()
    return [path, stat.st_size, stat.st_mtime_ns]


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


def make_worker(settings: PreprocessSettings) -> Callable[[Block], BlockResult]:
    """What a worker process does with a block; loads the tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    tokenizer = settings.tokenizer.build()
    return partial(_process, settings, tokenizer, best_dtype(tokenizer.vocab_size))


def _process(
    settings: PreprocessSettings, tokenizer: Tokenizer, dtype: np.dtype, block: Block
) -> BlockResult:
    problems: list[Problem] = []
    documents: list[list[str]] = []
    for document in read_documents(block, settings.keys, settings.separator_bytes):
        if isinstance(document, Problem):
            problems.append(document)
        else:
            documents.append(document)
    encoded, empty, size = [], 0, 0
    for key in range(len(settings.keys)):
        texts = [texts[key] for texts in documents if texts[key].strip()]
        empty += len(documents) - len(texts)
        size += sum(len(text.encode()) for text in texts)
        try:
            encoded.append(_encode(texts, settings, tokenizer, dtype))
        except DataError as error:
            raise DataError(f"{block.source}, after line {block.line}: {error}") from None
    return BlockResult(
        encoded, len(documents), empty, size, problems, block.after, block.disk_bytes
    )


def _encode(
    texts: list[str], settings: PreprocessSettings, tokenizer: Tokenizer, dtype: np.dtype
) -> Encoded:
    """All `texts` with their `bos` and `eod`, one sequence each or one per sentence."""
    parts = [split_sentences(text) if settings.split_sentences else [text] for text in texts]
    ids = encode_all(tokenizer, [sequence for part in parts for sequence in part])
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    counts = np.fromiter(map(len, parts), np.int32, len(parts))
    ends = np.cumsum(counts)  # the sequence after the last of each document
    firsts, lasts = ends - counts, ends - 1
    lengths[firsts] += settings.bos
    lengths[lasts] += settings.append_eod
    after = np.cumsum(lengths, dtype=np.int64)  # the token after the last of each sequence
    begins = after - lengths
    tokens = np.empty(lengths.sum(dtype=np.int64), dtype=dtype)
    if settings.bos:
        tokens[begins[firsts]] = tokenizer.bos
        begins[firsts] += 1
    for begin, sequence in zip(begins.tolist(), ids, strict=True):
        tokens[begin : begin + len(sequence)] = sequence
    if settings.append_eod:
        tokens[after[lasts] - 1] = tokenizer.eod
    longest = np.add.reduceat(lengths, firsts).max() if len(parts) else 0
    return Encoded(tokens.tobytes(), lengths.tobytes(), counts.tobytes(), len(tokens), int(longest))


def preprocess(settings: PreprocessSettings) -> Totals:
    """Run the whole; returns what was written. Raises DataError for bad input or settings."""
    inputs = list_inputs(settings.inputs)
    tokenizer = settings.tokenizer.build()
    for token, flag in ((tokenizer.eod, "append_eod"), (tokenizer.bos, "bos")):
        if getattr(settings, flag) and token is None:
            raise DataError(f"--{flag.replace('_', '-')}: this tokenizer has no such token")
    with exclusive(settings.output_prefix):
        parts = Parts(settings.output_prefix, settings.outputs())
        journal = Journal(settings.output_prefix, settings.identity(inputs))
        state = journal.read(settings.overwrite)
        if state is not None:
            parts.take_back(state.sizes)
            missing = parts.missing(state.sizes)
            if missing and not settings.overwrite:
                raise DataError(f"{missing[0]} is shorter than its journal says; give --overwrite")
            state = None if missing else state
        refuse_existing(settings.outputs(), settings.overwrite)
        if state is None:
            journal.remove()
            parts.remove()
            state = State(Position(), [0] * len(parts.paths), Totals())
        else:
            print(f"going on after {state.totals.documents} documents of an interrupted run")
        try:
            parts.open(state.sizes)
            state = _run(settings, inputs, state, parts, journal)
            if state.totals.tokens == 0:
                raise DataError("no document with text in the input; nothing was written")
            parts.finish(best_dtype(tokenizer.vocab_size))
            origin = json.dumps({"tokenizer": settings.tokenizer.contents()})
            for path in map(origin_path, settings.outputs()):
                part = Path(path + ".part")
                part.write_text(origin)
                part.rename(path)
        except BaseException:
            if not journal.path.exists():  # there is nothing to go on from
                parts.remove()
            raise
        finally:
            parts.close()
        journal.remove()
        parts.clear()
    return state.totals


def _run(
    settings: PreprocessSettings, inputs: list[str], state: State, parts: Parts, journal: Journal
) -> State:
    """Read, tokenize and append everything that comes after `state`."""
    blocks = read_blocks(
        inputs,
        state.position,
        keys=settings.keys,
        separator=settings.separator_bytes,
        input_format=settings.input_format,
    )
    input_sizes = [0 if path == "-" else Path(path).stat().st_size for path in inputs]
    progress = Progress(sum(input_sizes), settings.log_interval)
    resumable = "-" not in inputs  # standard input cannot be read from the middle
    unsaved = 0
    results = ordered_map(make_worker, (settings,), blocks, settings.workers)
    try:
        for result in results:
            _check(state.totals, result, settings)
            parts.append(result.encoded, result.problems)
            state = State(result.after, parts.sizes(), _add(state.totals, result))
            unsaved += result.text_bytes
            if resumable and unsaved >= settings.partition_bytes:
                parts.save()
                journal.write(state)
                unsaved = 0
            read = sum(input_sizes[: result.after.file]) + result.disk_bytes
            progress.update(read, state.totals)
    finally:
        progress.close()
        parts.save()
        if resumable and state.totals.tokens:
            journal.write(state)
    return state


def _check(totals: Totals, result: BlockResult, settings: PreprocessSettings) -> None:
    """Raises for the first problem that may not be passed over."""
    if not result.problems:
        return
    if settings.on_error == "stop":
        raise DataError(f"{result.problems[0]} (--on-error skip passes over such documents)")
    left = settings.max_errors - totals.skipped
    if len(result.problems) > left:
        raise DataError(
            f"more than --max-errors {settings.max_errors} documents cannot be read, "
            f"the next is {result.problems[max(left, 0)]}"
        )


def _add(totals: Totals, result: BlockResult) -> Totals:
    reasons = Counter(totals.reasons) + Counter(problem.kind for problem in result.problems)
    return Totals(
        documents=totals.documents + result.documents,
        empty=totals.empty + result.empty,
        skipped=totals.skipped + len(result.problems),
        tokens=totals.tokens + sum(encoded.token_count for encoded in result.encoded),
        text_bytes=totals.text_bytes + result.text_bytes,
        longest=max([totals.longest, *(encoded.longest for encoded in result.encoded)]),
        reasons=dict(reasons),
    )
