"""What the block and the decoder expect of a token mixer."""

from typing import Any

from torch import Tensor, nn

from megadiff.models.geometry import Geometry


class Mixer(nn.Module):
    """Mixes tokens: `[b, s, hidden]` to the same (under sequence parallelism, this rank's part)."""

    mean_lambda: Tensor | None = None
    """Differential mixers: mean lambda over this rank's heads in the last forward pass."""

    recompute = False
    """Attention mixers: run the operator again in backward instead of keeping what it saves."""

    recompute_norm = False
    """DIFF V1: compute the norm of the heads again in backward instead of keeping its result."""

    def forward(self, x: Tensor, geometry: Geometry, cache: Any = None) -> Tensor:
        """`cache`, from `new_cache`, holds what earlier tokens of the same sequences left."""
        raise NotImplementedError

    def new_cache(self, max_length: int) -> Any:
        """An empty cache for sequences of up to `max_length` tokens."""
        raise NotImplementedError
