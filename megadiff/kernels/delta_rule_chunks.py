"""The delta rule in chunks, in torch: the form for training, with its backward pass written out.

Yang et al. 2024 (arXiv 2406.06484, section 3), with the decay of arXiv 2412.06464, section 3.
Inside a chunk the recurrence is a unit triangular system, whose solution for all chunks at once is
W and U; between chunks only the state S passes:

    A = tril(beta K K^T, -1),  W = (I + A)^-1 beta K,  U = (I + A)^-1 beta V
    V' = U - W S,  O = scale (Q S + tril(Q K^T) V'),  S <- S + K^T V'
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megadiff.kernels.device import refuse_second_derivative
from megadiff.kernels.documents import document_lengths

CHUNK = 64  # tokens per triangular system: the balance of work inside and between chunks


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule` in torch, on any device. Keeps only its inputs for the backward pass."""
    batch, length, heads, key_width = q.shape
    if cu_seqlens is None:
        lengths = torch.full((batch,), length)
    else:
        lengths = document_lengths(cu_seqlens, batch * length)
    state_shape = (len(lengths), heads, key_width, v.shape[-1])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(
            f"initial_state must be {state_shape}, not {tuple(initial_state.shape)}: one state per "
            "sequence, or per document of cu_seqlens"
        )
    if initial_state is None and not output_final_state and lengths.any():
        lengths = lengths[lengths > 0]  # no memory for the states of empty documents
    layout = _layout(lengths, q.device)
    dtype = _accumulation_dtype(q, k, v, beta, g)
    with torch.autocast(q.device.type, enabled=False):  # products in `dtype`, and nothing below
        out, final = _ChunkDeltaRule.apply(q, k, v, beta, g, initial_state, scale, dtype, layout)  # type: ignore[misc]
    return out, final if output_final_state else None


