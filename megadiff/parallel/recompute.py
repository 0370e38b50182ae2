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

    `selective` recomputes `modules` whose inputs are kept anyway: the attention operator
    (core_attn), the norms of the blocks (layernorm), the MLP's activation (mlp_act). `full` keeps
    only the input of runs of layers: all layers in runs of `num_layers` (`uniform`), or each of the
    first `num_layers` layers of a stage as a run of its own while the others keep all (`block`).
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int = 1
    modules: Sequence[str] = ("core_attn",)

    def chooses(self, module: str) -> bool:
        """Whether `module` is recomputed by itself."""
        return self.granularity == "selective" and module in self.modules

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


@dataclass(frozen=True)
class Again:
    """How to compute a tensor again."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def forget(x: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Let the linear layer that reads `x` keep `inputs` instead: x is `function(*inputs)`."""
    x.megadiff_again = Again(function, inputs)  # type: ignore[attr-defined]


def kept_for(x: Tensor) -> Again:
    """What a linear layer keeps for its weight's gradient: x itself unless it was forgotten."""
    again: Again | None = getattr(x, "megadiff_again", None)
    return Again(lambda x: x, (x,)) if again is None else again
