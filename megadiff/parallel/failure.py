"""One rank fails, all end: also ranks that wait on a device for a message that will never come.

A rank that fails leaves its number in the store that the ranks met at. A thread of every rank looks
there, and ends its process a few seconds later; in between, a rank whose own collective failed
tells so itself. The store may lie on rank 0, and be gone with it.
"""

import contextlib
import os
import sys
import threading

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "megadiff/failed_rank"
_PERIOD = 2.0  # seconds between looks
_GRACE = 3.0  # seconds from seeing a failure to ending
_left = threading.Event()


def announce_failure() -> None:
    """Tell the other ranks that this one is about to end; does nothing for a single process."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # whoever holds the store may be gone already
            _get_default_store().set(_KEY, str(dist.get_rank()))


def end_when_others_fail() -> None:
    """Watch for failures of other ranks from now on; call once, as soon as the ranks have met."""
    # A connection of its own: the main thread may block in its.
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    rank = dist.get_rank()

    def watch() -> None:
        reason = None
        while not _left.wait(_PERIOD if reason is None else _GRACE):
            if reason is not None:
                print(f"rank {rank} ends because {reason}", file=sys.stderr, flush=True)
                os._exit(1)
            try:
                failed = int(store.get(_KEY)) if store.check([_KEY]) else rank
            except Exception:
                reason = "the store that the ranks met at is gone, and rank 0 or the launcher"
            else:
                reason = f"rank {failed} failed" if failed != rank else None

    threading.Thread(target=watch, name="failure watch", daemon=True).start()


def let_others_end() -> None:
    """Others may end before this rank from here on: it waits for none any more."""
    _left.set()


def leave() -> None:
    """End the process groups, if any; `let_others_end`."""
    let_others_end()
    if dist.is_initialized():
        dist.destroy_process_group()
