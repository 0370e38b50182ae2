"""DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464) layers for `modeling_megadiff`.

This file needs torch alone, and travels with the models that it is the code of.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64  # tokens of which a triangular system is solved at once


class MegadiffDeltaNet(nn.Module):
    """The delta rule over heads, behind projections, a short convolution and norms.

    In a cache the layer keeps its state and the last inputs of its convolution. Tokens that the
    2-dim attention mask marks as padding leave no trace, on either side.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        gated = config.mixer(layer_idx) == "gated_delta_net"
        gate = gated if config.delta_use_gate is None else config.delta_use_gate
        self.heads, hidden = config.delta_num_heads, config.hidden_size
        self.key_dim, self.value_dim = config.delta_key_dim, config.delta_value_dim
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim

        def projection(width: int) -> nn.Linear:
            return nn.Linear(hidden, width, bias=False)

        def convolution(width: int) -> nn.Conv1d | None:
            size, bias = config.delta_conv_size, config.delta_conv_bias
            return nn.Conv1d(width, width, size, groups=width, bias=bias) if size else None

        self.q_proj, self.k_proj, self.v_proj = (projection(n) for n in (keys, keys, values))
        self.g_proj = projection(values) if gate else None
        self.b_proj = projection(self.heads) if config.delta_use_beta else None
        self.a_proj = projection(self.heads) if gated else None
        self.A_log = nn.Parameter(torch.empty(self.heads)) if gated else None
        self.dt_bias = nn.Parameter(torch.empty(self.heads)) if gated else None
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (convolution(n) for n in (keys, keys, values))
        self.o_norm = MegadiffNorm(self.value_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        """New values of the decay's parameters, if there are any: exp(A_log) in [1, 16], steps in
        [0.001, 0.1]."""
        if self.A_log is None:
            return {}
        steps = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)))
        inverse = steps + torch.log(-torch.expm1(-steps))  # of softplus
        return {"A_log": torch.empty(self.heads).uniform_(1, 16).log(), "dt_bias": inverse}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # made for attention; `token_mask` is what counts
        cache: Any = None,
        past_key_values: Any = None,  # the cache's name in transformers before 5.23
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`[batch, new tokens, hidden]` to the same; `token_mask` `[batch, all tokens]`."""
        if kwargs.get("cu_seq_lens_q") is not None:
            raise NotImplementedError("delta layers do not take packed sequences here")
        cache = cache if cache is not None else past_key_values
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        length = hidden_states.shape[1]
        mask = None if token_mask is None else token_mask[:, -length:, None].to(wide)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        z = torch.cat([projection(hidden_states) for projection in projections], -1)
        z = z if mask is None else z * mask.to(z.dtype)
        if self.b_proj is not None:
            beta = torch.sigmoid(self.b_proj(hidden_states).to(wide))
        else:
            beta = z.new_ones((*z.shape[:2], self.heads), dtype=wide)
        beta = 2 * beta if self.config.delta_allow_neg_eigval else beta
        beta = beta if mask is None else beta * mask
        g = torch.zeros_like(beta)
        if self.a_proj is not None and self.A_log is not None and self.dt_bias is not None:
            step = F.softplus(self.a_proj(hidden_states).to(wide) + self.dt_bias.to(wide))
            g = -self.A_log.to(wide).exp() * step
            g = g if mask is None else g * mask

        inputs = memory = None
        if cache is not None:
            position = kwargs.get("cache_position")  # read by transformers 5.0
            inputs, memory = _read_state(cache, self.layer_idx, z, position)
        z, inputs = self._convolved(z, inputs)
        keys = self.heads * self.key_dim
        q, k, v = z.split([keys, keys, self.heads * self.value_dim], -1)
        v = v if self.config.delta_qk_activation == "silu" else F.silu(v)
        q, k = (self._normalized(x.unflatten(-1, (self.heads, -1)).to(wide)) for x in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).to(wide)
        with torch.autocast(q.device.type, enabled=False):  # the state is float32 there too
            y, memory = delta_rule(q * self.key_dim**-0.5, k, v, beta, g, memory)
        if cache is not None:
            kept = cache.layers[self.layer_idx]
            kept.delta_state = (inputs, memory, kept.get_seq_length())

        y = self.o_norm(y)
        if self.g_proj is not None:
            y = y * F.silu(self.g_proj(hidden_states).view(y.shape).to(wide))
        return self.o_proj(y.flatten(2).to(hidden_states.dtype)), None

    def _convolved(self, z: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[b, n, channels]` behind the earlier `inputs`, and the inputs of the next tokens."""
        silu = self.config.delta_qk_activation == "silu"
        layers = [c for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d) if c is not None]
        if not layers:
            return (F.silu(z) if silu else z), None
        before = self.config.delta_conv_size - 1
        if inputs is None:
            inputs = z.new_zeros(z.shape[0], before, z.shape[2])
        rows = torch.cat([inputs, z], 1)
        weight = torch.cat([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        y = F.conv1d(rows.mT, weight, bias, groups=len(weight)).mT
        return (F.silu(y) if silu else y), rows[:, rows.shape[1] - before :]

    def _normalized(self, x: Tensor) -> Tensor:
        activation = self.config.delta_qk_activation
        x = F.relu(x) if activation == "relu" else F.elu(x) + 1 if activation == "elu" else x
        if self.config.delta_qk_norm == "l2":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return F.normalize(x, p=1, dim=-1, eps=1e-6)


class MegadiffNorm(nn.Module):
    """RMSNorm of each head's output, with one weight for all or none, in the type of its input."""

    def __init__(self, width: int, eps: float, weighted: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x if self.weight is None else x * self.weight.to(x.dtype)


def _read_state(
    cache: Any, layer: int, new: Tensor, position: Any
) -> tuple[Tensor | None, Tensor | None]:
    """What earlier tokens left in the cache, of the sequences that are there now; None at first.

    The cache itself counts the `new` `[batch, n, ...]` tokens: in the place of keys it holds the
    number of each sequence. Generation may reorder, repeat or select sequences, and tells so thus.
    """
    batch, length = new.shape[:2]
    numbers = torch.arange(batch, device=new.device).view(batch, 1, 1, 1).repeat(1, 1, length, 1)
    held, _ = cache.update(numbers, numbers, layer, {"cache_position": position})
    kept = cache.layers[layer]
    inputs, memory, seen = getattr(kept, "delta_state", (None, None, 0))
    if held.shape[2] != seen + length:
        raise ValueError(
            f"a delta layer has seen {seen} tokens, and the cache says {held.shape[2] - length}: "
            "it needs a DynamicCache, and can not take tokens back"
        )
    origin = held[:, 0, seen - 1, 0] if seen else None
    if origin is None:
        return None, None
    return (
        None if inputs is None else inputs.index_select(0, origin),
        None if memory is None else memory.index_select(0, origin),
    )


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For each token: S <- exp(g) S, S <- S + beta k (v - S^T k)^T, y = S^T q; in chunks.

    q, k `[b, n, heads, d]`, v `[b, n, heads, d_v]`, beta, g `[b, n, heads]`, state
    `[b, heads, d, d_v]`, all at least float32. Returns y like v, and the state.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    beta, g = (x.transpose(1, 2).unsqueeze(-1) for x in (beta, g))
    S = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for part in zip(*(x.split(CHUNK, 2) for x in (q, k, v, beta, g)), strict=True):
        qc, kc, vc, bc, gc = part
        size = qc.shape[2]
        within = gc.expand(*gc.shape[:-1], size).tril(-1).cumsum(-2).exp().tril()
        enter = gc.cumsum(-2).exp()
        system = bc * (kc @ kc.mT * within).tril(-1)
        change = bc * (vc - enter * (kc @ S))
        change = torch.linalg.solve_triangular(system, change, upper=False, unitriangular=True)
        outputs.append(enter * (qc @ S) + (qc @ kc.mT * within) @ change)
        leave = within[..., -1, :, None]
        S = enter[..., -1:, :] * S + (leave * kc).mT @ change
    return torch.cat(outputs, 2).transpose(1, 2), S
