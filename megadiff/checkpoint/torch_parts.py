"""The parts of torch's distributed checkpoint that are ours: what is planned, written and read.

The planner deals in pieces; the writer makes durable files. Reading needs no planner: every rank
looks for itself in the index. Byte objects, which torch would unpickle, are neither written nor
read.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megadiff.checkpoint.files import THREADS, DurableFile, TensorFile, in_threads, write_tensor
from megadiff.checkpoint.state import Piece, Tensors

_FILE_SIZE = 128 << 20  # bytes from which on a process writes one more file, up to THREADS


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of pieces; refuses tensors that are not covered exactly once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[MetadataIndex, Piece] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.state_dict.items():
            for piece in tensor.pieces:
                if not piece.write or 0 in piece.sizes:
                    continue
                index = MetadataIndex(name, piece.offset)
                data = TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(tensor.shape),
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
                self._pieces[index] = piece
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items: dict[str, list[WriteItem]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            items.setdefault(item.index.fqn, []).append(item)
        for name, items_of_tensor in items.items():
            offsets = {item.index.offset for item in items_of_tensor}
            parts: list[Any] = [item.tensor_data for item in items_of_tensor]
            kinds = {(tuple(part.size), part.properties.dtype) for part in parts}
            covered = sum(math.prod(part.chunk.sizes) for part in parts)
            if len(kinds) > 1:
                raise ValueError(f"{name} differs in shape or type between ranks: {kinds}")
            shape = tuple(parts[0].size)
            if len(offsets) < len(parts):
                raise ValueError(f"{name} {shape}: parts of it are written twice")
            if covered != math.prod(shape):
                raise ValueError(f"{name} {shape}: all ranks together write {covered} elements")
        return super().create_global_plan(all_plans)  # refuses overlaps

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        piece = self._pieces[write_item.index]
        data, declared = piece.data, self.state_dict[write_item.index.fqn].dtype
        if data.dtype != declared or tuple(data.shape) != piece.sizes:
            name, is_ = write_item.index.fqn, f"{data.dtype} {tuple(data.shape)}"
            raise ValueError(f"{name}: a piece is {is_}, not {declared} {piece.sizes}")
        return data


class TensorWriter(dcp.FileSystemWriter):
    """Writes durable files, a few per process side by side; remembers sizes and checksums."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.written: dict[str, dict[str, Any]] = {}

    def storage_meta(self) -> None:
        """No path in the index: a checkpoint may be moved."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            results = []
            with DurableFile(Path(self.path) / name) as file:
                for item in items:
                    start, length = write_tensor(planner.resolve_data(item), file)
                    results.append(
                        WriteResult(item.index, length, _StorageInfo(name, start, length))
                    )
            self.written[name] = {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"}
            return results

        files = _balanced(plan.items)
        parts = in_threads(write, range(len(files)), files)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part in parts for result in part])
        return done


def read_pieces(directory: Path, index: Metadata, tensors: Tensors) -> None:
    """Fill the pieces of `tensors`, in place, from whatever parts were saved.

    Just the rectangles asked for are read, file after file, front to back. Raises OSError, and
    ValueError when a file does not hold what `index` says.
    """
    reads: dict[str, list[tuple[Any, ...]]] = {}
    for name, tensor in tensors.items():
        if 0 in tensor.shape:
            continue
        saved: Any = index.state_dict_metadata[name]
        sizes = {chunk.offsets: chunk.sizes for chunk in saved.chunks}
        for piece in tensor.pieces:
            for item in create_read_items_for_chunk_list(name, saved, [_chunk(piece)]):
                if 0 in item.lengths:
                    continue
                target = piece.data.detach()
                for dim, first in enumerate(item.dest_offsets):
                    target = target.narrow(dim, first, item.lengths[dim])
                part = item.storage_index
                info, size = index.storage_data[part], sizes[part.offset]
                read = (info, size, saved.properties.dtype, item.storage_offsets, target)
                reads.setdefault(info.relative_path, []).append(read)

    def read_file(name: str) -> None:
        with TensorFile(directory / name) as file:
            for info, *rest in sorted(reads[name], key=lambda read: read[0].offset):
                file.read(info, *rest)

    in_threads(read_file, reads)


def _balanced(items: list[WriteItem]) -> list[list[WriteItem]]:
    """`items` in lists of about the same number of bytes, one for each file to write."""

    def size(item: WriteItem) -> int:
        data: Any = item.tensor_data
        return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize

    total = sum(map(size, items))
    files: list[list[WriteItem]] = [[] for _ in range(min(THREADS, 1 + total // _FILE_SIZE))]
    sizes = [0] * len(files)
    for item in sorted(items, key=size, reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(item)
        sizes[smallest] += size(item)
    return [file for file in files if file]


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes))
