"""GPUs of one host whose streams are lists of work, for `megadiff.parallel.copy_engine` on a CPU.

Copies are moves of memory, waits look at memory; `run` does the work of all streams in a random
order that keeps the order within each, so that one seed finds a race and finds it again. Or
`use_shared_memory`: each process is a rank, and does its work at once.
"""

import ctypes
import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megadiff.parallel import copy_engine, mesh
from megadiff.parallel.copy_engine import PIECES, PeerMemory


class Stream:
    current: "Stream"

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], bool] | None, Callable[[], object]]] = []
        self.done = 0

    @property
    def cuda_stream(self) -> "Stream":
        return self

    def run(self, do: Callable[[], object], when: Callable[[], bool] | None = None) -> None:
        self.work.append((when, do))

    def wait_event(self, event: "Event") -> None:
        stream, count = event.stream, event.count
        if stream is not None:
            self.run(lambda: None, when=lambda: stream.done >= count)

    @property
    def ready(self) -> bool:
        when, _ = self.work[self.done]
        return when is None or when()


class Event:
    stream: Stream | None = None
    count = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream.current
        self.count = len(self.stream.work)


class OnStream(TorchFunctionMode):
    """Sums and copies go to the current stream."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.add, torch.sum, Tensor.copy_):
            return Stream.current.run(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class SimulatedPeers(PeerMemory):
    def __init__(self, rank: int, flags: list[Tensor], buffers: list[Tensor]) -> None:
        self.rank, self.size = rank, len(flags)
        self.others = [*range(rank + 1, self.size), *range(rank)]
        self._kind, self._equal = 0, 0
        self._copy_rows, self._copy, self._wait = copy_rows, copy, wait
        self.to_peers = Stream()  # type: ignore[assignment]
        self._ready = Event()  # type: ignore[assignment]
        self._numbers = torch.arange(1, 3, dtype=torch.int32).repeat_interleave(PIECES)
        self._flags, self.buffers = (  # type: ignore[assignment]
            SimpleNamespace(memory=memory[rank], addresses=[m.data_ptr() for m in memory])
            for memory in (flags, buffers)
        )
        self.slot_bytes = len(buffers[rank]) // copy_engine.SLOTS
        self._last, self._started = [], 0


def copy(to: int, source: int, size: int, kind: int, stream: Stream) -> tuple[int]:
    stream.run(lambda: ctypes.memmove(to, source, size))
    return (0,)


def copy_rows(
    to: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int,
    stream: Stream,
) -> tuple[int]:  # fmt: skip
    def move() -> None:
        for row in range(rows):
            ctypes.memmove(to + row * pitch, source + row * source_pitch, width)

    stream.run(move)
    return (0,)


def wait(stream: Stream, address: int, value: int, flags: int) -> tuple[int]:
    stream.run(lambda: None, when=lambda: ctypes.c_int32.from_address(address).value == value)
    return (0,)


def connect(ranks: int, message_bytes: int) -> list[SimulatedPeers]:
    slots, size = copy_engine.SLOTS, -(-message_bytes // 512) * 512
    flags = [torch.zeros(slots * ranks * PIECES, dtype=torch.int32) for _ in range(ranks)]
    buffers = [torch.full((slots * size,), 127, dtype=torch.uint8) for _ in range(ranks)]
    return [SimulatedPeers(rank, flags, buffers) for rank in range(ranks)]


class SharedPeers(SimulatedPeers):
    """Buffers of processes, in files. What a rank must have read by now is spoilt."""

    def __init__(
        self, folder: str, group: dist.ProcessGroup, rank: int, size: int, message_bytes: int
    ) -> None:
        slots, slot_bytes = copy_engine.SLOTS, -(-message_bytes // 512) * 512
        name = f"{folder}/{dist.get_process_group_ranks(group)[0]}"

        def shared(kind: str, length: int) -> list[Tensor]:
            names = [f"{name}-{r}-{kind}" for r in range(size)]
            return [torch.from_file(n, True, length, dtype=torch.uint8) for n in names]

        flags = shared("flags", slots * size * PIECES * 4)
        buffers = shared("buffers", slots * slot_bytes)
        self.mapped = [*flags, *buffers]
        super().__init__(rank, flags, buffers)
        dist.barrier(group)

    def begin(self, message: Any, size: int) -> int:
        """Nobody can have started the message after the next, which comes where `last` was."""
        index = super().begin(message, size)
        last = (index - 2) % copy_engine.SLOTS
        self.buffers.memory.view(copy_engine.SLOTS, -1)[last] = 127
        return index


def use_shared_memory(folder: str) -> None:
    """From now on in this process."""

    def at_once(_: Stream, do: Callable[[], object], when: Any = None) -> None:
        while when is not None and not when():
            time.sleep(0)
        do()

    Stream.run = at_once  # type: ignore[method-assign]
    Stream.current = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc]
    torch.cuda.current_stream = lambda: Stream.current  # type: ignore
    mesh.PeerMemory = partial(SharedPeers, folder)  # type: ignore[misc]


def run(streams: list[Stream], seed: int) -> None:
    """All work of `streams`; some are slow, and which ones changes. Raises where none can go on."""
    order = random.Random(seed)
    speed = {stream: order.choice([1, 1, 5, 40]) for stream in streams}
    waiting = [stream for stream in streams if stream.work]
    while waiting:
        if order.random() < 0.02:
            speed[order.choice(streams)] = order.choice([1, 5, 40])
        ready = [stream for stream in waiting if stream.ready]
        if not ready:
            raise RuntimeError("every stream waits")
        stream = order.choices(ready, [speed[stream] for stream in ready])[0]
        stream.work[stream.done][1]()
        stream.done += 1
        if stream.done == len(stream.work):
            waiting.remove(stream)
