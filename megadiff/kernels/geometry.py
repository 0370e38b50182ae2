"""Which key a query sees: causal, sliding window, packed documents, key lengths per row.

The last query of a row or document is aligned with its last key (bottom-right alignment), as in
flash attention: with `used` keys and `n` queries, query i stands at position `i + used - n`, and
sees the keys j with `position - left <= j <= position + right`. Causal means `right = 0`; -1 or
None is no limit.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """What is visible, besides the shapes. Packed (`cu_seqlens_q` given) or dense.

    cu_seqlens_q, cu_seqlens_k: `[documents + 1]` integers, from 0; tokens after the last entry are
    padding and see nothing. seqused_k: `[batch]` (packed: `[documents]`), keys in use of each row.
    """

    left: int | None = None
    right: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None


def make_geometry(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_k: Tensor | None,
) -> Geometry:
    """Check the arguments that describe visibility against the shapes of q and k, and normalise
    them.

    What `cu_seqlens` and `seqused_k` hold is checked on the CPU alone: a GPU would have to wait."""
    if window is None:
        window = (-1, -1)
    elif not (
        isinstance(window, tuple | list)
        and len(window) == 2
        and all(isinstance(side, int) for side in window)
    ):
        raise ValueError(f"window must be two integers (left, right), not {window}")
    left, right = (None if side < 0 else side for side in window)
    if causal:
        right = 0
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q")
        if q.dim() != 4:
            raise ValueError(
                f"q must be [batch, seq, heads, width], or [tokens, heads, width] together with "
                f"cu_seqlens_q; got {tuple(q.shape)}"
            )
        rows = q.shape[0]
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    else:
        if q.dim() != 3:
            raise ValueError(
                "packed q must be [tokens, heads, width] (cu_seqlens_q is given); got "
                f"{tuple(q.shape)}"
            )
        if cu_seqlens_k is None:
            if q.shape[0] != k.shape[0]:
                raise ValueError(
                    f"q has {q.shape[0]} tokens and k {k.shape[0]}: cu_seqlens_k is needed too"
                )
            cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_k or max_seqlen_q
        if cu_seqlens_q.dim() != 1 or cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must both be [documents + 1]; got "
                f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
            )
        rows = cu_seqlens_q.shape[0] - 1
        if rows < 0:
            raise ValueError("cu_seqlens_q is empty; without documents it is [0]")
        # Bounds that are always right; a smaller given value saves work.
        max_seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    if seqused_k is not None and tuple(seqused_k.shape) != (rows,):
        raise ValueError(f"seqused_k must be [{rows}]; got {tuple(seqused_k.shape)}")
    result = Geometry(
        left, right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
    )
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        x = getattr(result, name)
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {x.dtype}")
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, and q is on {q.device}")
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(result, q, k)
    return result


def _check_values(geometry: Geometry, q: Tensor, k: Tensor) -> None:
    used = None if geometry.seqused_k is None else geometry.seqused_k.tolist()
    if not geometry.packed:
        if used and max(used) > k.shape[1]:
            raise ValueError(f"seqused_k {used} exceeds the {k.shape[1]} keys of a row")
        return
    for name, x in (("q", q), ("k", k)):
        bounds = getattr(geometry, f"cu_seqlens_{name}").tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] > x.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens_{name} must rise from 0 to at most the {x.shape[0]} tokens of {name}; "
                f"got {bounds}"
            )
        longest = getattr(geometry, f"max_seqlen_{name}")
        if max(lengths, default=0) > longest:
            raise ValueError(
                f"max_seqlen_{name} is {longest}, and a document has {max(lengths)} tokens"
            )
    if used and any(n > length for n, length in zip(used, lengths, strict=True)):  # of k
        raise ValueError(f"seqused_k {used} exceeds the documents' keys {lengths}")


def visible(q_position: Tensor, k_position: Tensor, left: int | None, right: int | None) -> Tensor:
    """`[.., queries, keys]` booleans from positions `[.., queries]` and `[.., keys]`."""
    distance = k_position.unsqueeze(-2) - q_position.unsqueeze(-1)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        mask &= distance <= right
    if left is not None:
        mask &= distance >= -left
    return mask


def visibility(geometry: Geometry, n_q: int, n_k: int, device: torch.device) -> Tensor:
    """The whole mask, `[1 or batch, n_q, n_k]` (packed: `[1, tokens, tokens]`), for the oracle."""
    i = torch.arange(n_q, device=device)
    j = torch.arange(n_k, device=device)
    used = geometry.seqused_k
    if not geometry.packed:
        length = torch.full((1,), n_k, device=device) if used is None else used.long()
        mask = visible(i + (length - n_q)[:, None], j[None], geometry.left, geometry.right)
        return mask & (j < length[:, None])[:, None, :]
    assert geometry.cu_seqlens_q is not None and geometry.cu_seqlens_k is not None
    cu_q, cu_k = geometry.cu_seqlens_q.long(), geometry.cu_seqlens_k.long()
    length = cu_k.diff() if used is None else used.long()
    # The document of a token: padding gets the number of documents, for which a dummy entry
    # follows.
    document_q = torch.searchsorted(cu_q[1:].contiguous(), i, right=True)
    document_k = torch.searchsorted(cu_k[1:].contiguous(), j, right=True)
    shift = torch.cat([length - cu_q.diff() - cu_q[:-1], cu_q.new_zeros(1)])
    k_position = j - cu_k[document_k]
    mask = visible(i + shift[document_q], k_position, geometry.left, geometry.right)
    inside = (document_k < length.shape[0]) & (k_position < torch.cat([length, j[:1]])[document_k])
    return (mask & inside & (document_q[:, None] == document_k))[None]
