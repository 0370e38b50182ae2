"""Host copies of what a rank writes, so that training goes on while they are written."""

import logging
import math
from typing import Any

import torch

from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors

logger = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes


class HostBuffers:
    """One block of host memory, allocated once and reused by every copy.

    For tensors on a GPU it is page-locked, which makes copies run at the bus's speed. (Torch's own
    pinned allocator would round the size up to a power of two.)
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def reserve(self, tensors: Tensors) -> None:
        """Allocate what `copy(tensors)` needs, if it is not there yet."""
        pieces = [piece for tensor in tensors.values() for piece in _written(tensor)]
        size = sum(_padded(piece.data.nbytes) for piece in pieces)
        if self._memory.numel() >= size:
            return
        self.free()
        self._memory = torch.empty(size, dtype=torch.uint8).zero_()  # take the pages now
        if any(piece.data.is_cuda for piece in pieces):
            cuda: Any = torch.cuda.cudart()
            error = cuda.cudaHostRegister(self._memory.data_ptr(), size, 0)
            self._locked = int(error) == 0
            if not self._locked:
                logger.warning("no page-locked memory for %d bytes; copies to it are slow", size)

    def copy(self, tensors: Tensors) -> Tensors:
        """The pieces of `tensors` that are written, copied; valid until the next `copy`."""
        self.reserve(tensors)
        begin = 0
        copies: Tensors = {}
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            copied = copies[name] = ShardedTensor(tensor.shape, tensor.dtype)
            for piece in _written(tensor):
                size = math.prod(piece.sizes) * tensor.dtype.itemsize
                memory = self._memory[begin : begin + size]
                data = memory.view(tensor.dtype).view(piece.sizes)
                data.copy_(piece.data.detach(), non_blocking=self._locked)
                copied.pieces.append(Piece(piece.offset, data))
                devices.add(piece.data.device)
                begin += _padded(size)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copies

    def free(self) -> None:
        if self._locked:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._memory.data_ptr())
            self._locked = False
        self._memory = torch.empty(0, dtype=torch.uint8)


def _written(tensor: ShardedTensor) -> list[Piece]:
    return [piece for piece in tensor.pieces if piece.write and 0 not in piece.sizes]


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
