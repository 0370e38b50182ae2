"""When and where a run saves, what is kept of it, and going back; all ranks do the same."""

import copy
import logging
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.find import find_newest
from megadiff.checkpoint.local import local_root, lock_local, own_tensors, save_local
from megadiff.checkpoint.ranks import CheckpointError, Ranks, describe
from megadiff.checkpoint.staging import HostBuffers
from megadiff.checkpoint.state import Tensors
from megadiff.checkpoint.storage import save

logger = logging.getLogger(__name__)
PATIENCE = timedelta(hours=1)  # of a rank that waits for a slower one's writing


class CheckpointManager:
    """Saves checkpoints into `root`, keeps the last `keep_last` and every `keep_every`-th step.

    `second` is another place, which may be lost, for saves in between. It holds one checkpoint. All
    ranks see it too (a memory disk, a burst buffer), or with `local` each node has its own, where
    every rank writes all it holds and no other rank reads.

    With `background`, training waits only until its tensors are copied to host memory; a thread
    with a gloo group of its own writes them. `proven` is the step in these places that the run was
    resumed from, which retention spares: it is known to load. What else is there at the start and
    is later (all, without `proven`) is of other runs, and `go_back` lets it alone.

    All ranks make it together, and use it as a context that waits at its end for what is still
    being written. Raises CheckpointError on all ranks when `root` cannot be written.
    """

    def __init__(
        self,
        root: str | Path,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = False,
        proven: int | None = None,
        second: str | Path | None = None,
        local: bool = False,
        patience: timedelta = PATIENCE,
    ):
        self.root = Path(root)
        self.second = None if second is None else Path(second)
        self._keep_last, self._keep_every, self._proven = keep_last, keep_every, proven
        group: Any = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=patience)
        self._ranks = Ranks(group)
        self._local = local
        if local and self.second is not None:
            self.second = local_root(self.second, self._ranks)
        self._buffers = HostBuffers() if background else None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._report: str | None = None
        self._of_others: set[Path] = set()
        self._lock: IO | None = None
        self._ranks.first(
            f"cannot save checkpoints in {self.root}", lambda: self._enter_place(self.root)
        )
        if self.second is not None:
            place = self.second
            on = self._ranks.all if local else self._ranks.first
            on(f"cannot save checkpoints in {place}", lambda: self._enter_place(place))

    def _enter_place(self, root: Path) -> None:
        layout.try_to_write(root)
        if self._local and root == self.second:
            self._lock = lock_local(root)
        self._of_others |= {
            layout.checkpoint_path(root, step)
            for step in layout.list_steps(root)
            if self._proven is None or step > self._proven
        }

    def reserve(self, tensors: Tensors) -> None:
        """Allocate now the host memory that the first background save would have to wait for."""
        if self._buffers is not None:
            buffers = self._buffers
            tensors = own_tensors(tensors) if self._local else tensors  # the larger of the two
            self._ranks.all(
                "no memory for saving in the background", lambda: buffers.reserve(tensors)
            )

    def save(
        self, step: int, tensors: Tensors, metadata: dict[str, dict], second: bool = False
    ) -> float:
        """Save the checkpoint of `step`; the seconds that training waited for it.

        `second` saves to the second place instead.

        Waits for the last save. Raises CheckpointError on all ranks when that one or this one fails
        on any; earlier checkpoints remain.
        """
        start = time.perf_counter()
        self.wait()
        root, buffers = self.second if second else self.root, self._buffers
        assert root is not None, "there is no second place"
        self._of_others.discard(layout.checkpoint_path(root, step))
        if second and self._local:
            tensors = own_tensors(tensors)
        if buffers is None:
            self._write(root, step, tensors, metadata)
        else:
            what = f"cannot save {layout.checkpoint_path(root, step)}"
            copies: list[Tensors] = []
            self._ranks.all(what, lambda: copies.append(buffers.copy(tensors)))
            arguments = (root, step, copies[0], copy.deepcopy(metadata))
            self._thread = threading.Thread(
                target=self._write_in_background, args=arguments, name="checkpoint"
            )
            self._thread.start()
        return time.perf_counter() - start

    def check(self) -> None:
        """`wait`, but only when the last save is over."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until the last save is on disk; logs on rank 0 what it wrote. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._report is not None:
            logger.info("%s", self._report)
            self._report = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.wait()
        finally:
            if self._buffers is not None:
                self._buffers.free()
            if self._lock is not None:
                self._lock.close()

    def _write_in_background(
        self, root: Path, step: int, tensors: Tensors, metadata: dict[str, dict]
    ) -> None:
        try:
            self._write(root, step, tensors, metadata)
        except CheckpointError as error:
            self._error = error
        except BaseException as error:  # say what it is, whatever it is: nobody else sees it
            text = f"saving step {step} in the background: {describe(error)}"
            self._error = CheckpointError(text)
        if self._error is not None:
            logger.error("%s", self._error)

    def _write(self, root: Path, step: int, tensors: Tensors, metadata: dict[str, dict]) -> None:
        what = f"cannot save {layout.checkpoint_path(root, step)}"
        saving = layout.saving_path(root, step)
        start = time.perf_counter()
        if self._local and root == self.second:
            self._ranks.all(what, lambda: save_local(root, step, tensors, metadata, self._ranks))
            # now that every rank has this one
            self._ranks.all(what, lambda: layout.remove_all_but(root, step))
            return
        self._ranks.first(what, lambda: layout.sweep(root))
        try:
            save(saving, tensors, metadata, self._ranks.group)
            self._ranks.first(what, lambda: self._publish(root, step))
        except CheckpointError:
            if self._ranks.rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
            raise
        if self._ranks.rank == 0:
            path = layout.checkpoint_path(root, step)
            size = sum(entry["bytes"] for entry in layout.read_manifest(path).values())
            seconds = time.perf_counter() - start
            self._report = (
                f"wrote {path}: {size / 1e9:.3g} GB in {seconds:.1f} s, "
                f"{size / seconds / 1e9:.2f} GB/s"
            )

    def go_back(
        self, before: int, fits: Callable[[dict[str, dict]], bool] | None = None
    ) -> Path | None:
        """This run's newest whole checkpoint of fewer than `before` steps, if there is one.

        Later ones, of what is given up, are deleted. `fits`: see `find_newest`. Raises
        CheckpointError.
        """
        self.wait()

        def among(path: Path) -> bool:
            return layout.step_of(path) < before and path not in self._of_others

        places, local = [self.root], None
        if self.second is not None and self._local:
            local = self.second.parent
        elif self.second is not None:
            places.append(self.second)
        try:
            path = find_newest(places, group=self._ranks.group, among=among, local=local, fits=fits)
        except CheckpointError as error:
            logger.warning("%s", error)
            return None
        if path is None:
            return None
        step = self._proven = layout.step_of(path)
        what = "cannot go back to an earlier checkpoint"
        self._ranks.first(what, lambda: layout.give_up_after(step, self.root, self._of_others))
        if self.second is not None:
            place = self.second
            on = self._ranks.all if self._local else self._ranks.first
            on(what, lambda: layout.give_up_after(step, place, None))
        return path

    def _publish(self, root: Path, step: int) -> None:
        layout.publish(root, step)
        layout.write_tracker(root, step)
        last, every = (1, None) if root == self.second else (self._keep_last, self._keep_every)
        if last is None:
            return
        paths = {s: layout.checkpoint_path(root, s) for s in layout.list_steps(root)}
        mine = {s: path for s, path in paths.items() if s <= step}  # not what going back left above
        whole = [s for s, path in mine.items() if not layout.damage(path, checksums=False)]
        for old in layout.expired(whole, last, every):
            if old not in (step, self._proven):
                layout.remove(paths[old])
