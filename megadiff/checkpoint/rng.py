"""The state of all random generators as tensors of a checkpoint.

Each rank has a row of its own, so the states are restored exactly on a world of the same size.
Another number of ranks has no such rows; there the caller seeds anew.
"""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors
from megadiff.checkpoint.storage import CheckpointReader

PREFIX = "rng."


def rng_tensors() -> Tensors:
    """The states of torch's, CUDA's (current device), numpy's and Python's generators, now.

    `rng.torch` and `rng.cuda` are uint8 [ranks, bytes], `rng.numpy` and `rng.python` int64
    [ranks, words]. Loading into the result and calling `set_rng` continues them.
    """
    states: dict[str, torch.Tensor] = {
        "torch": torch.get_rng_state(),
        "numpy": _numpy_state(),
        "python": _python_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {
        PREFIX + name: ShardedTensor(
            (ranks, state.numel()), state.dtype, [Piece((rank, 0), state.unsqueeze(0))]
        )
        for name, state in states.items()
    }


def matches(directory: str | Path, tensors: Tensors) -> bool:
    """Whether the checkpoint holds generator states of just this many ranks and kinds."""
    saved = {
        n: s for n, (s, _) in CheckpointReader(directory).tensors.items() if n.startswith(PREFIX)
    }
    return saved == {name: tensor.shape for name, tensor in tensors.items()}


def set_rng(tensors: Tensors) -> None:
    """Continue all generators from the states in `tensors`."""
    states = {name.removeprefix(PREFIX): t.pieces[0].data[0] for name, t in tensors.items()}
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    *key, position, has_gauss, gauss = states["numpy"].tolist()
    np.random.set_state(  # noqa: NPY002
        ("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, _float(gauss))
    )
    *key, has_gauss, gauss = states["python"].tolist()
    random.setstate((3, tuple(key), _float(gauss) if has_gauss else None))


def _numpy_state() -> torch.Tensor:
    """[627]: 624 words of the Mersenne twister, position, has_gauss, the kept Gaussian's bits."""
    state: Any = np.random.get_state()  # noqa: NPY002
    _, key, position, has_gauss, gauss = state
    return torch.tensor([*map(int, key), position, has_gauss, _bits(gauss)])


def _python_state() -> torch.Tensor:
    """[627]: 624 words of the Mersenne twister and the position, has_gauss, the Gaussian's bits."""
    _, key, gauss = random.getstate()
    return torch.tensor([*key, int(gauss is not None), _bits(gauss or 0.0)])


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
