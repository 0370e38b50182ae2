"""Which rank the others wait for: each rank's own time, apart from its waiting.

A rank's own time is what it takes to make its batch, and its forward and backward. Data-parallel
ranks do these without each other (gradients are summed in the background and waited for after),
so that the slowest is the one the step waits for. Tensor-, context- and pipeline-parallel ranks
wait for each other in every layer: there the numbers name the replica, not the rank in it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megadiff.parallel.mesh import gather_objects
from megadiff.training.setup import Environment


class OwnTime:
    """Seconds since the last `lap`; on a GPU measured there by events, which nothing waits for."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._on_gpu, self.enabled = device.type == "cuda", enabled
        self._data = self._compute = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def data(self) -> Iterator[None]:
        """The batch is made, or waited for, in here."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Forward and backward are in here."""
        if self._on_gpu and self.enabled:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            return
        start = time.perf_counter()
        yield
        self._compute += time.perf_counter() - start

    def lap(self) -> tuple[float, float]:
        """Seconds of computing and of making batches. Waits for the device."""
        for begin, end in self._events:
            end.synchronize()
            self._compute += begin.elapsed_time(end) / 1000
        seconds = self._compute, self._data
        self._events.clear()
        self._data = self._compute = 0.0
        return seconds


def slowest_rank(own: OwnTime, env: Environment, steps: int, step_seconds: float) -> dict[str, Any]:
    """The rank whose own time is the longest, and its share of a step; the same on all ranks.

    Seconds are of one step, of which there were `steps` since the last call.
    """
    table = torch.tensor(gather_objects(own.lap(), env.control), dtype=torch.float64) / steps
    total = table.sum(1)
    rank = int(total.argmax())
    compute, data = table[rank].tolist()
    return {
        "rank": rank,
        "share": (compute + data) / step_seconds,
        "compute_seconds": compute,
        "data_seconds": data,
        "median_seconds": float(total.median()),
    }


def straggler_line(values: dict[str, Any]) -> str:
    """`slowest_rank` for people."""
    seconds = values["compute_seconds"] + values["data_seconds"]
    return (
        f" slowest rank: {values['rank']}, whose own work takes {1000 * seconds:.1f} ms of a step "
        f"({100 * values['share']:.0f} %), {1000 * values['data_seconds']:.1f} ms of it for data; "
        f"the median rank {1000 * values['median_seconds']:.1f} ms"
    )
