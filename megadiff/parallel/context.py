"""Context parallelism: every sequence is shared by the ranks of the axis `cp`.

A sequence is cut into 2 * cp equal chunks, and rank r holds chunks r and 2 * cp - 1 - r: under a
causal mask early chunks see little and late ones much, and together each rank sees the same.
Attention gathers keys and values of the whole sequence (under query groups they are a small part of
the activations, and the gather is one message a layer) and runs each of the two query chunks
against the keys up to its end. Softmax statistics are thus whole, for each branch apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megadiff.parallel.collectives import gather_sequence
from megadiff.parallel.mesh import Axis


def context_shard(x: Tensor, cp: Axis) -> Tensor:
    """This rank's `[b, s / cp, ...]` of `[b, s, ...]`: chunk r, then chunk 2 * cp - 1 - r."""
    if cp.size == 1:
        return x
    if x.shape[1] % (2 * cp.size):
        raise ValueError(
            f"a sequence of {x.shape[1]} tokens can not be cut into 2 x {cp.size} equal chunks"
        )
    chunks = x.chunk(2 * cp.size, dim=1)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]], dim=1)


def natural_order(x: Tensor, cp: Axis) -> Tensor:
    """Gathered shards `[b, s, ...]`, rank after rank, in the order of the sequence."""
    chunks = x.chunk(2 * cp.size, dim=1)
    return torch.cat([*chunks[0::2], *chunks[1::2][::-1]], dim=1)


@dataclass(frozen=True)
class QueryChunk:
    """One of this rank's two query chunks, and the documents as it sees them.

    It is `[start, start + length)` of this rank's part of each sequence and sees the first `keys`
    tokens of the whole sequence. `cu_seqlens_q` and `cu_seqlens_k`, int32 `[documents + 1]`, cut
    its `b * length` queries and the `b * keys` tokens that it sees; None without documents.
    """

    start: int
    length: int
    keys: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """What attention needs to know of a micro-batch whose sequences `cp` ranks share."""

    cp: Axis
    chunks: tuple[QueryChunk, QueryChunk]


def make_context(sequence: int, cp: Axis, cu_seqlens: Tensor | None = None) -> Context:
    """This rank's chunks of sequences of `sequence` tokens (the whole length).

    `cu_seqlens` `[documents + 1]` cuts the tokens of the whole micro-batch into documents; a
    sequence begins with a document of its own.
    """
    length = sequence // (2 * cp.size)

    def chunk(index: int, start: int) -> QueryChunk:
        begin, end = index * length, (index + 1) * length
        if cu_seqlens is None:
            return QueryChunk(start, length, end)
        first, last = cu_seqlens[:-1], cu_seqlens[1:]
        row = first // sequence * sequence
        first, last = first - row, (last - row).clamp(max=end)  # within the sequence
        queries = (last - first.clamp(min=begin)).clamp(min=0)
        keys = (last - first).clamp(min=0)
        return QueryChunk(start, length, end, _cumulative(queries), _cumulative(keys))

    return Context(cp, (chunk(cp.rank, 0), chunk(2 * cp.size - 1 - cp.rank, length)))


def _cumulative(lengths: Tensor) -> Tensor:
    zero = lengths.new_zeros(1)
    return torch.cat([zero, lengths.cumsum(0, dtype=lengths.dtype)]).int()


def attend_documents(
    operator: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *lam: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **options: Any,
) -> Tensor:
    """An attention `operator` of `megadiff.kernels` over `[b, s, heads, width]`.

    `cu_seqlens` cut the `b * s` queries and the keys into documents; None without them. lam is a
    scalar, `[h]` or `[b, s, h]`.
    """
    if cu_seqlens_q is None:
        return operator(q, k, v, *lam, **options)
    y = operator(
        *(t.flatten(0, 1) if t.dim() > 1 else t for t in (q, k, v, *lam)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        **options,
    )
    return y.unflatten(0, q.shape[:2])


def attend_in_context(
    operator: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *lam: Tensor,
    context: Context,
    **options: Any,
) -> Tensor:
    """The same over sequences that `cp` ranks share; all tensors are this rank's `s / cp`."""
    shapes = k.shape[2:], v.shape[2:]
    both = torch.cat([k.flatten(2), v.flatten(2)], dim=-1)  # one message for keys and values
    both = natural_order(gather_sequence(both, context.cp), context.cp)
    k, v = both.split([shape.numel() for shape in shapes], dim=-1)
    k, v = k.unflatten(-1, shapes[0]), v.unflatten(-1, shapes[1])
    outputs = []
    for chunk in context.chunks:
        mine, *own_lam = (
            t.narrow(1, chunk.start, chunk.length) if t.dim() > 1 else t for t in (q, *lam)
        )
        keys, values = k[:, : chunk.keys], v[:, : chunk.keys]
        documents = {"cu_seqlens_q": chunk.cu_seqlens_q, "cu_seqlens_k": chunk.cu_seqlens_k}
        outputs.append(
            attend_documents(operator, mine, keys, values, *own_lam, **documents, **options)
        )
    return torch.cat(outputs, dim=1)
