"""The parts of torch's distributed checkpoint that are ours: what is planned, written and read.

Planners deal in pieces; the writer makes durable files, the reader reads just the rectangles asked
for. Byte objects, which torch would unpickle, are neither written nor read.
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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megadiff.checkpoint.files import THREADS, DurableFile, TensorFile, in_threads, write_tensor
from megadiff.checkpoint.state import Piece, ShardedTensor

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


class PieceLoadPlanner(LoadPlanner):
    """Plans the reading of pieces from whatever parts were saved; never reads byte objects."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors: dict[str, ShardedTensor] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self._tensors.items():
            if 0 not in tensor.shape:
                saved: Any = self._metadata.state_dict_metadata[name]
                chunks = [_chunk(piece) for piece in tensor.pieces]
                items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan([item for item in items if 0 not in item.lengths])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        target = self._tensors[read_item.dest_index.fqn].pieces[number].data.detach()
        for dim, (first, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, first, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def resolve_bytes(self, read_item: ReadItem) -> Any:
        raise ValueError(f"{read_item.storage_index.fqn}: bytes, which are not read")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.resolve_bytes(read_item)


class TensorReader(dcp.FileSystemReader):
    """Reads just the rectangles asked for, file after file, front to back."""

    def __init__(self, directory: Path, index: Metadata):
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        saved: dict[str, Any] = self._index.state_dict_metadata
        sizes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name in {item.storage_index.fqn for item in plan.items}
            for chunk in saved[name].chunks
        }
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(path, []).append(item)

        def read(path: str, items: list[ReadItem]) -> None:
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with TensorFile(Path(self.path) / path) as file:
                for item in items:
                    file.read(
                        self.storage_data[item.storage_index],
                        sizes[item.storage_index],
                        saved[item.storage_index.fqn].properties.dtype,
                        item.storage_offsets,
                        planner.resolve_tensor(item),
                    )

        in_threads(read, by_file.keys(), by_file.values())
        done: Future[None] = Future()
        done.set_result(None)
        return done


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
