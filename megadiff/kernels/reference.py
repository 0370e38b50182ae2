"""The oracle: attention written as its definition, with the maps in memory.

Runs in any float type on any device; computed in at least float32, and in float64 for float64
input.
"""

import torch
from torch import Tensor

from megadiff.kernels.geometry import Geometry, visibility


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def probabilities(q: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    """softmax(scale q k^T) over the visible keys, `[batch, heads, n_q, n_k]`; 0 in rows that see
    none.

    q: `[batch, n_q, heads, d]`; k: `[batch, n_k, heads_k, d]`, query head i reads key head
    `i // (heads / heads_k)`; mask: `[1 or batch, n_q, n_k]`.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    mask = mask.unsqueeze(1)
    sees_any = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask & sees_any, -torch.inf)
    return torch.softmax(scores, -1).masked_fill(~sees_any, 0.0)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """Standard attention; shapes as `megadiff.kernels.attention`. Returned in `wide(q.dtype)`."""
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    if geometry.packed:
        q, k, v = q[None], k[None], v[None]
    p = probabilities(q, k, scale, visibility(geometry, q.shape[1], k.shape[1], q.device))
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    return out[0] if geometry.packed else out


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, scale: float, geometry: Geometry
) -> Tensor:
    """(softmax(q1 k1^T) - lam softmax(q2 k2^T)) v (arXiv 2410.05258, eq. 1), in `wide(q.dtype)`.

    Shapes as `megadiff.kernels.diff_attention`.
    """
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    lam = lam.to(q.dtype)
    if geometry.packed:
        q, k, v = q[None], k[None], v[None]
        lam = lam[None] if lam.dim() == 2 else lam
    mask = visibility(geometry, q.shape[1], k.shape[1], q.device)
    k1, k2 = (k[:, :, 0::2], k[:, :, 1::2]) if k.shape[2] != v.shape[2] else (k, k)
    p1 = probabilities(q[:, :, 0::2], k1, scale, mask)
    p2 = probabilities(q[:, :, 1::2], k2, scale, mask)
    pairs = q.shape[2] // 2
    per_query = lam.transpose(1, 2) if lam.dim() == 3 else lam.expand(pairs)[:, None]
    p = p1 - per_query[..., None] * p2
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(pairs // v.shape[2], dim=2))
    return out[0] if geometry.packed else out
