"""What the block and the decoder expect of a token mixer, and what mixers and MLP share."""

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.geometry import Geometry
from megadiff.parallel.parameter import Init

# 128 bytes in bfloat16: rows of a fused projection stay aligned behind lambda's, beta's and decay's
PAD = 64


def output_init(config: ModelConfig) -> Init:
    """Of the layers that add to the residual stream: the smaller the deeper the model."""
    return Init(config.init_method_std / math.sqrt(2 * config.num_layers))


class Mixer(nn.Module, ABC):
    """Mixes tokens: `[b, s, hidden]` to the same (under sequence parallelism, this rank's part)."""

    kind: TokenMixer

    mean_lambda: Tensor | None = None
    """Differential mixers: mean lambda over this rank's heads in the last forward pass."""

    recompute = False
    """Attention mixers: run the operator again in backward instead of keeping what it saves."""

    recompute_norm = False
    """DIFF V1: compute the norm of the heads again in backward instead of keeping its result."""

    @abstractmethod
    def forward(self, x: Tensor, geometry: Geometry, cache: Any = None) -> Tensor:
        """`cache`, from `new_cache`, holds what earlier tokens of the same sequences left."""

    @abstractmethod
    def new_cache(self, max_length: int) -> Any:
        """An empty cache for sequences of up to `max_length` tokens."""
