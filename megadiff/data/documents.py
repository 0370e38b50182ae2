"""From a block of an input file to its documents; what is wrong with one becomes a `Problem`."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megadiff.data.inputs import Block

_JSON = json.JSONDecoder()
_JSON_TYPES = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string",
    list: "a list", dict: "an object",
}  # fmt: skip
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


def read_documents(
    block: Block, keys: Sequence[str], separator: bytes | None
) -> Iterator[list[str] | Problem]:
    """The texts of each document of `block`, one for each of `keys`, or the problem with it.

    Plain text gives its text for the only key. Blank lines of JSON lines are passed over.
    """
    if block.kind == "error":
        yield Problem(block.source, "", "unreadable file", block.data.decode())
        return
    unit, documents, read = _reader(block, keys, separator)
    for number, document in enumerate(documents, block.line + 1):
        try:
            texts = read(document, keys)
            for text in texts:
                if not text.isascii():
                    text.encode("utf-8")
        except _Bad as bad:
            yield Problem(block.source, f"{unit} {number}", *bad.args)
        except UnicodeEncodeError as error:
            detail = f"a lone surrogate at character {error.start}"
            yield Problem(block.source, f"{unit} {number}", "not Unicode", detail)
        else:
            if texts:
                yield texts


def _reader(
    block: Block, keys: Sequence[str], separator: bytes | None
) -> tuple[str, Iterable[Any], Callable[[Any, Sequence[str]], list[str]]]:
    """What a document of the block is called, the documents as they lie in it, what reads one."""
    if block.kind == "jsonl":
        return "line", block.data.split(b"\n"), _json_texts
    if block.kind == "text":
        texts = block.data.split(separator) if separator else [block.data]
        if separator and not texts[-1]:  # after the last separator
            texts.pop()
        return "document", ([text.removeprefix(BOM)] for text in texts), _cells
    return "row", _rows(block.data, keys), _cells


def _rows(data: bytes, keys: Sequence[str]) -> Iterator[Sequence[bytes | None]]:
    import pyarrow as pa

    schema = pa.schema([(key, pa.large_binary()) for key in keys])
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cells(values: Sequence[bytes | None], keys: Sequence[str]) -> list[str]:
    texts = []
    for value, key in zip(values, keys, strict=True):
        if value is None:
            raise _Bad("not text", f"{key!r} is null")
        texts.append(_decode(value))
    return texts


def _json_texts(raw: bytes, keys: Sequence[str]) -> list[str]:
    line = raw.removeprefix(BOM).strip()
    if not line:
        return []
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
        raise _Bad("not an object", f"the line holds {_JSON_TYPES[type(value)]}")
    texts = []
    for key in keys:
        if key not in value:
            has = ", ".join(map(repr, value)) or "none"
            raise _Bad("no such key", f"{key!r}; it has {has[:200]}")
        if not isinstance(value[key], str):
            raise _Bad("not text", f"{key!r} is {_JSON_TYPES[type(value[key])]}")
        texts.append(value[key])
    return texts


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = " (it looks like UTF-16)" if utf16 else ""
        at = f"byte 0x{raw[error.start]:02x} at {error.start}{hint}"
        raise _Bad("not UTF-8", f"{at}; convert it with iconv") from None
