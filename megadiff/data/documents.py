"""From a block of an input file to its documents; what is wrong with one becomes a `Problem`."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megadiff.data.inputs import Block

_JSON = json.JSONDecoder()
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """Why a document was not read: `place` is "line 3", "row 3", "document 3", or "" for a file."""

    source: str
    place: str
    kind: str
    detail: str

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        return f"{self.source}{where}: {self.kind}: {self.detail}"


class _Bad(Exception):
    """Arguments: kind and detail of the problem."""


Numbered = Iterator[tuple[int, Callable[[], list[str]]]]  # a number from 1, what reads the texts


def read_documents(
    block: Block, keys: Sequence[str], separator: bytes | None
) -> Iterator[list[str] | Problem]:
    """The texts of each document of `block`, one for each of `keys`, or the problem with it.

    Plain text gives its text for the only key. Blank lines of JSON lines are passed over.
    """
    match block.kind:
        case "error":
            yield Problem(block.source, "", "unreadable file", block.data.decode())
            return
        case "jsonl":
            unit, documents = "line", _json_lines(block.data, keys)
        case "text":
            unit, documents = "document", _plain_texts(block.data, separator)
        case "parquet":
            unit, documents = "row", _rows(block.data, keys)
    for number, read in documents:
        try:
            yield [_unicode(text) for text in read()]
        except _Bad as bad:
            yield Problem(block.source, f"{unit} {block.line + number}", *bad.args)


def _json_lines(data: bytes, keys: Sequence[str]) -> Numbered:
    for number, raw in enumerate(data.split(b"\n"), 1):
        line = raw.removeprefix(BOM).strip()
        if line:
            yield number, partial(_json_texts, line, keys)


def _plain_texts(data: bytes, separator: bytes | None) -> Numbered:
    texts = data.split(separator) if separator else [data]
    if separator and not texts[-1]:
        texts.pop()
    for number, raw in enumerate(texts, 1):
        yield number, partial(_cells, [raw.removeprefix(BOM)], ["text"])


def _rows(data: bytes, keys: Sequence[str]) -> Numbered:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all()
    columns = [table.column(key).to_pylist() for key in keys]
    for number, values in enumerate(zip(*columns, strict=True), 1):
        yield number, partial(_cells, values, keys)


def _cells(values: Sequence[bytes | None], keys: Sequence[str]) -> list[str]:
    texts = []
    for value, key in zip(values, keys, strict=True):
        if value is None:
            raise _Bad("not text", f"{key!r} is null")
        texts.append(_decode(value))
    return texts


def _json_texts(line: bytes, keys: Sequence[str]) -> list[str]:
    if b"\0" in line:
        raise _Bad("NUL bytes", "a hole left by an interrupted copy, or UTF-16 text")
    try:
        text = _decode(line)
        value, end = _JSON.raw_decode(text)
        if end != len(text):
            raise _Bad("not JSON", f"more after the value at character {end}")
    except RecursionError:
        raise _Bad("not JSON", "nested too deeply to be read") from None
    except ValueError as error:
        hint = " (one array over many lines is not JSON lines)" if line == b"[" else ""
        raise _Bad("not JSON", f"{error}{hint}") from None
    if not isinstance(value, dict):
        raise _Bad("not an object", f"the line holds {_type_name(value)}")
    texts = []
    for key in keys:
        if key not in value:
            has = ", ".join(map(repr, value)) or "none"
            raise _Bad("no such key", f"{key!r}; it has {has[:200]}")
        if not isinstance(value[key], str):
            raise _Bad("not text", f"{key!r} is {_type_name(value[key])}")
        texts.append(value[key])
    return texts


def _type_name(value: object) -> str:
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
        utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = " (it looks like UTF-16)" if utf16 else ""
        at = f"byte 0x{raw[error.start]:02x} at {error.start}{hint}"
        raise _Bad("not UTF-8", f"{at}; convert it with iconv") from None


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Bad("not Unicode", f"a lone surrogate at character {error.start}") from None
    return text
