"""Which checkpoint of a directory, or of several places, a run goes on from.

All ranks find the same: rank 0 looks at the directory and tells the others, and an error on one
rank is an error on all.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.local import find_local
from megadiff.checkpoint.ranks import CheckpointError, Ranks
from megadiff.checkpoint.storage import read_metadata

logger = logging.getLogger(__name__)


def find_checkpoint(
    root: str | Path,
    step: int | None = None,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
    among: Callable[[Path], bool] | None = None,
) -> Path | None:
    """The checkpoint to load from `root`, the same on all ranks; None when there is none at all.

    It is the one that the tracker names or, if that is damaged or the tracker unreadable, the
    newest whole one, and a warning says so. With `among`, the newest whole one that it is true of,
    whatever the tracker names. `verify` also compares checksums (all ranks share the
    reading). Raises CheckpointError on all ranks when `step` is named and not whole, or when there
    are checkpoints but none is whole.
    """
    root, ranks = Path(root), Ranks(group)
    steps, first, note = ranks.first(
        f"cannot look for checkpoints in {root}", lambda: _candidates(root, step, among)
    )
    if not steps:
        return None
    found: dict[int, list[str]] = {}
    for candidate in steps:
        path = layout.checkpoint_path(root, candidate)
        parts = ranks.all(
            f"cannot check {path}",
            lambda path=path: layout.damage(path, verify, ranks.rank, ranks.size),
        )
        found[candidate] = sorted({problem for part in parts for problem in part})
        if not found[candidate]:
            if ranks.rank == 0 and candidate != first:
                logger.warning("%s; loading %s, the newest whole one", _tell(found, note), path)
            elif ranks.rank == 0 and note:
                logger.warning("%s; loading %s", note, path)
            return path
    hint = (
        "name another step or load the newest whole one by naming none"
        if step is not None
        else "repair or remove it, or load from elsewhere; it is not overwritten by a new start"
    )
    raise CheckpointError(f"no checkpoint to load in {root}: {_tell(found, note)}; {hint}")


def find_newest(
    roots: Sequence[str | Path],
    group: dist.ProcessGroup | None = None,
    among: Callable[[Path], bool] | None = None,
    local: str | Path | None = None,
    fits: Callable[[dict[str, dict]], bool] | None = None,
) -> Path | None:
    """The one with the latest step among what `find_checkpoint` finds in each of `roots`.

    A place where nothing is whole is told of and passed over while another has a whole checkpoint.
    With `local`, also what `find_local` finds there. What is not in the first of `roots` is only
    taken when `fits` is true of its metadata.
    """
    found: list[Path] = []
    errors: list[CheckpointError] = []
    ranks = Ranks(group)
    for root in roots:
        try:
            path = find_checkpoint(root, group=group, among=among)
            if path is None:
                continue
            if root is not roots[0] and fits is not None:
                judge = lambda path=path: fits(read_metadata(path))  # noqa: E731
                if not ranks.first(f"cannot read {path}", judge):
                    if ranks.rank == 0:
                        logger.warning("%s is of another run; looking elsewhere", path)
                    continue
            found.append(path)
        except CheckpointError as error:
            errors.append(error)
    if local is not None:
        path = find_local(local, group, among, fits)
        found += [] if path is None else [path]
    if errors and not found:
        raise errors[0]
    for error in errors:
        if ranks.rank == 0:
            logger.warning("%s; looking elsewhere", error)
    return max(found, key=layout.step_of, default=None)


def _candidates(
    root: Path, step: int | None, among: Callable[[Path], bool] | None
) -> tuple[list[int], int | None, str]:
    """Steps to try in this order, the one that is meant, and a remark on the tracker."""
    if step is not None:
        return [step], step, ""
    steps = layout.list_steps(root)[::-1]
    if among is not None:
        steps = [s for s in steps if among(layout.checkpoint_path(root, s))]
        return steps, steps[0] if steps else None, ""
    if not steps:
        if (root / layout.TRACKER).exists():
            raise CheckpointError(f"{layout.TRACKER} is there, but no checkpoint")
        if (root / layout.MANIFEST).exists():  # would start anew
            raise CheckpointError(
                "it is a checkpoint; give the folder that holds it as iter_NNNNNNN"
            )
        return [], None, ""
    try:
        meant = layout.read_tracker(root)
    except ValueError as error:
        return steps, steps[0], str(error)
    # Those above were left behind by going back: they come last.
    return [meant, *(s for s in steps if s < meant), *(s for s in steps if s > meant)], meant, ""


def _tell(found: dict[int, list[str]], note: str) -> str:
    lines = [note] if note else []
    for step, problems in found.items():
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            lines.append(f"iter_{step:07d}: {', '.join(problems[:3])}{more}")
    return "; ".join(lines)
