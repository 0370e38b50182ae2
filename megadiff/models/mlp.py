"""The MLP of a block: SwiGLU with gate and up in one product, or GELU."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import swiglu
from megadiff.models.mixer import output_init
from megadiff.parallel.linear import ColumnParallelLinear, Output, RowParallelLinear
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init
from megadiff.parallel.recompute import forget


class MLP(nn.Module):
    """`[b, s, hidden]` to the same, through `ffn_size` features sharded over tensor ranks.

    `recompute`: the activation is computed again in backward instead of kept.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, name: str, **factory: Any) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.mlp_bias
        init = Init(config.init_method_std)
        names = ("gate", "up") if config.swiglu else ("up",)
        outputs = [Output(n, ffn, ffn, init) for n in names]
        self.gated, self.recompute = config.swiglu, False
        self.up = ColumnParallelLinear(hidden, outputs, mesh, name, bias=bias, **factory)
        factory |= {"bias": bias, "init": output_init(config)}
        self.down = RowParallelLinear(ffn, hidden, ffn, mesh, f"{name}.down", **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        activation = swiglu if self.gated else F.gelu
        y = activation(x)
        if self.recompute:
            forget(y, activation, x)
        return self.down(y)
