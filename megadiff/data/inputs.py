"""Raw text files of many kinds, cut into blocks of whole documents that a worker can take.

What a file is, its first bytes say: gzip, zstd, xz, bzip2, Parquet; names decide only between JSON
lines and plain text (`.txt`).
"""

import bz2
import glob
import gzip
import io
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from megadiff.data.errors import DataError
from megadiff.libraries import need_library

Kind = Literal["jsonl", "text", "parquet", "error"]
Readable = io.BufferedReader | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File

BLOCK = 1 << 19  # bytes of text that a worker takes at a time
LONGEST = 1 << 30  # bytes of one document: beyond, a file is no text with line ends
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
TEXT_SUFFIXES = (".txt", ".text", ".md")
FAILURES = (OSError, EOFError, zlib.error, lzma.LZMAError, DataError)  # of reading an input
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", *TEXT_SUFFIXES)


@dataclass(frozen=True)
class Position:
    """Where reading goes on: which input, after how many bytes (rows) and lines of its content."""

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Block:
    """Whole documents of one input. A block of kind "error" has the reason as its data.

    `line` counts the lines (documents of plain text, rows) before the block; `disk_bytes` is how
    much of the input file has been read; `after` is where the next block begins.
    """

    kind: Kind
    source: str
    line: int
    data: bytes
    after: Position
    disk_bytes: int


def list_inputs(words: Sequence[str]) -> list[str]:
    """Files that `--input` names: files, globs, folders (searched through), `-` for standard input.

    Folders and globs give files in natural order (part-2 before part-10), without hidden ones.
    """
    found: list[str] = []
    for word in words:
        if word == "-" or Path(word).is_file():
            files, lacking = [word], ""
        elif Path(word).is_dir():
            files = [str(path) for path in Path(word).rglob("*") if _is_listed(path, word)]
            lacking = f"no {', '.join(SUFFIXES)} file in this folder"
        else:
            names = glob.glob(word, recursive=True)  # noqa: PTH207 (Path takes no absolute pattern)
            files, lacking = [name for name in names if Path(name).is_file()], "no such file"
        if not files:
            raise DataError(f"--input {word}: {lacking}")
        found += sorted(files, key=natural_key)
    for path, count in Counter(found).items():
        if count > 1:
            raise DataError(f"--input names {path} more than once")
    return found


