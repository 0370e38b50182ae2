"""The delta rule, a linear attention whose state is overwritten at a key instead of added to.

Per head, with a state S `[key width, value width]` that starts at zero or at a given value:

    S <- exp(g) S                        (gated only)
    S <- S + k u^T,  u = beta (v - S^T k)
    o  = scale S^T q

`delta_rule` runs it in chunks (Yang et al. 2024, arXiv 2406.06484, section 3; gated: arXiv
2412.06464, section 3): inside a chunk the recurrence is a unit triangular system, between chunks
only S passes. `delta_rule_reference` is the recurrence itself.
"""

import itertools
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megadiff.kernels import fla
from megadiff.kernels.documents import document_lengths

CHUNK = 64  # tokens per triangular system: the balance of work inside and between chunks


def delta_rule(
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
    """The delta rule over every sequence (or document) and head, differentiable in all inputs.

    q, k `[batch, sequence, heads, key width]`; v `[batch, sequence, heads, value width]`;
    beta, the writing strength, and g <= 0, the log of the decay (None: no decay),
    `[batch, sequence, heads]`, best in float32. `scale` multiplies q (default: key width ** -0.5).

    With `cu_seqlens` `[documents + 1]` over the `batch * sequence` tokens each document starts
    anew; documents may be empty. `initial_state`: `[batch or documents, heads, key width, value
    width]`, default zeros.

    Returns the output, like v, and the final state, like `initial_state`; states are float32, or
    float64 where an input is. A token with k = 0 and beta = 0 leaves the state as it was (but for
    the decay).

    On a GPU fla-core's kernels run where they pass a self-test (`kernels.fla`), else this
    file's torch form does; a line in the log says which and why.
    """
    _check(q, k, v, beta, g)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    variant = fla.Variant(packed=cu_seqlens is not None, state=initial_state is not None)
    fused = fla.delta_rule_kernel(
        q, k, v, gated=g is not None, variant=variant, reference=chunk_delta_rule
    )
    run = fused or chunk_delta_rule
    return run(q, k, v, beta, g, factor, initial_state, cu_seqlens)


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` in torch, on any device. Keeps only its inputs for the backward pass."""
    batch, length, heads, key_width = q.shape
    if cu_seqlens is None:
        lengths = torch.full((batch,), length)
    else:
        lengths = document_lengths(cu_seqlens, batch * length)
    accumulate = _accumulation_dtype(q, k, v, beta, g)
    state_shape = (len(lengths), heads, key_width, v.shape[-1])
    if initial_state is None:
        initial_state = q.new_zeros(state_shape, dtype=accumulate)
    elif initial_state.shape != state_shape:
        raise ValueError(
            f"initial_state must be {state_shape}, not {tuple(initial_state.shape)}: one state per "
            "sequence, or per document of cu_seqlens"
        )
    layout = _layout(lengths, q.device)
    return _ChunkDeltaRule.apply(q, k, v, beta, g, initial_state, scale, accumulate, layout)  # type: ignore[return-value]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor | None
) -> None:
    per_head = [beta] if g is None else [beta, g]
    if (
        q.dim() != 4
        or k.shape != q.shape
        or v.shape[:-1] != q.shape[:-1]
        or any(x.shape != q.shape[:-1] for x in per_head)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, *per_head))
        raise ValueError(
            "delta_rule takes q and k [batch, sequence, heads, key width], v [batch, sequence, "
            f"heads, value width], beta and g [batch, sequence, heads]; got {shapes}"
        )


def _accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True)
class _Layout:
    """Where tokens lie in chunks. Chunks are ordered by their step in the document, and inside a
    step by the rank of the document, longest first: the chunks of one step are a range, and the
    states that they read and write are the first ones."""

    slot: torch.Tensor  # [tokens]: chunk * size + row
    order: torch.Tensor  # [documents], longest first
    steps: tuple[slice, ...]  # the chunks of each step
    size: int  # tokens per chunk
    chunks: int

    def chunked(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[batch, sequence, heads, width]` to `[chunks, heads, size, width]`, zeros between."""
        rows = x.new_zeros((self.chunks * self.size, *x.shape[2:]), dtype=dtype)
        rows[self.slot] = x.flatten(0, 1).to(dtype)
        return rows.unflatten(0, (self.chunks, self.size)).transpose(1, 2).contiguous()

    def tokens(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of `chunked`, in the shape and type of `like`."""
        rows = x.transpose(1, 2).flatten(0, 1)[self.slot]
        return rows.to(like.dtype).view(like.shape)


def _layout(lengths: torch.Tensor, device: torch.device) -> _Layout:
    size = max(1, min(CHUNK, int(lengths.max())))
    count = -(-lengths // size)  # chunks per document
    order = torch.argsort(count, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    active = (count[None] > torch.arange(int(count.max()))[:, None]).sum(1)  # documents per step
    first = torch.cat([active.new_zeros(1), active.cumsum(0)])

    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths)[document]
    chunk = first[position // size] + rank[document]
    bounds = first.tolist()
    return _Layout(
        slot=(chunk * size + position % size).to(device),
        order=order.to(device),
        steps=tuple(slice(a, b) for a, b in itertools.pairwise(bounds)),
        size=size,
        chunks=bounds[-1],
    )


@dataclass(frozen=True)
class _Chunks:
    """Everything about the chunks that does not depend on the state.

    Tensors are `[chunks, heads, size, ...]`; the decay factors are None without decay. Row i of a
    chunk and row j <= i are `decay[i, j]` = exp(sum of g over (j, i]) apart; a row is `enter` away
    from the state before the chunk and `leave` from the one after it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor  # [..., size, 1]
    decay: torch.Tensor | None  # [..., size, size], lower triangular
    enter: torch.Tensor | None  # [..., size, 1]
    leave: torch.Tensor | None  # [..., size, 1]
    whole: torch.Tensor | None  # [..., 1, 1]
    gram: torch.Tensor  # K K^T with decay, strictly lower
    scores: torch.Tensor  # scale Q K^T with decay, lower
    inverse: torch.Tensor  # (I + diag(beta) gram)^-1
    w: torch.Tensor  # inverse beta enter K
    u: torch.Tensor  # inverse beta V


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype,
    layout: _Layout,
) -> _Chunks:
    q, k, v, beta = (layout.chunked(x, dtype) for x in (q, k, v, beta[..., None]))
    decay = enter = leave = whole = None
    if g is not None:
        rows = layout.chunked(g[..., None], dtype)
        enter = rows.cumsum(-2).exp()
        # The sums over (j, i] are taken as such: a difference of cumulative sums would lose the
        # small steps that follow a large one.
        sums = rows.expand(*rows.shape[:-1], layout.size).tril(-1).cumsum(-2)
        decay = sums.exp().tril()
        leave = decay[..., -1, :, None]
        whole = enter[..., -1:, :]
    gram = _times(k @ k.mT, decay).tril(-1)
    scores = _times(q @ k.mT, decay).tril().mul_(scale)
    # Forward substitution. A product of powers of the matrix overflows where keys are alike.
    eye = torch.eye(layout.size, dtype=dtype, device=q.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(beta * gram, eye, upper=False, unitriangular=True)
    w = inverse @ (beta * _times(k, enter))
    u = inverse @ (beta * v)
    return _Chunks(q, k, v, beta, decay, enter, leave, whole, gram, scores, inverse, w, u)


class _ChunkDeltaRule(torch.autograd.Function):
    """The chunked form. Both passes go through the chunks of all documents step by step; the
    backward pass first repeats the forward one to have the state before each chunk."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, scale, dtype, layout):  # type: ignore[override]
        ctx.save_for_backward(q, k, v, beta, g, initial_state)
        ctx.scale, ctx.dtype, ctx.layout = scale, dtype, layout
        c = _chunks(q, k, v, beta, g, scale, dtype, layout)
        q_in, k_out = _times(c.q, c.enter).mul(scale), _times(c.k, c.leave)
        state = initial_state.to(dtype)[layout.order]
        out = torch.empty_like(c.v)
        for n in layout.steps:
            s = state[: n.stop - n.start]
            new = c.u[n] - c.w[n] @ s
            out[n] = q_in[n] @ s + c.scores[n] @ new
            s.copy_(_times(s, None if c.whole is None else c.whole[n]) + k_out[n].mT @ new)
        final = torch.empty_like(state)
        final[layout.order] = state
        return layout.tokens(out, v), final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_final):  # type: ignore[override]
        q, k, v, beta, g, initial_state = ctx.saved_tensors
        scale, dtype, layout = ctx.scale, ctx.dtype, ctx.layout
        c = _chunks(q, k, v, beta, g, scale, dtype, layout)
        q_in, k_out = _times(c.q, c.enter).mul(scale), _times(c.k, c.leave)
        d_out = layout.chunked(d_out, dtype)

        before = c.w.new_empty(
            layout.chunks, *initial_state.shape[1:]
        )  # the state before each chunk
        new = torch.empty_like(c.v)
        state = initial_state.to(dtype)[layout.order]
        for n in layout.steps:
            s = state[: n.stop - n.start]
            before[n] = s
            new[n] = c.u[n] - c.w[n] @ s
            s.copy_(_times(s, None if c.whole is None else c.whole[n]) + k_out[n].mT @ new[n])

        d_new = c.scores.mT @ d_out  # what the outputs say; the steps add what the state says
        d_k_out = torch.empty_like(c.k)
        d_whole = None if c.whole is None else torch.empty_like(c.whole)
        d_state = d_final.to(dtype)[layout.order]
        for n in reversed(layout.steps):
            ds = d_state[: n.stop - n.start]
            d_new[n] += k_out[n] @ ds
            d_k_out[n] = new[n] @ ds.mT
            if c.whole is not None and d_whole is not None:
                d_whole[n] = (before[n] * ds).sum((-2, -1), keepdim=True)
                ds.mul_(c.whole[n])
            ds.add_(q_in[n].mT @ d_out[n]).sub_(c.w[n].mT @ d_new[n])
        d_initial = torch.empty_like(d_state)
        d_initial[layout.order] = d_state

        d_q_in = (d_out @ before.mT).mul_(scale)
        d_scores = (d_out @ new.mT).tril_()
        # X = inverse Y: dY = inverse^T dX, and the matrix gets -dY X^T
        d_wk = c.inverse.mT @ -(d_new @ before.mT)
        d_wv = c.inverse.mT @ d_new
        d_matrix = (d_wk @ c.w.mT + d_wv @ c.u.mT).tril_(-1).neg_()
        k_in = _times(c.k, c.enter)
        d_beta = (d_wk * k_in).sum(-1, keepdim=True)
        d_beta += (d_wv * c.v).sum(-1, keepdim=True) + (d_matrix * c.gram).sum(-1, keepdim=True)
        d_k_in = c.beta * d_wk
        d_gram = c.beta * d_matrix
        d_g = None
        if g is not None:
            d_g = _decay_gradient(c, d_scores, d_gram, d_q_in, d_k_in, d_k_out, d_whole)
        d_scores, d_gram = _times(d_scores, c.decay).mul_(scale), _times(d_gram, c.decay)
        d_q = _times(d_q_in, c.enter) + d_scores @ c.k
        d_k = _times(d_k_in, c.enter) + _times(d_k_out, c.leave)
        d_k += d_scores.mT @ c.q + (d_gram + d_gram.mT) @ c.k
        return (
            layout.tokens(d_q, q),
            layout.tokens(d_k, k),
            layout.tokens(c.beta * d_wv, v),
            layout.tokens(d_beta, beta[..., None]).squeeze(-1),
            None if d_g is None or g is None else layout.tokens(d_g, g[..., None]).squeeze(-1),
            d_initial.to(initial_state.dtype),
            None,
            None,
            None,
        )


def _decay_gradient(c, d_scores, d_gram, d_q_in, d_k_in, d_k_out, d_whole):
    """The gradient of g `[chunks, heads, size, 1]`, which is in every exponent across its row."""
    # exponents of decay[i, j]: g over (j, i]
    spans = d_gram * c.gram + d_scores * c.scores
    spans[..., -1, :] += (d_k_out * c.k).sum(-1) * c.leave.squeeze(-1)
    # exponents of enter[i]: g over [0, i]; whole is the last of them
    enters = ((d_q_in * c.q + d_k_in * c.k).sum(-1, keepdim=True)) * c.enter
    enters[..., -1:, :] += d_whole * c.whole
    # row r is in (j, i] for j < r <= i: sum rows i >= r first, then columns j < r
    below = spans.flip(-2).cumsum(-2).flip(-2)
    inside = below.tril(-1).sum(-1, keepdim=True)
    return inside + enters.flip(-2).cumsum(-2).flip(-2)
