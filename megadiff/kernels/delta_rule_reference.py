"""The delta rule one token at a time: the oracle of `delta_rule`, and its definition."""

import itertools

import torch


def delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function as `delta_rule`, as the recurrence of Yang et al. 2024 (arXiv 2406.06484,
    eq. 4; with the decay of arXiv 2412.06464, eq. 10), in the type of its inputs.

    For each token: S decays by exp(g), then learns u = beta (v - S^T k) at the key k, and
    o = scale S^T q reads the updated S.
    """
    batch, length, heads, key_width = q.shape
    value_width = v.shape[-1]
    factor = key_width**-0.5 if scale is None else scale
    if cu_seqlens is None:
        bounds = [n * length for n in range(batch + 1)]
    else:
        bounds = cu_seqlens.tolist()
    tokens = batch * length
    q, k = (x.reshape(tokens, heads, key_width) for x in (q, k))
    values, beta = v.reshape(tokens, heads, value_width), beta.reshape(tokens, heads)
    decay = None if g is None else g.reshape(tokens, heads).exp()

    outputs: list[torch.Tensor] = []
    finals: list[torch.Tensor] = []
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if initial_state is None:
            state = values.new_zeros(heads, key_width, value_width)
        else:
            state = initial_state[document]
        for t in range(begin, end):
            if decay is not None:
                state = state * decay[t, :, None, None]
            error = values[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            outputs.append(factor * torch.einsum("hkv,hk->hv", state, q[t]))
        finals.append(state)
    return torch.stack(outputs).reshape(v.shape), torch.stack(finals)
