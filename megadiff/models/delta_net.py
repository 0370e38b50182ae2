"""Token mixers by the delta rule: DeltaNet and Gated DeltaNet.

DeltaNet is the layer of Yang et al. 2024 (arXiv 2406.06484, section 3.4) as fla-org publishes it;
Gated DeltaNet adds a decay per head (arXiv 2412.06464). Neither has positions: the convolution and
the recurrence know the order.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import delta_rule, gated_rms_norm, l2_norm, rms_norm, short_convolution
from megadiff.kernels.reference import wide
from megadiff.models.delta_state import DeltaCache, State, Tokens
from megadiff.models.geometry import Geometry
from megadiff.models.mixer import PAD, Mixer, output_init
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.head_exchange import heads_to_sequence, sequence_to_heads
from megadiff.parallel.linear import (
    ColumnParallelLinear,
    GlobalTensor,
    Output,
    RowParallelLinear,
    replicated,
    sharded,
)
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import Init, uniform

_EPSILON = 1e-6  # of the norms of q and k, as published


@dataclass(frozen=True)
class Heads:
    """Some heads of a layer, with the parameters that mix their tokens."""

    config: ModelConfig
    count: int
    conv_weight: Tensor | None  # [channels of q, k and v, 1, size]
    conv_bias: Tensor | None
    A_log: Tensor | None  # [heads], as is dt_bias
    dt_bias: Tensor | None

    @property
    def widths(self) -> list[int]:
        """Channels of q, k and v."""
        key_width, value_width = self.config.delta_widths
        return [self.count * width for width in (key_width, key_width, value_width)]

    def share(self, rank: int, size: int) -> "Heads":
        """One of `size` equal shares of the heads."""

        def channels(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.cat([section.chunk(size)[rank] for section in x.split(self.widths)])

        def heads(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.chunk(size)[rank]

        return Heads(
            self.config,
            self.count // size,
            channels(self.conv_weight),
            channels(self.conv_bias),
            heads(self.A_log),
            heads(self.dt_bias),
        )

    def tokens(self, qkv: Tensor, beta: Tensor | None, decay: Tensor | None) -> Tokens:
        """From the projections `[b, s, ...]` of these heads."""
        dtype = wide(qkv.dtype)
        if beta is None:
            strength = qkv.new_ones((*qkv.shape[:-1], self.count), dtype=dtype)
        else:
            strength = torch.sigmoid(beta.to(dtype))
        if self.config.delta_allow_neg_eigval:
            strength = 2 * strength  # the transition's eigenvalue along k is 1 - beta
        g = None
        if decay is not None and self.A_log is not None and self.dt_bias is not None:
            g = -self.A_log.exp() * F.softplus(decay.to(dtype) + self.dt_bias)
        return Tokens(qkv, strength, g)

    def mix(
        self, tokens: Tokens, state: State, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Convolution and delta rule; returns `[b, s, heads, value width]` and the state after."""
        qkv, inputs = tokens.qkv, None
        silu = self.config.delta_qk_activation == "silu"
        if self.conv_weight is not None:
            qkv, inputs = short_convolution(
                qkv,
                self.conv_weight,
                self.conv_bias,
                silu=silu,
                initial_state=state.inputs,
                cu_seqlens=cu_seqlens,
            )
        elif silu:
            qkv = F.silu(qkv)
        q, k, v = qkv.split(self.widths, -1)
        o, memory = delta_rule(
            self._query_or_key(q),
            self._query_or_key(k),
            (v if silu else F.silu(v)).unflatten(-1, (self.count, -1)),
            tokens.beta,
            tokens.g,
            initial_state=state.memory,
            cu_seqlens=cu_seqlens,
            output_final_state=cu_seqlens is None,  # nothing goes on behind packed documents
        )
        return o, State(inputs, memory)

    def _query_or_key(self, x: Tensor) -> Tensor:
        """Activated, unless the convolution did it, and normalised; `[b, s, heads, key width]`."""
        x = x.unflatten(-1, (self.count, -1))
        if self.config.delta_qk_activation == "relu":
            x = F.relu(x)
        elif self.config.delta_qk_activation == "elu":
            x = F.elu(x) + 1
        if self.config.delta_qk_norm == "l2":
            return l2_norm(x, _EPSILON)
        sums = F.normalize(x.to(wide(x.dtype)), p=1, dim=-1, eps=_EPSILON)  # nothing is negative
        return sums.to(x.dtype)


