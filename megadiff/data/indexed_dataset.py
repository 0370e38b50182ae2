"""Megatron's `.idx/.bin` pair: a file of token ids and an index of sequence lengths and positions.

Layout of the index, little endian and without padding: 9 bytes of magic, u64 version 1, u8 dtype
code, u64 N sequences, u64 D = documents + 1, i32[N] sequence lengths in tokens, i64[N] byte
positions in the .bin, i64[D] document boundaries as sequence numbers, and i8[N] modes in multimodal
files only. A document without tokens repeats a boundary and has no sequence.
"""

import glob
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megadiff.data.errors import DataError
from megadiff.data.storage import Bytes, FileBytes, MappedBytes, RemoteBytes, is_remote

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
DTYPES = {code: np.dtype(name) for code, name in enumerate(_DTYPES, 1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_COPY = 1 << 24  # bytes copied at once
LONGEST_SEQUENCE = 2**31 - 1  # lengths are stored as int32


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron writes for a vocabulary: uint16 below 65500 entries, else int32.

    Readers take the dtype from the file, so that the choice cannot disagree with them.
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def bin_path(prefix: str) -> str:
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    return prefix + ".idx"


def origin_path(prefix: str) -> str:
    """Where preprocessing notes which tokenizer it had; other tools write no such file."""
    return prefix + ".origin.json"


class IndexedDataset:
    """Read access to `prefix.bin` and `prefix.idx`; item i is sequence i.

    Attributes: `dtype`; `lengths` int32 `[N]` in tokens; `pointers` int64 `[N]` in bytes;
    `documents` int64 `[D]`, where document d is sequences `[documents[d], documents[d + 1])`;
    `bin`, the bytes of the tokens. The index is memory-mapped; the tokens too, unless `mmap` is
    False, which reads them where asked and costs no address space.

    A `prefix` with a protocol (`s3://bucket/corpus`) is read through fsspec: its index whole, its
    tokens in blocks, both kept in `cache_path` (default: `~/.cache/megadiff`).
    """

    def __init__(self, prefix: str, *, mmap: bool = True, cache_path: str | None = None) -> None:
        self.prefix = prefix
        if is_remote(prefix):
            folder = cache_path or str(Path("~/.cache/megadiff").expanduser())
            index = str(RemoteBytes(idx_path(prefix), folder).local_copy())
            self.bin: Bytes = RemoteBytes(bin_path(prefix), folder)
        else:
            index = idx_path(prefix)
            if not Path(index).is_file() or not Path(bin_path(prefix)).is_file():
                raise DataError(_missing(prefix))
            self.bin = (MappedBytes if mmap else FileBytes)(bin_path(prefix))
        self._read_index(index)
        need = 0
        if len(self):
            need = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        need = max(need, int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize)
        if self.bin.size != need:
            why = "it was cut off" if self.bin.size < need else "the index is of another .bin"
            raise DataError(
                f"{bin_path(prefix)}: {self.bin.size} bytes, but its index needs {need}: {why}"
            )

    def _read_index(self, path: str) -> None:
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            head = file.read(HEADER.size)
        name = idx_path(self.prefix)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise DataError(f"{name}: not a .idx file (it does not begin with {MAGIC!r})")
        _, version, code, count, bookends = HEADER.unpack(head)
        if version != VERSION or code not in DTYPES:
            raise DataError(f"{name}: version {version}, dtype code {code}: not a format we know")
        plain = HEADER.size + 12 * count + 8 * bookends
        if size not in (plain, plain + count):
            raise DataError(
                f"{name}: {size} bytes, but {count} sequences and {bookends - 1} documents need "
                f"{plain}: the file was cut off or damaged"
            )
        self.dtype = DTYPES[code]
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        start = HEADER.size
        self.lengths = np.frombuffer(raw, dtype="<i4", count=count, offset=start)
        self.pointers = np.frombuffer(raw, dtype="<i8", count=count, offset=start + 4 * count)
        self.documents = np.frombuffer(raw, dtype="<i8", count=bookends, offset=start + 12 * count)
        if count and int(self.lengths.min()) < 0:
            raise DataError(f"{name}: a sequence of negative length: the file is damaged")
        if bookends < 1 or int(self.documents[-1]) != count:
            raise DataError(f"{name}: the last document does not end at the last sequence")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: to its end) of sequence `index` from token `offset` on."""
        if length is None:
            length = int(self.lengths[index]) - offset
        begin = int(self.pointers[index]) + offset * self.dtype.itemsize
        size = length * self.dtype.itemsize
        return self.bin.read(begin, size).view(self.dtype)

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.prefix}: sequence {index} of {len(self)}")
        return self.get(index)

    def token_chunks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """All tokens of the .bin in file order, `size` at a time, each with its first's number."""
        total = self.bin.size // self.dtype.itemsize
        for begin in range(0, total, size):
            count = min(size, total - begin) * self.dtype.itemsize
            yield begin, self.bin.read(begin * self.dtype.itemsize, count).view(self.dtype)

    def document(self, index: int) -> np.ndarray:
        """All tokens of document `index`, its sequences one after another."""
        first, last = int(self.documents[index]), int(self.documents[index + 1])
        parts = [self.get(i) for i in range(first, last)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)


def refuse_existing(prefixes: Sequence[str], overwrite: bool) -> None:
    """Raises DataError when a dataset would be replaced without `--overwrite`."""
    for prefix in prefixes:
        if Path(idx_path(prefix)).exists() and not overwrite:
            raise DataError(f"{prefix}.idx exists; give --overwrite to replace it")


def _missing(prefix: str) -> str:
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            return f"{prefix}: give the path without {suffix}: {prefix.removesuffix(suffix)}"
    lacking = [p for p in (bin_path(prefix), idx_path(prefix)) if not Path(p).is_file()]
    path = Path(prefix)
    made = sorted(path.parent.glob(f"{glob.escape(path.name)}_*_document.idx"))
    hint = f"; there is {made[0].with_suffix('')}" if made else ""  # of preprocess_data.py
    return f"{prefix}: no such dataset ({' and '.join(lacking)} missing){hint}"


class IndexedDatasetBuilder:
    """Writes `prefix.bin` and `prefix.idx`; both appear under their names when `finalize` ran.

    Until then the tokens are in `prefix.bin.part`. Used as a context manager it finalizes, or
    removes the part when an exception leaves the block.
    """

    def __init__(self, prefix: str, dtype: np.dtype | type) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"dtype {self.dtype} cannot be stored in a .bin file")
        folder = Path(prefix).parent
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder (for the output {prefix})")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._part = Path(bin_path(prefix) + ".part")
        self._file = self._part.open("wb")

    def add_sequence(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Append one sequence to the document under way; close it with `end_document`."""
        values = np.asarray(tokens)
        if values.size > LONGEST_SEQUENCE:
            raise DataError(
                f"a sequence of {values.size} tokens: the format holds {LONGEST_SEQUENCE}"
            )
        self._file.write(convert(values, self.dtype).tobytes())
        self._lengths.append(values.size)

    def end_document(self) -> None:
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        """One whole document of one sequence, or of none if it is empty."""
        if len(tokens):
            self.add_sequence(tokens)
        self.end_document()

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all documents of `other`."""
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix} holds {other.dtype} tokens and cannot join {self.dtype} ones"
            )
        self._documents.frombytes(
            (np.asarray(other.documents[1:]) + len(self._lengths)).astype("<i8").tobytes()
        )
        self._lengths.frombytes(other.lengths.tobytes())
        if not len(other):
            return
        end = int(other.pointers[-1]) + int(other.lengths[-1]) * other.dtype.itemsize
        begin = int(other.pointers[0])
        if end - begin != int(other.lengths.sum(dtype=np.int64)) * other.dtype.itemsize:
            raise DataError(f"{other.prefix}: its sequences do not lie one after another")
        for position in range(begin, end, _COPY):
            self._file.write(other.bin.read(position, min(_COPY, end - position)).data)

    def finalize(self) -> None:
        self._file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        documents = np.frombuffer(self._documents, dtype=np.int64)
        publish(self.prefix, self._part, self.dtype, lengths, documents)

    def discard(self) -> None:
        """Remove what has no final name yet."""
        with suppress(OSError):  # of a full disk
            self._file.close()
        self._part.unlink(missing_ok=True)
        Path(idx_path(self.prefix) + ".part").unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            self.discard()


def convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` as little-endian `dtype`; an id that does not fit is an error, never a wrap."""
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and values.size:
        info = np.iinfo(dtype)
        low, high = int(values.min()), int(values.max())
        if low < info.min or high > info.max:
            raise DataError(f"token id {low if low < info.min else high} does not fit {dtype}")
    return values.astype(dtype)


def publish(
    prefix: str, part: Path, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Write the index and give it and the tokens in `part` their final names.

    An index that is there belongs to whole tokens: an old one goes first and the new one comes
    last.
    """
    index_part = Path(idx_path(prefix) + ".part")
    write_index(index_part, dtype, lengths, documents)
    for path in (part, index_part):  # on the disk before they have their names
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for old in (idx_path(prefix), origin_path(prefix)):
        Path(old).unlink(missing_ok=True)
    part.rename(bin_path(prefix))
    index_part.rename(idx_path(prefix))


def write_index(path: Path, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray) -> None:
    """Write a `.idx` for int32 `lengths` `[N]` and int64 `documents` `[D]` (see the module)."""
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
        file.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        position = 0
        for begin in range(0, len(lengths), 1 << 22):
            sizes = lengths[begin : begin + (1 << 22)].astype(np.int64) * dtype.itemsize
            ends = position + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            position = int(ends[-1])
        file.write(np.ascontiguousarray(documents, dtype="<i8").data)
