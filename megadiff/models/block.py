"""One block of the decoder: a token mixer and an MLP, each behind a norm and beside a residual."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.attention import DiffAttentionV1, DiffAttentionV2, StandardAttention
from megadiff.models.delta_net import DeltaNet, GatedDeltaNet
from megadiff.models.geometry import Geometry
from megadiff.models.mixer import Mixer
from megadiff.models.mlp import MLP
from megadiff.models.norm import Norm
from megadiff.parallel.mesh import ParallelMesh

MIXERS: dict[TokenMixer, Callable[..., Mixer]] = {
    mixer.kind: mixer
    for mixer in (StandardAttention, DiffAttentionV1, DiffAttentionV2, DeltaNet, GatedDeltaNet)
}


class Block(nn.Module):
    """Pre-norm block; `layer` is the global 0-based index, which chooses mixer and lambda_init."""

    def __init__(self, config: ModelConfig, layer: int, mesh: ParallelMesh, **factory: Any) -> None:
        super().__init__()
        name = f"layers.{layer}"
        mixer = MIXERS[config.mixer_of_layer(layer)]
        self.mixer_norm = Norm(config, mesh, f"{name}.mixer_norm", **factory)
        self.mixer = mixer(config, layer, mesh, f"{name}.mixer", **factory)
        self.mlp_norm = Norm(config, mesh, f"{name}.mlp_norm", **factory)
        self.mlp = MLP(config, mesh, f"{name}.mlp", **factory)

    def forward(self, x: Tensor, geometry: Geometry, cache: Any = None) -> Tensor:
        x, y = self.mixer_norm(x)
        x, y = self.mlp_norm(x, self.mixer(y, geometry, cache))
        return x + self.mlp(y)
