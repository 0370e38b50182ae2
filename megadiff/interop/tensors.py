"""Tensors that are not there yet: a conversion is a function of a mapping of them to another."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


class InteropError(ValueError):
    """What can not be read, converted or represented; the message says what and why."""


@dataclass(frozen=True)
class Deferred:
    """A tensor of `shape` and `dtype` that `make` reads or computes, and nobody keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def rows(self, index: Tensor) -> "Deferred":
        """Rows `index` of it, in that order."""
        return Deferred((len(index), *self.shape[1:]), self.dtype, lambda: self.make()[index])

    def to(self, dtype: torch.dtype) -> "Deferred":
        """It in another type."""
        return Deferred(self.shape, dtype, lambda: self.make().to(dtype))


def deferred(tensor: Tensor) -> Deferred:
    """A tensor that is there."""
    return Deferred(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def listed(names: Iterable[str]) -> str:
    """Names for an error message, the first eight of them."""
    names = sorted(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


Progress = Callable[[int], Callable[[], None]]
"""Called with the number of tensors; what it returns is called for each of them."""


def silent(total: int) -> Callable[[], None]:
    """Progress that nobody sees."""
    return lambda: None


@dataclass
class Report:
    """What a conversion did: where to, and what a user should know."""

    path: Path
    notes: list[str] = field(default_factory=list)
