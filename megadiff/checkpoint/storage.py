"""Save and load sharded tensors with torch's distributed checkpoint, and JSON beside them.

A saved directory holds

    .metadata         torch's index: name, shape and dtype of each tensor and where its parts lie
    __<n>_0.distcp    the parts that one process wrote
    <key>.json        one file per entry of the metadata
    manifest.json     size and checksum of every file; written last, the mark of a whole checkpoint

Any number of processes loads what any other number saved.
"""

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

from megadiff.checkpoint.files import INDEX, DurableFile, TensorFile, read_index, write_tensor
from megadiff.checkpoint.ranks import CheckpointError, Ranks
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors

MANIFEST = "manifest.json"
FORMAT = 1


def save(
    directory: str | Path,
    tensors: Tensors,
    metadata: dict[str, dict],
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Write the pieces of `tensors` marked `write`, and rank 0's `metadata`, to `directory`.

    All ranks of `group` call it (`alone`: this process only, whatever process group there is). When
    it returns, everything is on disk. Raises CheckpointError on all ranks when anything fails on
    any, or when the pieces of all ranks do not cover each tensor exactly once.
    """
    directory = Path(directory)
    what = f"cannot save checkpoint {directory}"
    ranks = Ranks(group, alone)
    ranks.first(what, lambda: directory.mkdir(parents=True, exist_ok=True))
    ranks.all(what, lambda: _check_seen(directory))
    writer = _Writer(directory)

    def write() -> None:
        with _without_warning(ranks.alone):
            dcp.save(
                tensors,  # type: ignore[arg-type]
                storage_writer=writer,
                planner=_SavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )

    ranks.all(what, write)
    written = ranks.all(what, lambda: writer.written)
    ranks.first(what, lambda: _finish(directory, metadata, written))


def load(
    directory: str | Path,
    tensors: Tensors,
    ignore: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Fill the pieces of `tensors` from `directory`, in place, however it was split when saved.

    All ranks of `group` call it, each with its own pieces. Tensors of the checkpoint whose names
    begin with one of `ignore` need not be asked for by any rank. Raises CheckpointError on all
    ranks, before any piece changes, with the list of names, shapes and types that do not match.
    """
    directory = Path(directory)
    what = f"cannot load checkpoint {directory}"
    ranks = Ranks(group, alone)
    wanted: set[str] = set()
    wanted.update(*ranks.all(what, lambda: [n for n, t in tensors.items() if 0 not in t.shape]))
    index: list[Metadata] = []

    def check() -> None:
        index.append(read_index(directory))
        problems = _mismatches(index[0], tensors, wanted, tuple(ignore))
        if problems:
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise CheckpointError("it does not match:\n  " + "\n  ".join(problems[:20]) + more)

    def read() -> None:
        with _without_warning(ranks.alone):
            dcp.load(
                tensors,  # type: ignore[arg-type]
                storage_reader=_Reader(directory, index[0]),
                planner=_LoadPlanner(),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )

    ranks.all(what, check)
    ranks.all(what, read)


def list_tensors(directory: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a checkpoint by name."""
    tensors: dict[str, Any] = read_index(Path(directory)).state_dict_metadata
    return {name: (tuple(t.size), t.properties.dtype) for name, t in tensors.items()}


def read_metadata(directory: str | Path) -> dict[str, dict]:
    """The metadata that was saved with a checkpoint: its JSON files by name."""
    paths = [p for p in sorted(Path(directory).glob("*.json")) if p.name != MANIFEST]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def _mismatches(
    index: Metadata, tensors: Tensors, wanted: set[str], ignore: tuple[str, ...]
) -> list[str]:
    """What keeps `tensors` (and the names that any rank wants) from being read."""
    saved = index.state_dict_metadata
    problems = []
    for name in sorted(wanted - saved.keys()):
        problems.append(f"{name}: not in the checkpoint")
    for name in sorted(saved.keys() - wanted):
        if not name.startswith(ignore):
            problems.append(f"{name}: in the checkpoint, but not in this run")
    for name, tensor in tensors.items():
        if name not in saved or 0 in tensor.shape:
            continue
        shape, dtype = tuple(saved[name].size), saved[name].properties.dtype  # type: ignore[union-attr]
        if shape != tensor.shape:
            problems.append(f"{name}: shape {shape} in the checkpoint, {tensor.shape} in this run")
        elif dtype != tensor.dtype and not (
            dtype.is_floating_point and tensor.dtype.is_floating_point
        ):
            problems.append(f"{name}: {dtype} in the checkpoint, {tensor.dtype} in this run")
    return problems


@contextmanager
def _without_warning(alone: bool) -> Iterator[None]:
    """Torch warns of a single process, which is no mistake here."""
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check_seen(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError("the directory that rank 0 made is not there; do all nodes share it?")


def _finish(directory: Path, metadata: dict[str, dict], written: list[dict[str, dict]]) -> None:
    """Rank 0's last part: the JSON files, then the manifest."""
    files = {name: entry for of_rank in written for name, entry in of_rank.items()}
    for key, value in metadata.items():
        text = json.dumps(value, indent=1, sort_keys=True) + "\n"
        files[f"{key}.json"] = _write_text(directory / f"{key}.json", text)
    files[INDEX] = file_entry(directory / INDEX)
    text = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n"
    _write_text(directory / MANIFEST, text)
    sync_directory(directory)


def _write_text(path: Path, text: str) -> dict[str, Any]:
    with DurableFile(path) as file:
        file.write(text.encode())
    return {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"}


def file_entry(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file, computed by reading it."""
    crc32 = size = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
    return {"bytes": size, "crc32": f"{crc32:08x}"}


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a crash of the machine."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _SavePlanner(DefaultSavePlanner):
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
        return self._pieces[write_item.index].data


class _Writer(dcp.FileSystemWriter):
    """Writes one durable file per process and remembers its size and checksum."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.written: dict[str, dict[str, Any]] = {}

    def storage_meta(self) -> None:
        """No path in the index: a checkpoint may be moved."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with DurableFile(Path(self.path) / name) as file:
                for item in plan.items:
                    start, length = write_tensor(planner.resolve_data(item), file)
                    info = _StorageInfo(name, start, length)
                    results.append(WriteResult(item.index, length, info))
            self.written[name] = {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _LoadPlanner(LoadPlanner):
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


class _Reader(dcp.FileSystemReader):
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
        for path, items in sorted(by_file.items()):
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
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes))
