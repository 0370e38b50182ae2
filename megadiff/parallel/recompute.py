"""Recomputation: activations computed again in backward instead of kept (arXiv 2205.05198)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Recompute:
    """What is recomputed; names and meanings are Megatron-LM's.

    `selective` recomputes the attention operator, whose inputs are kept anyway. `full` keeps only
    the input of runs of layers: all layers in runs of `num_layers` (`uniform`), or each of the
    first `num_layers` layers of a stage as a run of its own while the others keep all (`block`).
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int = 1

    def runs(self, layers: Sequence[T]) -> Iterator[tuple[Sequence[T], bool]]:
        """Cut the layers of a stage into runs, each with whether it is recomputed as a whole."""
        if self.granularity != "full":
            yield layers, False
        elif self.method == "block":
            for layer in layers[: self.num_layers]:
                yield [layer], True
            yield layers[self.num_layers :], False
        else:
            for start in range(0, len(layers), self.num_layers):
                yield layers[start : start + self.num_layers], True


def recomputed(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`function(...)`, of which only the inputs are kept for backward.

    Collectives inside run again, in the same order on every rank of a group. Without dropout there
    is no random state to restore.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
