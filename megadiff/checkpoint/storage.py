"""Save and load sharded tensors as torch's distributed checkpoint does, and JSON beside them.

A saved directory holds

    .metadata         torch's index: name, shape and dtype of each tensor and where its parts lie
    __<n>_<k>.distcp  the parts that process n wrote, in a few files
    <key>.json        one file per entry of the metadata
    manifest.json     size and checksum of every file; written last, the mark of a whole checkpoint

Any number of processes loads what any other number saved.
"""

import json
import math
import os
import platform
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megadiff import __version__
from megadiff.checkpoint.files import INDEX, DurableFile, read_index
from megadiff.checkpoint.ranks import CheckpointError, Ranks, describe
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors
from megadiff.checkpoint.torch_parts import PieceSavePlanner, TensorWriter, read_pieces
from megadiff.config import Config, update_config

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 4 << 20  # bytes


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
    writer = TensorWriter(directory)

    def write() -> dict[str, dict]:
        with warnings.catch_warnings():
            if ranks.alone:  # torch warns of a single process, which is no mistake here
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                tensors,  # type: ignore[arg-type]
                storage_writer=writer,
                planner=PieceSavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )
        return writer.written

    written = ranks.all(what, write)
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

    ranks.all(what, check)
    ranks.all(what, lambda: read_pieces(directory, index[0], tensors))


class CheckpointReader:
    """Opens a checkpoint without a process group and reads any part of any tensor of it.

    `tensors` holds shape and dtype by name. Raises CheckpointError when there is none.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        try:
            self._index = read_index(self.directory)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot open {directory}: {describe(error)}") from None
        entries: dict[str, Any] = self._index.state_dict_metadata
        self.tensors = {n: (tuple(e.size), e.properties.dtype) for n, e in sorted(entries.items())}

    def read(
        self, name: str, offset: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The rectangle of `sizes` at `offset` of the tensor `name`; all of it by default."""
        shape, dtype = self.tensors[name]
        offset = (0,) * len(shape) if offset is None else tuple(offset)
        part = torch.empty(shape if sizes is None else tuple(sizes), dtype=dtype)
        tensors = {name: ShardedTensor(shape, dtype, [Piece(offset, part)])}
        try:
            read_pieces(self.directory, self._index, tensors)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {name}: {describe(error)}") from None
        return part

    def blocks(self, name: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of blocks of whole rows that make up `name`: 4 MiB, or one row."""
        shape, dtype = self.tensors[name]
        if not shape:
            yield (), ()
            return
        rest = (0,) * (len(shape) - 1)
        rows = max(1, _BLOCK // max(math.prod(shape[1:]) * dtype.itemsize, 1))
        for first in range(0, shape[0], rows):
            yield (first, *rest), (min(rows, shape[0] - first), *shape[1:])


def read_metadata(directory: str | Path) -> dict[str, dict]:
    """The metadata that was saved with a checkpoint: its JSON files by name.

    Raises CheckpointError when one of them cannot be read, or there is no such directory.
    """
    if not Path(directory).is_dir():
        raise CheckpointError(f"there is no checkpoint {directory}")
    paths = [p for p in sorted(Path(directory).glob("*.json")) if p.name != MANIFEST]
    metadata = {}
    for path in paths:
        try:
            metadata[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {describe(error)}") from None
    return metadata


def versions() -> dict[str, str]:
    """Of what writes a checkpoint, and the folder it runs in, for its metadata."""
    own, python = __version__, platform.python_version()
    try:
        folder = str(Path.cwd())
    except OSError:  # deleted since
        folder = ""
    return {"megadiff": own, "torch": torch.__version__, "python": python, "folder": folder}


def read_config(directory: Path, metadata: dict[str, dict]) -> Config:
    """The configuration in the metadata of a checkpoint, from which files are found anywhere.

    Raises ConfigError.
    """
    config = Config()
    update_config(config, metadata["config"], source=str(directory / "config.json"))
    folder = Path(metadata.get("versions", {}).get("folder", ""))
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        file = getattr(config.data, name)
        with suppress(OSError):  # the folder is closed to this user
            if file is not None and (folder / file).exists():
                setattr(config.data, name, str(folder / file))
    return config


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