def _accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True)
class _Layout:
    """Where tokens lie in chunks. Chunks are ordered by their step in the document, and inside a
    step by the rank of the document, longest first: the chunks of one step are a range, and the
    states that they read and write are the first ones."""

    slot: Tensor  # [tokens]: chunk * size + row
    order: Tensor  # [documents], longest first
    steps: tuple[slice, ...]  # the chunks of each step
    size: int  # tokens per chunk
    chunks: int

    def start(
        self, initial_state: Tensor | None, v: Tensor, k: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The states before the first step, in this order; free to be written to."""
        if initial_state is not None:
            return initial_state.to(dtype)[self.order]
        shape = (len(self.order), v.shape[2], k.shape[3], v.shape[3])
        return v.new_zeros(shape, dtype=dtype)

    def in_documents(self, state: Tensor) -> Tensor:
        """States in the order of the documents."""
        result = torch.empty_like(state)
        result[self.order] = state
        return result

    def chunked(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[batch, sequence, heads, width]` to `[chunks, heads, size, width]`, zeros between."""
        rows = x.new_zeros((self.chunks * self.size, *x.shape[2:]), dtype=dtype)
        rows[self.slot] = x.flatten(0, 1).to(dtype)
        return rows.unflatten(0, (self.chunks, self.size)).transpose(1, 2).contiguous()

    def tokens(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of `chunked`, in the shape and type of `like`."""
        rows = x.transpose(1, 2).flatten(0, 1)[self.slot]
        return rows.to(like.dtype).view(like.shape)


def _layout(lengths: Tensor, device: torch.device) -> _Layout:
    longest = int(lengths.max()) if len(lengths) else 0
    size = max(1, min(CHUNK, longest))
    count = -(-lengths // size)  # chunks per document
    order = torch.argsort(count, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    active = (count[None] > torch.arange(-(-longest // size))[:, None]).sum(1)  # documents per step
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
class _Decay:
    """How much is left of what one row of a chunk wrote when another one reads it, `[chunks, heads,
    ...]`: the exponential of the sum of g over the rows behind the first, up to the second."""

    within: Tensor  # [..., size, size]: from row j to row i >= j; else 0
    enter: Tensor  # [..., size, 1]: from the state before the chunk to row i
    leave: Tensor  # [..., size, 1]: from row j to the state behind the chunk
    whole: Tensor  # [..., 1, 1]: from state to state


def _up_to(x: Tensor) -> Tensor:
    """Sums of the rows up to each one; a product, as CUDA's cumsum is not deterministic."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device).tril() @ x


def _from(x: Tensor) -> Tensor:
    """Sums of the rows from each one on."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device).triu() @ x


def _decay(g: Tensor) -> _Decay:
    """From g `[chunks, heads, size, 1]`. The sums over (j, i] are taken as such: a difference of
    cumulative sums would lose the small steps that follow a large one."""
    sums = _up_to(g.expand(*g.shape[:-1], g.shape[-2]).tril(-1))
    within = sums.exp().tril()
    enter = _up_to(g).exp()
    return _Decay(within, enter, within[..., -1, :, None], enter[..., -1:, :])


@dataclass(frozen=True)
class _Chunks:
    """All about the chunks that does not depend on the state, `[chunks, heads, size, ...]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [..., size, 1]
    decay: _Decay | None
    gram: Tensor  # K K^T with decay, strictly lower
    scores: Tensor  # scale Q K^T with decay, lower
    inverse: Tensor  # (I + diag(beta) gram)^-1
    w: Tensor  # inverse beta K with the decay of entering
    u: Tensor  # inverse beta V

    def entering(self, x: Tensor) -> Tensor:
        return x if self.decay is None else x * self.decay.enter

    def leaving(self, x: Tensor) -> Tensor:
        return x if self.decay is None else x * self.decay.leave

    def within(self, x: Tensor) -> Tensor:
        return x if self.decay is None else x * self.decay.within

    def passing(self, state: Tensor, n: slice) -> Tensor:
        return state if self.decay is None else state * self.decay.whole[n]


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    layout: _Layout,
) -> _Chunks:
    q, k, v, beta = (layout.chunked(x, dtype) for x in (q, k, v, beta[..., None]))
    decay = None if g is None else _decay(layout.chunked(g[..., None], dtype))
    products, scores, k_in = k @ k.mT, q @ k.mT, k
    if decay is not None:
        products, scores, k_in = products * decay.within, scores * decay.within, k * decay.enter
    gram = products.tril(-1)
    # Forward substitution. A product of powers of the matrix overflows where keys are alike.
    eye = torch.eye(layout.size, dtype=dtype, device=q.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(beta * gram, eye, upper=False, unitriangular=True)
    w, u = inverse @ (beta * k_in), inverse @ (beta * v)
    return _Chunks(q, k, v, beta, decay, gram, scores.tril().mul_(scale), inverse, w, u)


class _ChunkDeltaRule(torch.autograd.Function):
    """The chunked form. Both passes go through the chunks of all documents step by step; the
    backward pass first repeats the forward one to have the state before each chunk."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        dtype: torch.dtype,
        layout: _Layout,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, beta, g, initial_state)
        ctx.scale, ctx.dtype, ctx.layout = scale, dtype, layout
        c = _chunks(q, k, v, beta, g, scale, dtype, layout)
        q_in, k_out = c.entering(c.q) * scale, c.leaving(c.k)
        state = layout.start(initial_state, v, k, dtype)
        out = torch.empty_like(c.v)
        for n in layout.steps:
            s = state[: n.stop - n.start]
            new = c.u[n] - c.w[n] @ s
            out[n] = q_in[n] @ s + c.scores[n] @ new
            s.copy_(c.passing(s, n) + k_out[n].mT @ new)
        return layout.tokens(out, v), layout.in_documents(state)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_out: Tensor, d_final: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, beta, g, initial_state = ctx.saved_tensors
        scale, dtype, layout = ctx.scale, ctx.dtype, ctx.layout
        c = _chunks(q, k, v, beta, g, scale, dtype, layout)
        q_in, k_out = c.entering(c.q) * scale, c.leaving(c.k)
        d_out = layout.chunked(d_out, dtype)

        # Forward again, to have the state before each chunk.
        state = layout.start(initial_state, v, k, dtype)
        before = state.new_empty(layout.chunks, *state.shape[1:])
        new = torch.empty_like(c.v)
        for n in layout.steps:
            s = state[: n.stop - n.start]
            before[n] = s
            new[n] = c.u[n] - c.w[n] @ s
            s.copy_(c.passing(s, n) + k_out[n].mT @ new[n])

        d_new = c.scores.mT @ d_out  # what the outputs say; the steps add what the state says
        d_k_out = torch.empty_like(c.k)
        d_whole = torch.empty_like(c.beta[..., :1, :])
        d_state = d_final.to(dtype)[layout.order]
        for n in reversed(layout.steps):
            ds = d_state[: n.stop - n.start]
            d_new[n] += k_out[n] @ ds
            d_k_out[n] = new[n] @ ds.mT
            if c.decay is not None:
                d_whole[n] = (before[n] * ds).sum((-2, -1), keepdim=True)
            ds.copy_(c.passing(ds, n) + q_in[n].mT @ d_out[n] - c.w[n].mT @ d_new[n])

        d_q_in = (d_out @ before.mT).mul_(scale)
        d_scores = (d_out @ new.mT).tril_()
        # X = inverse Y: dY = inverse^T dX, and the matrix gets -dY X^T
        d_wk = c.inverse.mT @ -(d_new @ before.mT)
        d_wv = c.inverse.mT @ d_new
        d_matrix = (d_wk @ c.w.mT + d_wv @ c.u.mT).tril_(-1).neg_()
        d_beta = (d_wk * c.entering(c.k)).sum(-1, keepdim=True)
        d_beta += (d_wv * c.v).sum(-1, keepdim=True) + (d_matrix * c.gram).sum(-1, keepdim=True)
        d_k_in = c.beta * d_wk
        d_gram = c.beta * d_matrix
        d_g = None
        if g is not None and c.decay is not None:
            spans = d_gram * c.gram + d_scores * c.scores
            enters = (d_q_in * c.q + d_k_in * c.k).sum(-1, keepdim=True)
            leaves = (d_k_out * c.k).sum(-1, keepdim=True)
            d_g = _decay_gradient(c.decay, spans, enters, leaves, d_whole)
            d_g = layout.tokens(d_g, g[..., None]).squeeze(-1)
        d_scores, d_gram = c.within(d_scores) * scale, c.within(d_gram)
        d_q = c.entering(d_q_in) + d_scores @ c.k
        d_k = c.entering(d_k_in) + c.leaving(d_k_out)
        d_k += d_scores.mT @ c.q + (d_gram + d_gram.mT) @ c.k
        return (
            layout.tokens(d_q, q),
            layout.tokens(d_k, k),
            layout.tokens(c.beta * d_wv, v),
            layout.tokens(d_beta, beta[..., None]).squeeze(-1),
            d_g,
            None if initial_state is None else layout.in_documents(d_state).to(initial_state.dtype),
            None,
            None,
            None,
        )


def _decay_gradient(
    decay: _Decay, spans: Tensor, enters: Tensor, leaves: Tensor, whole: Tensor
) -> Tensor:
    """The gradient of g `[chunks, heads, size, 1]`, which is in every exponent across its row.

    `spans` are the gradients of the exponents of `decay.within`; `enters`, `leaves`
    and `whole` those of the other factors themselves.
    """
    spans[..., -1:, :] += (leaves * decay.leave).mT  # to leave is to reach the last row
    enters = enters * decay.enter
    enters[..., -1:, :] += whole * decay.whole  # and so is to enter and pass
    # g of row r is in the exponents from j < r to i >= r: sum over i, then over j
    return _from(spans).tril(-1).sum(-1, keepdim=True) + _from(enters)
