"""From a block of an input file to its documents; what is wrong with one becomes a `Problem`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megadiff.data.inputs import Block

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """Why line (row, document of plain text) `line` of `source`, counted from 1, was not read.

    Line 0 is the file as a whole.
    """

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"{self.source}{where}: {self.reason}"


class _Bad(Exception):
    pass


def read_documents(
    block: Block, keys: Sequence[str], separator: bytes | None
) -> Iterator[list[str] | Problem]:
    """The texts of each document of `block`, one for each of `keys`, or the problem with it.

    Plain text gives its text for the only key. Blank lines of JSON lines are passed over.
    """
    if block.kind == "error":
        yield Problem(block.source, 0, block.data.decode())
        return
    readers = {"jsonl": _json_lines, "text": _plain_texts, "parquet": _rows}
    for number, make in readers[block.kind](block, keys, separator):
        try:
            yield [_encodable(text) for text in make()]
        except _Bad as bad:
            yield Problem(block.source, block.line + number, str(bad))


def _json_lines(block: Block, keys: Sequence[str], separator: bytes | None):
    for number, raw in enumerate(block.data.split(b"\n"), 1):
        line = raw.removeprefix(BOM).strip()
        if line:
            yield number, lambda line=line: _json_texts(line, keys)


def _plain_texts(block: Block, keys: Sequence[str], separator: bytes | None):
    texts = block.data.split(separator) if separator else [block.data]
    if separator and not texts[-1]:
        texts.pop()
    for number, raw in enumerate(texts, 1):
        yield number, lambda raw=raw: [_decode(raw.removeprefix(BOM))]


def _rows(block: Block, keys: Sequence[str], separator: bytes | None):
    import pyarrow as pa

    with pa.ipc.open_stream(block.data) as reader:
        table = reader.read_all()
    columns = [table.column(key).to_pylist() for key in keys]
    for row, values in enumerate(zip(*columns, strict=True)):
        yield (
            row + 1,
            lambda values=values: [_cell(v, k) for v, k in zip(values, keys, strict=True)],
        )


def _cell(value: bytes | None, key: str) -> str:
    if value is None:
        raise _Bad(f"{key!r} is null")
    return _decode(value)


def _json_texts(line: bytes, keys: Sequence[str]) -> list[str]:
    if b"\0" in line:
        raise _Bad("NUL bytes: a hole left by an interrupted copy, or UTF-16 text")
    try:
        value = json.loads(_decode(line))
    except RecursionError:
        raise _Bad("not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise _Bad(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Bad(f"JSON {_kind(value)}, not an object with {' and '.join(map(repr, keys))}")
    texts = []
    for key in keys:
        if key not in value:
            raise _Bad(f"no key {key!r}; it has {', '.join(map(repr, value)) or 'none'}"[:300])
        if not isinstance(value[key], str):
            raise _Bad(f"{key!r} is {_kind(value[key])}, not text")
        texts.append(value[key])
    return texts


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = " (it looks like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise _Bad(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}{hint}; convert with iconv"
        ) from None


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Bad(f"a lone surrogate at character {error.start}: not Unicode text") from None
    return text
