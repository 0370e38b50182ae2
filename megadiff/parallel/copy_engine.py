"""Messages between the GPUs of one host that their copy engines carry, beside products.

NCCL copies with the multiprocessors that a product fills, so that one waits for the other. Copy
engines need none of them: every rank writes into the memory of the others (torch's symmetric
memory) and then a number behind it, for which the reader's stream waits in its own memory.

Messages are numbered, and all ranks of the axis start them in the same order. Each goes into one of
`SLOTS` buffers of the reader. Writing into a buffer again is safe without asking, because

- when message m starts, all up to m - 2 have been read (`_Message` checks it on the host, and the
  stream that reads them is the one that the copies of m wait for);
- a rank that has read m - 2 knows that its writer had begun it, and had by then read m - 4.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

SLOTS = 4
PIECES = 4  # of a message, each with a number of its own
NUMBERS = 1024


class PeerMemory:
    """The buffers that the ranks of a tensor-parallel axis write each other's messages into."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        # what is written behind a message, by a copy engine too, comes from here
        self.numbers = torch.arange(1, NUMBERS + 1, dtype=torch.int32, device=device)
        flags = symmetric_memory.empty(SLOTS * PIECES * size, dtype=torch.int32, device=device)
        flags.zero_()
        self._flags = flags
        handle = symmetric_memory.rendezvous(flags, group)
        self._flags_of = [
            handle.get_buffer(peer, (SLOTS, PIECES, size), torch.int32) for peer in range(size)
        ]
        self._buffer: Tensor | None = None
        self._handle: Any = None
        self._slot_bytes = 0
        self._messages: list[weakref.ref[_Message]] = []
        self.started = 0
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def reserve(self, size: int) -> None:
        """Buffers for messages of `size` bytes; collective where they have to grow."""
        size = -(-size // 512) * 512
        if size <= self._slot_bytes:
            return
        torch.cuda.synchronize(self.device)  # nobody reads or writes the old ones any more
        dist.barrier(self.group)
        self._buffer = self._handle = None
        self._buffer = symmetric_memory.empty(SLOTS * size, dtype=torch.uint8, device=self.device)
        self._handle = symmetric_memory.rendezvous(self._buffer, self.group)
        self._slot_bytes = size

    def begin(self, message: "_Message") -> int:
        """The number of a message that starts now."""
        if len(self._messages) > 1 and self._messages[-2]() is not None:
            raise RuntimeError("a message is held while the second one after it starts")
        self._messages = [*self._messages[-1:], weakref.ref(message)]
        self.started += 1
        return self.started - 1

    def buffer(self, peer: int, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        offset = slot * self._slot_bytes // dtype.itemsize
        return self._handle.get_buffer(peer, shape, dtype, offset)

    def flag(self, peer: int, slot: int, piece: int, source: int) -> Tensor:
        return self._flags_of[peer][slot, piece, source : source + 1]


class _Message:
    def __init__(self, peers: PeerMemory, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.peers = peers
        peers.reserve(torch.Size(shape).numel() * dtype.itemsize)
        number = peers.begin(self)
        self.slot, self.number = number % SLOTS, number // SLOTS % NUMBERS
        self.buffers = [peers.buffer(p, self.slot, shape, dtype) for p in range(peers.size)]

    def send(self, piece: int, copies: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """Copies into the buffer of each rank, then the message's number behind them.

        This rank's own come last: whoever has waited for them has seen all sources read.
        """
        me, n = self.peers.rank, self.peers.size
        self.peers.stream.wait_stream(torch.cuda.current_stream())
        number = self.peers.numbers[self.number : self.number + 1]
        with torch.cuda.stream(self.peers.stream):
            for peer in [*range(me + 1, n), *range(me), me]:
                for target, source in copies[peer]:
                    target.copy_(source)
                self.peers.flag(peer, self.slot, piece, me).copy_(number)

    def arrive(self, piece: int) -> None:
        """The current stream goes on when all ranks' part of `piece` is here."""
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        for source in range(self.peers.size):
            address = self.peers.flag(self.peers.rank, self.slot, piece, source).data_ptr()
            equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
            (status,) = driver.cuStreamWaitValue32(stream, address, self.number + 1, int(equal))
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuStreamWaitValue32 failed: {status}")


class Gather(_Message):
    """`collectives.PendingGather` by copy engines. What it gives is this axis' own memory, which
    the second message after it writes over."""

    def __init__(self, x: Tensor, peers: PeerMemory, pieces: Sequence[slice]) -> None:
        b, s, *rest = x.shape
        super().__init__(peers, (b, peers.size * s, *rest), x.dtype)
        self.pieces, self._x = pieces, x.contiguous()
        self._arrived = 0
        me = slice(peers.rank * s, (peers.rank + 1) * s)
        for piece, rows in enumerate(pieces):
            sequences = range(rows.start, rows.stop)
            self.send(piece, [[(to[i, me], self._x[i]) for i in sequences] for to in self.buffers])

    def wait(self, rows: slice | None = None) -> Tensor:
        whole = self.buffers[self.peers.rank]
        rows = rows or slice(0, whole.shape[0])
        for piece in range(self._arrived, len(self.pieces)):
            if self.pieces[piece].start < rows.stop:
                self.arrive(piece)
                self._arrived += 1
        return whole[rows]


class ReduceScatter(_Message):
    """`collectives.PendingReduceScatter` by copy engines; a sum is rounded once."""

    def __init__(self, shape: Sequence[int], like: Tensor, peers: PeerMemory) -> None:
        b, s, *rest = shape
        part = (b, s // peers.size, *rest)
        super().__init__(peers, (peers.size, *part), like.dtype)
        self._out = like.new_empty(part)
        self._running: list[tuple[slice, Tensor]] = []

    def start(self, rows: slice, x: Tensor) -> None:
        x = x.contiguous()
        parts, me = x.chunk(self.peers.size, 1), self.peers.rank
        sequences = list(enumerate(range(rows.start, rows.stop)))
        copies = [
            [(to[me, i], part[j]) for j, i in sequences]
            for to, part in zip(self.buffers, parts, strict=True)
        ]
        self.send(len(self._running), copies)
        self._running.append((rows, x))

    def wait(self) -> Tensor:
        whole = self.buffers[self.peers.rank]
        for piece, (rows, _) in enumerate(self._running):
            self.arrive(piece)
            torch.sum(whole[:, rows], 0, out=self._out[rows])
        self._running = []
        return self._out
