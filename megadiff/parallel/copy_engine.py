"""Messages between the GPUs of one host that their copy engines carry, beside products.

NCCL copies with the multiprocessors that a product fills, so that one waits for the other. Copy
engines need none: every rank writes into the memory of the others (torch's symmetric memory) and
then a number behind it, for which the reader's stream waits without a kernel.

What a rank has itself needs no message. A product starts with this rank's part of a gathered
sequence while the parts of others arrive, and ends with this rank's part of a sum while those of
others travel.

All ranks of the axis start the same messages in the same order. Each goes into one of `SLOTS`
buffers of its reader, in turn. No rank asks before it writes into one again, because

- when message m starts, its rank has read all up to m - 2 (`PeerMemory.begin` holds the caller to
  it; the copies of m wait for the stream that reads);
- a rank that has read m - 2 knows that every writer had started it, and had by then read m - 4.

`tests/parallel/test_copy_engine.py` runs this file on simulated streams in random orders.
"""

import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

SLOTS = 4
PIECES = 2  # of a message, at most; each with a number behind it. More cost the host more


class Part(NamedTuple):
    """Of `[b, s, ...]`: what one product reads or makes, `x[part]`."""

    rows: slice
    tokens: slice


def cut(batch: int, count: int) -> list[slice]:
    """The sequences of a batch in at most `count` runs."""
    count = min(count, batch)
    return [slice(batch * i // count, batch * (i + 1) // count) for i in range(count)]


class _Shared:
    """`size` bytes of every rank, and where they are."""

    def __init__(self, size: int, group: dist.ProcessGroup, rank: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric_memory.rendezvous(self.memory, group)
        self.addresses = list(self._handle.buffer_ptrs)
        assert self.addresses[rank] == self.memory.data_ptr()


class PeerMemory:
    """The buffers into which the ranks of a tensor-parallel axis write each other's messages.

    Messages have at most `message_bytes`. Making this is collective, and needs GPUs of one host
    that reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, message_bytes: int) -> None:
        # they come with torch for CUDA, and have no types
        driver, runtime = (import_module(f"cuda.bindings.{name}") for name in ("driver", "runtime"))
        self.rank, self.size = rank, size
        self.others = [*range(rank + 1, size), *range(rank)]
        self._copy_rows, self._copy = runtime.cudaMemcpy2DAsync, runtime.cudaMemcpyAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._wait = driver.cuStreamWaitValue32
        flags = driver.CUstreamWaitValue_flags
        self._equal = int(flags.CU_STREAM_WAIT_VALUE_EQ)
        if _can_flush(driver):  # what was written before the number is seen after the wait
            self._equal |= int(flags.CU_STREAM_WAIT_VALUE_FLUSH)
        self.to_peers = torch.cuda.Stream()
        self._ready = torch.cuda.Event()
        # The numbers 1 and 2 tell a message from the one before it in the same buffer. Copy engines
        # write them too, from here; behind the last piece for all that are left: none grows old.
        numbers = torch.arange(1, 3, dtype=torch.int32, device="cuda")
        self._numbers = numbers.repeat_interleave(PIECES)
        self._flags = _Shared(SLOTS * size * PIECES * 4, group, rank)
        self.slot_bytes = -(-message_bytes // 512) * 512
        self.buffers = _Shared(SLOTS * self.slot_bytes, group, rank)
        self._last: list[tuple[weakref.ref[_Message], _Progress]] = []
        self._started = 0
        torch.cuda.synchronize()
        dist.barrier(group)

    def begin(self, message: "_Message", size: int) -> int:
        """The index of a message of `size` bytes that starts now."""
        if size > self.slot_bytes:
            raise RuntimeError(f"a message of {size} bytes for buffers of {self.slot_bytes}")
        if len(self._last) == 2:
            message_before, progress = self._last[0]
            if message_before() is not None or not progress.finished:
                state = "still held" if progress.finished else "not waited for"
                raise RuntimeError(f"a message is {state} when the second one after it starts")
        self._last = [*self._last[-1:], (weakref.ref(message), message.progress)]
        self._started += 1
        return self._started - 1

    def copies_wait(self) -> None:
        """Copies that start from here on wait for what the current stream has to do until now."""
        self._ready.record()
        self.to_peers.wait_event(self._ready)

    def write(
        self, to: int, pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """`rows` of `width` bytes, which begin every `pitch` and `source_pitch` bytes."""
        stream = self.to_peers.cuda_stream
        if rows > 1 and max(pitch, source_pitch) < 2**31:
            copy = (to, pitch, source, source_pitch, width, rows)
            _check(self._copy_rows(*copy, self._kind, stream))
            return
        for row in range(rows):
            _check(
                self._copy(to + row * pitch, source + row * source_pitch, width, self._kind, stream)
            )

    def raise_flags(self, peer: int, slot: int, pieces: range, number: int) -> None:
        """Write `number` behind `pieces` of this rank's message to `peer`."""
        to = self._flag(peer, slot, self.rank, pieces.start)
        source = self._numbers.data_ptr() + 4 * PIECES * (number - 1)
        _check(self._copy(to, source, 4 * len(pieces), self._kind, self.to_peers.cuda_stream))

    def wait_for(self, source: int, slot: int, piece: int, number: int) -> None:
        """The current stream goes on when `source` has written a piece to this rank."""
        address = self._flag(self.rank, slot, source, piece)
        stream = torch.cuda.current_stream().cuda_stream
        _check(self._wait(stream, address, number, self._equal))

    def _flag(self, reader: int, slot: int, writer: int, piece: int) -> int:
        return self._flags.addresses[reader] + 4 * ((slot * self.size + writer) * PIECES + piece)


def _can_flush(driver: Any) -> bool:
    """Whether the device may have to be told to; where it can not, writes arrive in their order."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
    status, can = driver.cuDeviceGetAttribute(attribute, torch.cuda.current_device())
    _check((status,))
    return bool(can)


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"a copy between GPUs failed to start: {result[0].name}")


class _Progress:
    finished = False


class _Message:
    """One message of `shape` to every other rank, in pieces of whole sequences, of which each rank
    has `local` tokens."""

    def __init__(
        self,
        peers: PeerMemory,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: list[slice],
        local: int,
    ) -> None:
        self.peers, self.progress = peers, _Progress()
        size = torch.Size(shape).numel() * dtype.itemsize
        index = peers.begin(self, size)
        self._slot, self._number = index % SLOTS, 1 + index // SLOTS % 2
        begin = self._slot * peers.slot_bytes
        self._bases = [address + begin for address in peers.buffers.addresses]
        self.buffer = peers.buffers.memory[begin : begin + size].view(dtype).view(*shape)
        self._sent = torch.cuda.Event()
        self.pieces, rank, n = pieces, peers.rank, peers.size
        self.own = Part(slice(0, pieces[-1].stop), slice(rank * local, (rank + 1) * local))
        before, after = slice(0, rank * local), slice((rank + 1) * local, n * local)
        sides = [side for side in (before, after) if side.stop > side.start]
        self.others = [Part(rows, side) for rows in self.pieces for side in sides]

    def send(
        self, piece: int, peer: int, source: int, to: int, pitch: int, source_pitch: int, width: int
    ) -> None:
        """A piece, from the address `source` to the offset `to` of a rank."""
        rows = self.pieces[piece]
        count = rows.stop - rows.start
        self.peers.write(self._bases[peer] + to, pitch, source, source_pitch, width, count)
        last = piece == len(self.pieces) - 1
        pieces = range(piece, PIECES if last else piece + 1)
        self.peers.raise_flags(peer, self._slot, pieces, self._number)

    def sent(self) -> None:
        """All is on its way."""
        self._sent.record(self.peers.to_peers)

    def arrive(self, piece: int) -> None:
        """The current stream goes on when `piece` is here from all others."""
        for source in self.peers.others:
            self.peers.wait_for(source, self._slot, piece, self._number)

    def finish(self) -> None:
        """After the last piece: the current stream may free and change what was sent."""
        torch.cuda.current_stream().wait_event(self._sent)
        self.progress.finished = True


class Gather(_Message):
    """`collectives.PendingGather` by copy engines. What it gives is memory of `peers`, which is
    written over when the second message after it starts: do not keep it."""

    def __init__(self, x: Tensor, peers: PeerMemory, whole: bool) -> None:
        b, s, *rest = x.shape
        self._x = x.contiguous()
        pieces = cut(b, 1 if whole else PIECES)
        super().__init__(peers, (b, peers.size * s, *rest), x.dtype, pieces, s)
        self.parts = [self.own, *self.others]
        self._arrived = 0
        width = self._x[0].numel() * x.dtype.itemsize
        peers.copies_wait()
        for piece, rows in enumerate(self.pieces):
            source = self._x.data_ptr() + rows.start * width
            to = (rows.start * peers.size + peers.rank) * width
            for peer in peers.others:
                self.send(piece, peer, source, to, peers.size * width, width, width)
        self.sent()

    def wait(self, part: Part | None = None) -> Tensor:
        """A part of `parts`, or all."""
        if part is self.own:
            return self._x
        stop = self.own.rows.stop if part is None else part.rows.stop
        while self._arrived < len(self.pieces) and self.pieces[self._arrived].start < stop:
            self.arrive(self._arrived)
            self._arrived += 1
            if self._arrived == len(self.pieces):
                self.finish()
        if part is not None:
            return self.buffer[part]
        for x, row in zip(self._x, self.buffer[self.own], strict=True):  # plain copies are faster
            row.copy_(x)
        return self.buffer


class ReduceScatter(_Message):
    """`collectives.PendingReduceScatter` by copy engines; a sum is rounded once."""

    def __init__(self, shape: Sequence[int], like: Tensor, peers: PeerMemory) -> None:
        b, s, *rest = shape
        part = (b, s // peers.size, *rest)
        super().__init__(peers, (peers.size, *part), like.dtype, cut(b, PIECES), part[1])
        self.parts = [*self.others, self.own]
        self._out = like.new_empty(part)
        self._running: list[Tensor] = []

    def start(self, part: Part, x: Tensor) -> None:
        """The next of `parts`."""
        peers, x = self.peers, x.contiguous()
        assert x.dtype == self._out.dtype and len(self._running) == self.parts.index(part)
        self._running.append(x)
        if part is self.own:
            return
        width = self._out[0].numel() * x.dtype.itemsize
        local = self._out.shape[1]
        ranks = range(part.tokens.start // local, part.tokens.stop // local)
        peers.copies_wait()
        piece = self.pieces.index(part.rows)
        to = (peers.rank * len(self._out) + part.rows.start) * width
        for peer in peers.others:
            if peer in ranks:
                source = x.data_ptr() + (peer - ranks.start) * width
                self.send(piece, peer, source, to, width, len(ranks) * width, width)
        self.sent()

    def wait(self) -> Tensor:
        rank, own = self.peers.rank, self._running[-1]
        for piece, rows in enumerate(self.pieces):
            self.arrive(piece)
            if self.peers.size == 2:
                torch.add(own[rows], self.buffer[1 - rank, rows], out=self._out[rows])
            else:  # in the order of ranks
                self.buffer[rank, rows].copy_(own[rows])
                torch.sum(self.buffer[:, rows], 0, out=self._out[rows])
        self.finish()
        self._running = []
        return self._out
