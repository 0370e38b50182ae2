"""Token mixers by the delta rule: DeltaNet and Gated DeltaNet.

DeltaNet is the layer of Yang et al. 2024 (arXiv 2406.06484, section 3.4) as fla-org publishes it;
Gated DeltaNet adds a decay per head (arXiv 2412.06464). Neither has positions: the convolution and
the recurrence know the order.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config import ModelConfig
from megadiff.kernels import delta_rule, gated_rms_norm, l2_norm, rms_norm, short_convolution
from megadiff.models.geometry import Geometry
from megadiff.models.mixer import Mixer
from megadiff.parallel.collectives import sum_gradients
from megadiff.parallel.linear import (
    ColumnParallelLinear,
    Output,
    RowParallelLinear,
    replicated,
    shard,
)
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init, Section, make_parameter, uniform

_PAD = 64  # 128 bytes in bfloat16: rows of the fused projection stay aligned behind beta and decay
_EPSILON = 1e-6  # of the norms of q and k, as published


@dataclass(frozen=True)
class Tokens:
    """What the mixing of tokens starts from, of this rank's heads."""

    qkv: Tensor  # [b, s, channels]
    beta: Tensor  # [b, s, heads], at least float32, as is g
    g: Tensor | None  # [b, s, heads], log of the decay

    def only(self, kept: Tensor) -> "Tokens":
        """The same, but tokens where `kept` `[b, s]` is false leave no trace in any state."""
        kept = kept.unsqueeze(-1)
        g = None if self.g is None else self.g * kept
        return Tokens(self.qkv * kept, self.beta * kept, g)


@dataclass(frozen=True)
class State:
    """What earlier tokens left behind, for each sequence; None is the state before any token."""

    inputs: Tensor | None = None  # [b, convolution size - 1, channels]
    memory: Tensor | None = None  # [b, heads, key width, value width], at least float32


class DeltaCache:
    """The state of one layer during generation; its size does not depend on the length.

    It keeps the tokens of the last call, so that each sequence may go on from any of them: a prompt
    may be padded on the right. Tokens at negative positions are padding on the left.
    """

    def __init__(self) -> None:
        self.state = State()
        self.last: tuple[State, Tokens, Tensor] | None = None

    def advance(self, mixer: "DeltaNet", tokens: Tokens, positions: Tensor) -> Tensor:
        """Mix `tokens` at `positions` `[b, n]` behind the state and move the state behind them."""
        self._settle(mixer, positions[:, 0])
        tokens = tokens.only(positions >= 0)
        before = self.state
        o, self.state = mixer.mix(tokens, before)
        self.last = (before, tokens, positions)
        return o

    def _settle(self, mixer: "DeltaNet", first: Tensor) -> None:
        """Drop the tokens of the last call at or behind the positions `first` `[b]`."""
        if self.last is None:
            return
        before, tokens, positions = self.last
        dropped = positions[:, -1] + 1 - first
        least, most = (int(n) for n in dropped.aminmax())
        count = positions.shape[1]
        if least < 0 or most > count:
            raise ValueError(
                "a delta layer goes on behind its last token, or steps back over tokens of the "
                f"last call: that one had {count} tokens, up to positions "
                f"{positions[:, -1].tolist()}, and this one starts at {first.tolist()}"
            )
        if most > 0:
            kept = positions < first.unsqueeze(1)
            _, self.state = mixer.mix(tokens.only(kept), before)
            if self.state.inputs is not None:  # kept tokens come first, those behind are no inputs
                size = self.state.inputs.shape[1]
                inputs = before.inputs
                if inputs is None:
                    inputs = torch.zeros_like(self.state.inputs)
                rows = torch.cat([inputs, tokens.qkv], 1)
                index = kept.sum(1, keepdim=True) + torch.arange(size, device=kept.device)
                inputs = rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[2]))
                self.state = replace(self.state, inputs=inputs)


