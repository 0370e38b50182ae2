"""Node-local checkpoints: each rank saves all that it holds where no other rank needs to see it.

    rank_00003/iter_0000100/    laid out as any checkpoint, of the pieces of one rank

They are for fast saves in between, on disks that go with their node. Only the same number of ranks,
split in the same way and each in its place, resumes from them; whoever finds it otherwise takes a
checkpoint that all ranks share.
"""

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.ranks import CheckpointError, Ranks
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors
from megadiff.checkpoint.storage import load, read_metadata, save


def local_root(root: str | Path, ranks: Ranks) -> Path:
    """The folder of a rank's own checkpoints."""
    return Path(root) / f"rank_{ranks.rank:05d}"


def lock_local(root: Path) -> IO:
    """Keep this rank's folder from other runs, which would delete its saves: until it is closed.

    Raises CheckpointError when another has it. Where the file system has no locks there is none.
    """
    lock = (root / ".lock").open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return lock
        lock.close()
        raise CheckpointError("another run saves here; give each run a folder of its own") from None
    return lock


def own_tensors(tensors: Tensors) -> Tensors:
    """Every piece that this rank holds as a tensor of its own, named by its offset.

    Only a rank with just the same pieces has use for them.
    """
    return {
        f"{name}@{','.join(map(str, piece.offset))}": ShardedTensor(
            piece.sizes, tensor.dtype, [Piece((0,) * len(piece.sizes), piece.data)]
        )
        for name, tensor in tensors.items()
        for piece in tensor.pieces
    }


def save_local(
    root: Path, step: int, tensors: Tensors, metadata: dict[str, dict], ranks: Ranks
) -> None:
    """Save this rank's `own_tensors` into its folder `root`, without the other ranks."""
    layout.sweep(root)
    metadata = {**metadata, "local": {"ranks": ranks.size}}
    save(layout.saving_path(root, step), tensors, metadata, alone=True)
    layout.publish(root, step)


def load_local(path: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's pieces from its own checkpoint, in place; CheckpointError on all ranks."""
    what = f"cannot load the node-local checkpoint {path}"
    Ranks(group).all(what, lambda: load(path, own_tensors(tensors), alone=True))


def find_local(
    root: str | Path,
    group: dist.ProcessGroup | None = None,
    among: Callable[[Path], bool] | None = None,
    fits: Callable[[dict[str, dict]], bool] | None = None,
) -> Path | None:
    """This rank's part of the newest node-local checkpoint that every rank has whole.

    None when there is no such step: a node was lost, ranks have changed places, or their number.
    `among` judges paths, `fits` the metadata. Raises CheckpointError on all ranks when a place is
    not readable.
    """
    ranks = Ranks(group)
    mine = local_root(root, ranks)

    def whole() -> list[int]:
        paths = {step: layout.checkpoint_path(mine, step) for step in layout.list_steps(mine)}
        return [
            step
            for step, path in paths.items()
            if (among is None or among(path))
            and not layout.damage(path)
            and (metadata := read_metadata(path)).get("local", {}).get("ranks") == ranks.size
            and (fits is None or fits(metadata))
        ]

    steps = ranks.all(f"cannot look for checkpoints in {mine}", whole)
    common = set.intersection(*map(set, steps))
    return layout.checkpoint_path(mine, max(common)) if common else None
