"""Messages between the GPUs of one host that their copy engines carry, beside products.

NCCL copies with the multiprocessors that a product fills, so that one waits for the other. Copy
engines need none: every rank writes into the memory of the others (torch's symmetric memory) and
then a number behind it, for which the reader's stream waits without a kernel.

All ranks of the axis start the same messages in the same order. Each goes into one of `SLOTS`
buffers of its reader, in turn. No rank asks before it writes into one again, because

- when message m starts, its rank has read all up to m - 2 (`PeerMemory.begin` checks it on the
  host; the copies of m wait for the stream that reads);
- a rank that has read m - 2 knows that the writer had started it, and had by then read m - 4.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

SLOTS = 4
PIECES = 4  # of a message, at most; each with a number behind it


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"a copy between GPUs could not be started: {result[0].name}")


class _Shared:
    """`size` bytes of every rank, and where they are."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self.memory, group)
        self.addresses = list(self._handle.buffer_ptrs)


class PeerMemory:
    """The buffers into which the ranks of a tensor-parallel axis write each other's messages.

    Making one is collective. Needs GPUs of one host that reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        from cuda.bindings import driver, runtime  # they come with torch for CUDA

        self.group, self.rank, self.size = group, rank, size
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._copy2d, self._copy = runtime.cudaMemcpy2DAsync, runtime.cudaMemcpyAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._wait = driver.cuStreamWaitValue32
        self._equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self.to_peers, self.to_itself = torch.cuda.Stream(), torch.cuda.Stream()
        self._ready = torch.cuda.Event()
        # A number tells a message from the one before it in the same buffer. Copy engines write it
        # too, from here; after the last piece for all that are left, so that none grows old.
        self._numbers = torch.arange(1, 3, dtype=torch.int32, device=self.device)
        self._numbers = self._numbers.repeat_interleave(PIECES)
        self._flags = _Shared(SLOTS * size * PIECES * 4, group)
        self._flags.memory.zero_()
        self._buffers: _Shared | None = None
        self.slot_bytes = self._started = 0
        self._messages: list[weakref.ref[_Message]] = []
        torch.cuda.synchronize(self.device)
        dist.barrier(group)

    def begin(self, message: "_Message", size: int) -> tuple[int, _Shared]:
        """The number of a message of `size` bytes that starts now, and the buffers for it."""
        if len(self._messages) == 2 and self._messages[0]() is not None:
            raise RuntimeError("a message is still held when the second one after it starts")
        self._messages = [*self._messages[-1:], weakref.ref(message)]
        if self._buffers is None or size > self.slot_bytes:
            torch.cuda.synchronize(self.device)  # messages before this one have been written
            dist.barrier(self.group)
            self.slot_bytes = -(-size // 512) * 512
            self._buffers = _Shared(SLOTS * self.slot_bytes, self.group)
        self._started += 1
        return self._started - 1, self._buffers

    def produced(self) -> None:
        """Copies that start from here on wait for what the current stream has to do until now."""
        self._ready.record()
        self.to_peers.wait_event(self._ready)
        self.to_itself.wait_event(self._ready)

    def copy(
        self,
        stream: int,
        to: int,
        pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        _check(self._copy2d(to, pitch, source, source_pitch, width, rows, self._kind, stream))

    def _flag(self, peer: int, slot: int, piece: int, source: int) -> int:
        return self._flags.addresses[peer] + 4 * ((slot * self.size + source) * PIECES + piece)

    def raise_flag(
        self, stream: int, peer: int, slot: int, piece: int, number: int, count: int
    ) -> None:
        """For `count` pieces from this one on."""
        to, source = self._flag(peer, slot, piece, self.rank), 4 * PIECES * number
        source += self._numbers.data_ptr()
        _check(self._copy(to, source, 4 * count, self._kind, stream))

    def wait_for(self, slot: int, piece: int, source: int, number: int) -> None:
        """The current stream goes on when `source` has written its part."""
        stream = torch.cuda.current_stream().cuda_stream
        address = self._flag(self.rank, slot, piece, source)
        _check(self._wait(stream, address, number + 1, self._equal))


class _Message:
    """One message: `[b, ...]` cut along the sequence, whose pieces are ranges of its sequences."""

    def __init__(self, peers: PeerMemory, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.peers = peers
        size = torch.Size(shape).numel() * dtype.itemsize
        number, self._shared = peers.begin(self, size)
        self.slot, self.number = number % SLOTS, number // SLOTS % 2
        begin = self.slot * peers.slot_bytes
        self._bases = [address + begin for address in self._shared.addresses]
        self.buffer = self._shared.memory[begin : begin + size].view(dtype).view(*shape)
        self._sent = torch.cuda.Event()

    def send(
        self, piece: int, to: int, pitch: int, sources: Mapping[int, int], source_pitch: int,
        width: int, rows: int, last: bool,
    ) -> None:  # fmt: skip
        """Rows of `width` bytes to offset `to` of each rank of `sources`; then the number."""
        peers, count = self.peers, PIECES - piece if last else 1
        for peer, source in sources.items():
            stream = (peers.to_itself if peer == peers.rank else peers.to_peers).cuda_stream
            peers.copy(stream, self._bases[peer] + to, pitch, source, source_pitch, width, rows)
            peers.raise_flag(stream, peer, self.slot, piece, self.number, count)
        self._sent.record(peers.to_peers)

    def arrive(self, piece: int, sources: Sequence[int]) -> None:
        for source in sources:
            self.peers.wait_for(self.slot, piece, source, self.number)

    def sent(self) -> None:
        """What the current stream does from here on may free or change what has been sent."""
        torch.cuda.current_stream().wait_event(self._sent)

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank beginning with its successor."""
        me, n = self.peers.rank, self.peers.size
        return [*range(me + 1, n), *range(me)]