class DeltaNet(Mixer):
    """The delta rule over heads that are sharded over the tensor-parallel ranks.

    One product gives `[q | k | v | gate | beta | decay]` of this rank's heads. q, k and v pass the
    short convolution, each head runs the recurrence alone, and its output is normalised, with one
    weight for all heads.
    """

    kind = "delta_net"

    def __init__(
        self, config: ModelConfig, layer: int, mesh: ParallelMesh, name: str, **factory: Any
    ) -> None:
        super().__init__()
        heads, hidden = config.delta_heads, config.hidden_size
        self.config, self.tp = config, mesh.tp
        self.heads = heads // mesh.tp.size
        keys, values = (heads * width for width in config.delta_widths)
        gated = self.kind == "gated_delta_net"
        features = {"q": keys, "k": keys, "v": values}
        features |= {"gate": values} if config.delta_gate(self.kind) else {}
        features |= {"beta": heads} if config.delta_use_beta else {}
        features |= {"decay": heads} if gated else {}
        init = Init(config.init_method_std)
        self.names = tuple(features)
        self.projection = ColumnParallelLinear(
            hidden,
            [Output(output, width, heads, init) for output, width in features.items()],
            mesh,
            name,
            pad_to=PAD,
            **factory,
        )
        self.out = RowParallelLinear(
            values, hidden, heads, mesh, f"{name}.o", init=output_init(config), **factory
        )
        self.conv_weight = self.conv_bias = self.A_log = self.dt_bias = None
        if config.delta_conv_size > 0:
            self.conv_weight = self._channels(
                f"{name}.%s.weight", 1, config.delta_conv_size, **factory
            )
            if config.delta_conv_bias:
                self.conv_bias = self._channels(f"{name}.%s.bias", **factory)
        factory["dtype"] = wide(factory["dtype"])

        def per_head(suffix: str, init: Init) -> nn.Parameter:
            whole = (f"{name}.{suffix}", (heads,), heads, "vector", init)
            return sharded([whole], mesh.tp, **factory)

        if gated:
            self.A_log = per_head("A_log", uniform(1.0, 16.0, torch.log))
            self.dt_bias = per_head(
                "dt_bias", uniform(math.log(1e-3), math.log(0.1), _inverse_softplus_of_exp)
            )
        full, shape, ones = f"{name}.o_norm.weight", config.delta_widths[1:], Init(mean=1.0)
        self.o_norm = replicated(full, shape, "vector", ones, mesh.tp, **factory)

    def _channels(self, name: str, *shape: int, **factory: Any) -> nn.Parameter:
        """A parameter of the convolution, `[channels, *shape]`, of this rank's q, k and v."""
        bound = self.config.delta_conv_size**-0.5  # torch's initial values of a Conv1d
        init, heads = uniform(-bound, bound), self.config.delta_heads
        key_width, value_width = self.config.delta_widths
        widths = {"q_conv": key_width, "k_conv": key_width, "v_conv": value_width}
        tensors: list[GlobalTensor] = [
            (name % suffix, (heads * width, *shape), heads, "vector", init)
            for suffix, width in widths.items()
        ]
        return sharded(tensors, self.tp, **factory)

    def new_cache(self, max_length: int) -> DeltaCache:
        return DeltaCache()

    def forward(self, x: Tensor, geometry: Geometry, cache: DeltaCache | None = None) -> Tensor:
        y = self.projection(x)
        parts = dict(zip(self.names, self.projection.split(y), strict=True))
        heads = Heads(
            self.config, self.heads, self.conv_weight, self.conv_bias, self.A_log, self.dt_bias
        )
        if geometry.context is not None:
            o = self._mix_in_context(heads, parts, geometry.context.cp, geometry.cu_seqlens)
        else:
            qkv = y[..., : sum(heads.widths)]
            tokens = heads.tokens(qkv, parts.get("beta"), parts.get("decay"))
            if cache is not None:
                o = cache.advance(heads.mix, tokens, geometry.positions)
            else:
                o, _ = heads.mix(tokens, State(), geometry.cu_seqlens)
        (weight,) = sum_gradients(self.tp, self.o_norm)  # each rank has its heads' share
        if "gate" in parts:
            o = gated_rms_norm(o, parts["gate"].view(o.shape), weight, self.config.norm_epsilon)
        else:
            o = rms_norm(o, weight, self.config.norm_epsilon)
        return self.out(o.flatten(2))

    def _mix_in_context(
        self, heads: Heads, parts: dict[str, Tensor], cp: Axis, cu_seqlens: Tensor | None
    ) -> Tensor:
        """A share of the heads over whole sequences; `[b, s / cp, heads, value width]`."""
        share = heads.share(cp.rank, cp.size)
        mixed = [name for name in self.names if name != "gate"]
        per_head = [parts[name].unflatten(-1, (self.heads, -1)) for name in mixed]
        exchanged = sequence_to_heads(torch.cat(per_head, -1), cp)  # one message for all of them
        pieces = exchanged.split([x.shape[-1] for x in per_head], -1)
        whole = {name: piece.flatten(2) for name, piece in zip(mixed, pieces, strict=True)}
        qkv = torch.cat([whole[name] for name in ("q", "k", "v")], -1)
        tokens = share.tokens(qkv, whole.get("beta"), whole.get("decay"))
        o, _ = share.mix(tokens, State(), cu_seqlens)
        return heads_to_sequence(o, cp)


class GatedDeltaNet(DeltaNet):
    """DeltaNet whose state decays by exp(-exp(A_log) softplus(decay + dt_bias)) before each token.

    Initially exp(A_log) is uniform on [1, 16] and the softplus of dt_bias log-uniform on
    [0.001, 0.1] (Mamba-2, arXiv 2405.21060).
    """

    kind = "gated_delta_net"


def _inverse_softplus_of_exp(x: Tensor) -> Tensor:
    step = x.exp()
    return step + torch.log(-torch.expm1(-step))