class DeltaNet(Mixer):
    """The delta rule over heads that are sharded over the tensor-parallel ranks.

    One product gives `[q | k | v | gate | beta | decay]` of this rank's heads. q, k and v pass the
    short convolution, each head runs the recurrence alone, and its output is normalised, with one
    weight for all heads.
    """

    gated = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        mesh: ParallelMesh,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        heads, hidden = config.delta_heads, config.hidden_size
        if heads % mesh.tp.size:
            raise ValueError(
                f"{name}: {heads} heads can not be split over {mesh.tp.size} tensor-parallel ranks"
            )
        self.config, self.tp = config, mesh.tp
        self.heads = heads // mesh.tp.size
        self.key_width, self.value_width = config.delta_widths
        keys, values = heads * self.key_width, heads * self.value_width
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        wide = torch.promote_types(dtype, torch.float32)
        use_gate = config.delta_gate("gated_delta_net" if self.gated else "delta_net")
        features = {"q": keys, "k": keys, "v": values}
        features |= {"gate": values} if use_gate else {}
        features |= {"beta": heads} if config.delta_use_beta else {}
        features |= {"decay": heads} if self.gated else {}
        init = Init(config.init_method_std)
        self.names = tuple(features)
        self.projection = ColumnParallelLinear(
            hidden,
            [Output(output, width, heads, init) for output, width in features.items()],
            mesh,
            name,
            pad_to=_PAD,
            **factory,
        )
        self.out = RowParallelLinear(
            values,
            hidden,
            heads,
            mesh,
            f"{name}.o",
            init=Init(config.init_method_std / math.sqrt(2 * config.num_layers)),
            **factory,
        )

        def per_head(suffix: str, init: Init) -> nn.Parameter:
            s = shard(heads, heads, mesh.tp)
            section = Section(f"{name}.{suffix}", (heads,), 0, s.length, s.offset, "vector", init)
            return make_parameter((s.length,), [section], dtype=wide, device=device)

        self.conv_weight = self.conv_bias = self.A_log = self.dt_bias = None
        if config.delta_conv_size > 0:
            channels = {"q_conv": keys, "k_conv": keys, "v_conv": values}
            shape = (1, config.delta_conv_size)
            self.conv_weight = self._channels(f"{name}.%s.weight", channels, shape, **factory)
            if config.delta_conv_bias:
                self.conv_bias = self._channels(f"{name}.%s.bias", channels, (), **factory)
        if self.gated:
            self.A_log = per_head("A_log", uniform(1.0, 16.0, torch.log))
            self.dt_bias = per_head(
                "dt_bias", uniform(math.log(1e-3), math.log(0.1), _inverse_softplus_of_exp)
            )
        shape = (self.value_width,)
        ones = Init(mean=1.0)
        section = replicated(f"{name}.o_norm.weight", shape, "vector", ones, mesh.tp)
        self.o_norm = make_parameter(shape, [section], dtype=wide, device=device)

    def _channels(
        self, name: str, channels: dict[str, int], shape: tuple[int, ...], **factory: Any
    ) -> nn.Parameter:
        """A parameter of the convolution, of this rank's channels of q, k and v."""
        bound = self.config.delta_conv_size**-0.5  # torch's initial values of a Conv1d
        init = uniform(-bound, bound)
        sections, start = [], 0
        for suffix, features in channels.items():
            s = shard(features, self.config.delta_heads, self.tp)
            place = (start, s.length, s.offset)
            sections.append(Section(name % suffix, (features, *shape), *place, "vector", init))
            start += s.length
        return make_parameter((start, *shape), sections, **factory)

    def new_cache(self, max_length: int) -> DeltaCache:
        return DeltaCache()

    def forward(self, x: Tensor, geometry: Geometry, cache: DeltaCache | None = None) -> Tensor:
        y = self.projection(x)
        parts = dict(zip(self.names, self.projection.split(y), strict=True))
        tokens = self._tokens(y, parts)
        if cache is not None:
            o = cache.advance(self, tokens, geometry.positions)
        else:
            o, _ = self.mix(tokens, State(), geometry.cu_seqlens)
        (weight,) = sum_gradients(self.tp, self.o_norm)  # each rank has its heads' share
        if "gate" in parts:
            gate = parts["gate"].unflatten(-1, (-1, self.value_width))
            o = gated_rms_norm(o, gate, weight, self.config.norm_epsilon)
        else:
            o = rms_norm(o, weight, self.config.norm_epsilon)
        return self.out(o.flatten(2))

    def _tokens(self, y: Tensor, parts: dict[str, Tensor]) -> Tokens:
        wide = torch.promote_types(y.dtype, torch.float32)
        if "beta" in parts:
            beta = torch.sigmoid(parts["beta"].to(wide))
        else:
            beta = y.new_ones((*y.shape[:-1], self.heads), dtype=wide)
        if self.config.delta_allow_neg_eigval:
            beta = 2 * beta  # the transition's eigenvalue along k is 1 - beta
        g = None
        if self.A_log is not None and self.dt_bias is not None:
            g = -self.A_log.exp() * F.softplus(parts["decay"].to(wide) + self.dt_bias)
        width = self.heads * (2 * self.key_width + self.value_width)
        return Tokens(y[..., :width], beta, g)

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
        keys = self.heads * self.key_width
        q, k, v = qkv.split([keys, keys, self.heads * self.value_width], -1)
        o, memory = delta_rule(
            self._query_or_key(q),
            self._query_or_key(k),
            (v if silu else F.silu(v)).unflatten(-1, (self.heads, -1)),
            tokens.beta,
            tokens.g,
            initial_state=state.memory,
            cu_seqlens=cu_seqlens,
        )
        return o, State(inputs, memory)

    def _query_or_key(self, x: Tensor) -> Tensor:
        """Activated, unless the convolution did it, and normalised; `[b, s, heads, key width]`."""
        x = x.unflatten(-1, (self.heads, -1))
        if self.config.delta_qk_activation == "relu":
            x = F.relu(x)
        elif self.config.delta_qk_activation == "elu":
            x = F.elu(x) + 1
        if self.config.delta_qk_norm == "l2":
            return l2_norm(x, _EPSILON)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.normalize(wide, p=1, dim=-1, eps=_EPSILON).to(x.dtype)  # no entry is negative


class GatedDeltaNet(DeltaNet):
    """DeltaNet whose state decays by exp(-exp(A_log) softplus(decay + dt_bias)) before each token.

    Initially exp(A_log) is uniform on [1, 16] and the softplus of dt_bias log-uniform on
    [0.001, 0.1] (Mamba-2, arXiv 2405.21060).
    """

    gated = True


def _inverse_softplus_of_exp(x: Tensor) -> Tensor:
    step = x.exp()
    return step + torch.log(-torch.expm1(-step))
