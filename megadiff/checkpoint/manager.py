"""When and where a run saves, and which checkpoint it resumes from.

All ranks decide the same: rank 0 looks at the directory and tells the others, and an error on one
rank is an error on all.
"""

import logging
import os
import shutil
import time
from pathlib import Path

import torch.distributed as dist

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.ranks import CheckpointError, Ranks
from megadiff.checkpoint.state import Tensors
from megadiff.checkpoint.storage import save

logger = logging.getLogger(__name__)


def find_checkpoint(
    root: str | Path,
    step: int | None = None,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Path | None:
    """The checkpoint to load from `root`, the same on all ranks; None when there is none at all.

    It is the one that the tracker names or, if that is damaged or the tracker unreadable, the
    newest whole one, and a warning says so. `verify` also compares checksums (all ranks share the
    reading). Raises CheckpointError on all ranks when `step` is named and not whole, or when there
    are checkpoints but none is whole.
    """
    root, ranks = Path(root), Ranks(group)
    steps, first, note = ranks.first(
        f"cannot look for checkpoints in {root}", lambda: _candidates(root, step)
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


def _candidates(root: Path, step: int | None) -> tuple[list[int], int | None, str]:
    """Steps to try in this order, the one that is meant, and a remark on the tracker."""
    if step is not None:
        return [step], step, ""
    steps = layout.list_steps(root)[::-1]
    if not steps:
        if (root / layout.TRACKER).exists():
            raise CheckpointError(f"{layout.TRACKER} is there, but no checkpoint")
        return [], None, ""
    try:
        meant = layout.read_tracker(root)
    except ValueError as error:
        return steps, steps[0], str(error)
    return [meant, *(s for s in steps if s != meant)], meant, ""


def _tell(found: dict[int, list[str]], note: str) -> str:
    lines = [note] if note else []
    for step, problems in found.items():
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            lines.append(f"iter_{step:07d}: {', '.join(problems[:3])}{more}")
    return "; ".join(lines)


class CheckpointManager:
    """Saves checkpoints into `root`, keeps the last `keep_last` and every `keep_every`-th step.

    `proven` is the step that the run was resumed from, which retention spares: it is known to load.
    Raises CheckpointError on all ranks at once when `root` cannot be written.
    """

    def __init__(
        self,
        root: str | Path,
        keep_last: int | None = None,
        keep_every: int | None = None,
        proven: int | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.root = Path(root)
        self._keep_last, self._keep_every, self._proven = keep_last, keep_every, proven
        self._ranks = Ranks(group)
        self._ranks.first(f"cannot save checkpoints in {self.root}", self._try_to_write)

    def save(self, step: int, tensors: Tensors, metadata: dict[str, dict]) -> float:
        """Save the checkpoint of `step`; the seconds that training waited for it.

        Raises CheckpointError on all ranks when it fails on any; earlier checkpoints remain.
        """
        start = time.perf_counter()
        self._write(step, tensors, metadata)
        return time.perf_counter() - start

    def _write(self, step: int, tensors: Tensors, metadata: dict[str, dict]) -> None:
        what = f"cannot save {layout.checkpoint_path(self.root, step)}"
        saving = layout.saving_path(self.root, step)
        self._ranks.first(what, lambda: layout.sweep(self.root))
        try:
            save(saving, tensors, metadata, self._ranks.group)
            self._ranks.first(what, lambda: self._publish(step))
        except CheckpointError:
            if self._ranks.rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
            raise

    def _publish(self, step: int) -> None:
        layout.publish(self.root, step)
        layout.write_tracker(self.root, step)
        paths = {s: layout.checkpoint_path(self.root, s) for s in layout.list_steps(self.root)}
        whole = [s for s, path in paths.items() if not layout.damage(path, checksums=False)]
        for old in layout.expired(whole, self._keep_last, self._keep_every):
            if old not in (step, self._proven):
                layout.remove(paths[old])

    def _try_to_write(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        probe = self.root / ".probe"
        with probe.open("w") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