class Gather(_Message):
    """`collectives.PendingGather` by copy engines. What it gives is this axis' own memory, which
    is written over when the second message after it starts."""

    def __init__(self, x: Tensor, peers: PeerMemory, pieces: Sequence[slice]) -> None:
        b, s, *rest = x.shape
        super().__init__(peers, (b, peers.size * s, *rest), x.dtype)
        self.pieces, self._arrived = pieces, 0
        self._x = x.contiguous()
        width = self._x[0].numel() * x.dtype.itemsize
        peers.produced()
        for piece, rows in enumerate(pieces):
            source = self._x.data_ptr() + rows.start * width
            ranks = [*self.others, peers.rank]
            sources = dict(zip(ranks, [source] * peers.size, strict=True))
            to = (rows.start * peers.size + peers.rank) * width
            count = rows.stop - rows.start
            last = piece == len(pieces) - 1
            self.send(piece, to, peers.size * width, sources, width, width, count, last)

    def wait(self, rows: slice | None = None) -> Tensor:
        rows = rows or slice(0, self.buffer.shape[0])
        while self._arrived < len(self.pieces) and self.pieces[self._arrived].start < rows.stop:
            self.arrive(self._arrived, range(self.peers.size))
            self._arrived += 1
            if self._arrived == len(self.pieces):
                self.sent()
        return self.buffer[rows]


class ReduceScatter(_Message):
    """`collectives.PendingReduceScatter` by copy engines; a sum is rounded once."""

    def __init__(self, shape: Sequence[int], like: Tensor, peers: PeerMemory) -> None:
        b, s, *rest = shape
        part = (b, s // peers.size, *rest)
        super().__init__(peers, (peers.size, *part), like.dtype)
        self._out = like.new_empty(part)
        self._running: list[tuple[slice, Tensor]] = []

    def start(self, rows: slice, x: Tensor) -> None:
        peers, x = self.peers, x.contiguous()
        width = self._out[0].numel() * x.dtype.itemsize
        peers.produced()
        sources = {peer: x.data_ptr() + peer * width for peer in self.others}
        to = (peers.rank * len(self._out) + rows.start) * width
        piece, count = len(self._running), rows.stop - rows.start
        last = rows.stop == len(self._out)
        self.send(piece, to, width, sources, peers.size * width, width, count, last)
        self._running.append((rows, x))

    def wait(self) -> Tensor:
        for piece, (rows, x) in enumerate(self._running):
            self.arrive(piece, self.others)
            own = x.chunk(self.peers.size, 1)[self.peers.rank]
            parts = [own, *(self.buffer[peer, rows] for peer in self.others)]
            if len(parts) > 2:
                torch.sum(torch.stack(parts), 0, out=self._out[rows])
                continue
            for i, out in enumerate(self._out[rows]):  # whole sequences: three times the speed
                torch.add(parts[0][i], parts[1][i], out=out)
        self.sent()
        self._running = []
        return self._out
