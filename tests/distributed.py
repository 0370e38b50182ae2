"""Run a function on several gloo processes inside a test.

    def job(x):                      # a module-level function
        ...
    results = run_distributed(4, job, x)     # what each rank returned, by rank

Workers are forked from a server that has imported everything heavy once, so a call takes a fraction
of a second. An exception on any rank fails the test with that rank's traceback.
"""

import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "numpy",
        "torch",
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "megadiff.training.engine",
        "deepspeed",  # passed over where it is not installed
        "tests.distributed",
    ]
)


def _entry(
    function: Callable[..., Any], rank: int, world: int, store: str, results: Any, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        # plain pickles: a tensor must not be shared with a worker that ends
        results.put((rank, None, pickle.dumps(function(*args))))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_distributed(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 180
) -> list[Any]:
    """`function(*args)` on `world` ranks with an initialised gloo group; its results by rank.

    Raises AssertionError with the traceback of the first rank that failed, TimeoutError when a rank
    has not answered within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        store = str(Path(folder) / "store")
        workers = [
            _context.Process(target=_entry, args=(function, r, world, store, results, args))
            for r in range(world)
        ]
        for worker in workers:
            worker.start()
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(values) < world:
                try:
                    rank, error, value = results.get(timeout=max(deadline - time.monotonic(), 0.1))
                except queue.Empty:
                    missing = sorted(set(range(world)) - set(values))
                    raise TimeoutError(f"no answer from ranks {missing} in {timeout} s") from None
                if error is not None:
                    raise AssertionError(f"rank {rank} failed:\n{error}")
                values[rank] = pickle.loads(value)
        finally:
            for worker in workers:
                worker.join(0 if len(values) < world else 10)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    return [values[rank] for rank in range(world)]
