"""The bytes of a checkpoint: tensor files, and torch's index of them, read without trusting it.

A tensor file is a sequence of what `torch.save` writes for one tensor, as torch's distributed
checkpoint does, so that torch's own tools open it. Here it is read without unpickling: the values
lie uncompressed in the record `data/0` of a zip archive, and shape and dtype stand in the index.
"""

import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

T = TypeVar("T")

INDEX = ".metadata"
THREADS = 4  # of one process, each with a file of its own
_SYNC = 256 << 20  # bytes after which a file that is being written goes to the disk
_BLOCK = 16 << 20  # bytes that a thread reads at a time, beside the tensors that are filled

_ALLOWED = {
    "torch": {"Size"} | {str(d).removeprefix("torch.") for d in vars(torch).values()
                         if isinstance(d, torch.dtype)},
    "torch.serialization": {"_get_layout"},  # a look-up in a table of layouts
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Knows the plain records of torch's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_index(directory: Path) -> Metadata:
    """Torch's index of the tensors in `directory`; nothing in it is run.

    Raises ValueError when it is not the index of a checkpoint of tensors, each whole and in files
    of this directory; OSError when it cannot be read.
    """
    path = directory / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        _check_index(index)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle fails in every way there is
        raise ValueError(f"{path}: not the index of a checkpoint: {error}") from None
    return index


def _check_index(index: Metadata) -> None:
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("no tensor index")
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor but bytes, which are not read")
        covered = 0
        for chunk in tensor.chunks:
            info = index.storage_data[MetadataIndex(name, chunk.offsets)]
            plain = Path(info.relative_path).name == info.relative_path
            if not plain or getattr(info, "transform_descriptors", None):
                raise ValueError(f"{name} lies outside, in {info.relative_path!r}")
            if not all(isinstance(n, int) and n >= 0 for n in (info.offset, info.length)):
                raise ValueError(f"{name} lies at no place of {info.relative_path}")
            for offset, size, limit in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True):
                if offset < 0 or size < 0 or offset + size > limit:
                    raise ValueError(f"{name} has a part outside of its shape")
            covered += math.prod(chunk.sizes)
        if len({chunk.offsets for chunk in tensor.chunks}) < len(tensor.chunks):
            raise ValueError(f"{name} has a part twice")
        if covered != math.prod(tensor.size):
            raise ValueError(f"{name} is not whole: {covered} of {math.prod(tensor.size)} elements")


def in_threads(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """What `function` returns for each, in order; a few run side by side, as files do well.

    Raises the first error, once all have ended.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, *arguments))


class DurableFile:
    """A file written front to back: counts and checksums its bytes, is on disk when closed.

    The disk writes while more is being prepared, not all at the end.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("wb")
        self._synced = 0
        self.error: OSError | None = None
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
            if self.bytes - self._synced > _SYNC:
                self._synced = self.bytes
                os.fdatasync(self._file.fileno())
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self._path))
            raise self.error from None
        size = memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += size
        return size

    def flush(self) -> None:
        """Nothing: `torch.save` asks for it after each tensor, and closing does it once."""

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            if kind is None:
                raise OSError(error.errno, error.strerror, str(self._path)) from None


def write_tensor(tensor: torch.Tensor, file: DurableFile) -> tuple[int, int]:
    """Append `tensor` as `torch.save` writes it; its first byte and its length in the file."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        # torch.save writes whole storages; give it one that is just this tensor, without a copy.
        values = tensor.reshape(-1).view(torch.uint8).numpy()
        tensor = torch.frombuffer(values, dtype=tensor.dtype).view(tensor.shape)
    start = file.bytes
    try:
        torch.save(tensor, file)  # type: ignore[arg-type]
    except RuntimeError:  # torch's own, which does not say what happened to the file
        if file.error is not None:
            raise file.error from None
        raise
    return start, file.bytes - start


class TensorFile:
    """Reads rectangles out of a tensor file, in blocks."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._block = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def read(
        self,
        info: _StorageInfo,
        sizes: Sequence[int],
        dtype: torch.dtype,
        offset: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copy the rectangle at `offset` of the saved tensor (`sizes`, `dtype`) into `target`.

        `target` may be strided, of another floating type and on another device.
        Raises ValueError when the file does not hold such a tensor there.
        """
        sizes, offset = tuple(sizes) or (1,), tuple(offset) or (0,)
        target = target.reshape(1) if target.dim() == 0 else target
        row = math.prod(sizes[1:]) * dtype.itemsize
        begin = self._values(info, math.prod(sizes) * dtype.itemsize)
        rows = max(1, _BLOCK // row)
        for done in range(0, target.shape[0], rows):
            part = target[done : done + rows]
            block = self._fill(begin + (offset[0] + done) * row, part.shape[0] * row)
            values = block.view(dtype).view(part.shape[0], *sizes[1:])
            for dim in range(1, len(sizes)):
                values = values.narrow(dim, offset[dim], part.shape[dim])
            part.copy_(values)

    def _values(self, info: _StorageInfo, length: int) -> int:
        """Where in the file the values of the tensor at `info` begin."""
        try:
            archive = _Window(self._file, info.offset, info.length)
            entries = zipfile.ZipFile(archive).infolist()  # type: ignore[arg-type]
            (entry,) = [e for e in entries if e.filename.endswith("/data/0")]
            archive.seek(entry.header_offset)
            signature, name, extra = struct.unpack("<4s22xHH", archive.read(30))
        except (zipfile.BadZipFile, struct.error, ValueError) as error:
            raise ValueError(f"{self._path}: damaged at byte {info.offset}: {error}") from None
        start = info.offset + entry.header_offset + 30 + name + extra
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == length
        if signature != b"PK\3\4" or not stored or start + length > info.offset + info.length:
            raise ValueError(f"{self._path}: no tensor of {length} bytes at byte {info.offset}")
        return start

    def _fill(self, begin: int, length: int) -> torch.Tensor:
        if self._block.numel() < length:
            self._block = torch.empty(length, dtype=torch.uint8)
        block = self._block[:length]
        view = memoryview(block.numpy())  # type: ignore[arg-type]
        self._file.seek(begin)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise ValueError(f"{self._path}: ends before byte {begin + length}")
            view = view[count:]
        return block


class _Window:
    """`[start, start + length)` of a file as a file, as far as zipfile asks."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left)) or b""
        self._at += len(data)
        return data
