"""Where the tokens of a micro-batch stand, and what earlier tokens left behind."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.parallel.context import Context


@dataclass(frozen=True)
class Geometry:
    """Positions and documents of a micro-batch of `b` sequences of `s` tokens.

    `cu_seqlens`, int32 `[documents + 1]`, cuts the `b * s` tokens into documents that do not attend
    to each other; None means that each sequence is one document. `rotary` holds cos and sin, each
    `[b, s, width / 2]` float32, by head width. Under context parallelism s counts this rank's part
    of each sequence, `cu_seqlens` the whole, and `context` says which part it is.
    """

    positions: Tensor  # [b, s] int64
    cu_seqlens: Tensor | None
    rotary: dict[int, tuple[Tensor, Tensor]]
    context: Context | None = None


class KeyValueCache:
    """Keys and values of one layer during generation, `[b, max_length, heads, width]` each.

    Rows may have different lengths: a token is stored at its position, and a row's length is its
    last position plus one.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store `k`, `v` `[b, n, heads, width]` at `positions` `[b, n]`.

        Returns all keys and values, and the lengths `[b]` (int32) that are in use.
        """
        if self.keys is None or self.values is None:
            self.keys = k.new_zeros((k.shape[0], self.max_length, *k.shape[2:]))
            self.values = v.new_zeros((v.shape[0], self.max_length, *v.shape[2:]))
        rows = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
        self.keys[rows, positions] = k
        self.values[rows, positions] = v
        return self.keys, self.values, (positions[:, -1] + 1).int()