def natural_key(path: str) -> list[tuple[int, str]]:
    """Sorts digits by their number and the rest as text."""
    parts = re.split(r"(\d+)", path)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _is_listed(path: Path, folder: str) -> bool:
    """Whether a search of `folder` takes `path`: a text file, by its name, that is not hidden."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and _content_name(path.name).endswith(SUFFIXES) and path.is_file()


def _content_name(name: str) -> str:
    """The name in lower case and without the suffixes of compression."""
    name = name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def read_blocks(
    paths: Sequence[str],
    start: Position,
    *,
    keys: Sequence[str],
    separator: bytes | None,
    input_format: Literal["auto", "jsonl", "text"] = "auto",
) -> Iterator[Block]:
    """Blocks of all `paths` from `start` on, in order.

    `keys` are the columns to read of Parquet files; `separator` ends a document of plain text
    (None: a file is one document). What is wrong with a file comes as a block of kind "error".
    """
    for number in range(start.file, len(paths)):
        path = paths[number]
        position = start if number == start.file else Position(number)
        try:
            kind = _kind(path, input_format)
            if kind == "text" and len(keys) > 1:
                raise DataError("plain text has no keys: give one of --json-keys")
            if kind == "parquet":
                yield from _parquet_blocks(path, position, keys)
            else:
                end = b"\n" if kind == "jsonl" else separator
                yield from _text_blocks(path, kind, position, end)
        except FAILURES as error:
            yield Block("error", path, 0, str(error).encode(), Position(number + 1), 0)


def _kind(path: str, input_format: Literal["auto", "jsonl", "text"]) -> Kind:
    if path != "-":
        with Path(path).open("rb") as file:
            if file.read(4) == b"PAR1":
                return "parquet"
    if input_format != "auto":
        return input_format
    name = _content_name(path)
    if name.endswith(".parquet"):
        raise DataError("not a Parquet file (it does not begin with PAR1)")
    return "text" if name.endswith(TEXT_SUFFIXES) else "jsonl"


def _text_blocks(path: str, kind: Kind, position: Position, end: bytes | None) -> Iterator[Block]:
    """Blocks that stop after an `end`; the last may lack it."""
    offset, line = position.offset, position.line
    with _open(path) as file:
        for data in _cut(_content(file, path, offset), end):
            offset += len(data)
            count = data.count(end) + (not data.endswith(end)) if end else 1
            after = Position(position.file, offset, line + count)
            yield Block(kind, path, line, data, after, 0 if path == "-" else file.tell())
            line += count


def _cut(chunks: Iterator[bytes], end: bytes | None) -> Iterator[bytes]:
    """Regroup `chunks` in pieces of about `BLOCK` bytes; all but the last stop after an `end`.

    When the input fails on the way, the documents that came whole are given first.
    """
    held, enough = bytearray(), BLOCK
    try:
        for chunk in chunks:
            held += chunk
            if len(held) < enough:
                continue
            if whole := _take_whole(held, end):
                yield whole
            if len(held) > LONGEST:
                raise DataError(f"a document of more than {LONGEST} bytes: is this a text file?")
            enough = max(BLOCK, 2 * len(held))  # so that a long document is searched few times
    except FAILURES:
        if whole := _take_whole(held, end):
            yield whole
        raise
    if held:
        yield bytes(held)


def _take_whole(held: bytearray, end: bytes | None) -> bytes:
    """Take what stands up to the last `end` out of `held`; nothing where there is none."""
    if not end:
        return b""
    # where separators overlap, as in five line ends, the first one counts
    one = len(end) == 1
    cut = held.rfind(end) + 1 if one else len(held) - len(held.split(end)[-1])
    whole = bytes(held[:cut])
    del held[:cut]
    return whole


def _open(path: str) -> io.BufferedReader:
    if path != "-":
        return Path(path).open("rb")
    if sys.stdin is None:
        raise DataError("standard input is closed")
    return cast(io.BufferedReader, sys.stdin.buffer)


def _content(file: io.BufferedReader, path: str, offset: int) -> Iterator[bytes]:
    """The bytes of `file` after decompression, from the byte `offset` of them on."""
    magic = file.peek(6)[:6]
    if not magic and path.lower().endswith(COMPRESSED):
        raise DataError("a compressed file of 0 bytes: was it cut off?")
    if magic[:2] == b"\x1f\x8b":
        chunks = _chunks(gzip.GzipFile(fileobj=file))
    elif magic == b"\xfd7zXZ\x00":
        chunks = _chunks(lzma.LZMAFile(file))  # noqa: SIM115 (our caller closes `file`)
    elif magic[:3] == b"BZh":
        chunks = _chunks(bz2.BZ2File(file))
    elif magic[:4] == b"\x28\xb5\x2f\xfd" or (magic[1:4] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        chunks = _zstd(file)
    else:
        if offset:
            file.seek(offset)
        offset, chunks = 0, _chunks(file)
    for chunk in chunks:
        if offset < len(chunk):
            yield chunk[offset:]
        offset = max(0, offset - len(chunk))


def _chunks(file: Readable) -> Iterator[bytes]:
    return iter(lambda: file.read1(BLOCK), b"")  # read1: what came before a failure is not lost


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a zstd file; one that ends inside a frame is an error."""
    zstandard = need_library("zstandard", "zstd")
    library = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = library.decompressobj()
    pending, inside = b"", False
    while data := pending or file.read(BLOCK // 4):
        try:
            piece = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise DataError(f"damaged zstd: {error}") from None
        pending, inside = b"", True
        if frame.eof:
            pending, inside = frame.unused_data, False
            frame = library.decompressobj()
        if piece:
            yield piece
    if inside:
        raise DataError("zstd stream ends early: the file was cut off")


def _parquet_blocks(path: str, position: Position, keys: Sequence[str]) -> Iterator[Block]:
    """Row batches as Arrow's messages, the columns `keys` as bytes."""
    pa = need_library("pyarrow", "Parquet")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow, keys)
            size = Path(path).stat().st_size
            rows = max(file.metadata.num_rows, 1)
            at = 0  # rows before the row group, then before the batch
            for group in range(file.num_row_groups):
                meta = file.metadata.row_group(group)
                if at + meta.num_rows <= position.offset:
                    at += meta.num_rows
                    continue
                step = max(1, BLOCK * meta.num_rows // max(meta.total_byte_size, 1))
                for batch in file.iter_batches(min(step, 65536), [group], list(keys)):
                    begin, at = at, at + batch.num_rows
                    if at <= position.offset:
                        continue
                    if begin < position.offset:
                        batch = batch.slice(position.offset - begin)
                        begin = position.offset
                    columns = [batch.column(key).cast(pa.large_binary()) for key in keys]
                    data = pa.record_batch(columns, names=list(keys)).serialize().to_pybytes()
                    after = Position(position.file, at, at)
                    yield Block("parquet", path, begin, data, after, size * at // rows)
    except pa.ArrowException as error:
        raise DataError(f"damaged Parquet: {error}") from None


def _check_columns(schema, keys: Sequence[str]) -> None:
    import pyarrow as pa

    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    for key in keys:
        if key not in schema.names:
            raise DataError(f"no column {key!r}; it has {', '.join(schema.names)}")
        if schema.field(key).type not in texts:
            raise DataError(f"column {key!r} is {schema.field(key).type}, not text")
