"""Attention through torch's scaled_dot_product_attention: any float type, any device."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.geometry import Geometry, visible

_ROWS = 1024  # query rows for which a mask is made at a time


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """One call on `[batch, seq, heads, width]`; query heads share the key heads of their group."""
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask.unsqueeze(-3),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry, used: Tensor | None
) -> Tensor:
    """Blocks of query rows, each over the keys that it can see; `used`: `[batch]` keys in use."""
    n_q, n_k = q.shape[1], k.shape[1]
    shift = n_k - n_q
    outs = []
    for begin in range(0, n_q, _ROWS):
        end = min(begin + _ROWS, n_q)
        low, high = 0, n_k
        if used is None:
            if geometry.left is not None:
                low = min(max(begin + shift - geometry.left, 0), n_k)
            if geometry.right is not None:
                high = max(min(end + shift + geometry.right, n_k), low)
        rows = q[:, begin:end]
        if low == high:
            outs.append(rows.new_zeros(*rows.shape[:-1], v.shape[-1]))
            continue
        i = torch.arange(begin, end, device=q.device)
        j = torch.arange(low, high, device=q.device)
        length = torch.full((1,), n_k, device=q.device) if used is None else used.long()
        mask = visible(i + (length - n_q)[:, None], j[None], geometry.left, geometry.right)
        mask = mask & (j < length[:, None])[:, None, :]
        # A row without keys attends to all, so that nothing is undefined, and is then set to 0.
        sees_any = mask.any(-1, keepdim=True)
        out = _call(rows, k[:, low:high], v[:, low:high], scale, mask | ~sees_any, False)
        outs.append(torch.where(sees_any.unsqueeze(-1), out, 0))
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry, used: Tensor | None
) -> Tensor:
    n_q, n_k = q.shape[1], k.shape[1]
    if n_q == 0 or n_k == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if used is None and geometry.left is None:
        if geometry.right is None:
            return _call(q, k, v, scale, None, False)
        if geometry.right == 0 and n_q >= n_k:
            out = _call(q[:, n_q - n_k :], k, v, scale, None, True)
            return F.pad(out, (0, 0, 0, 0, n_q - n_k, 0))  # the first rows come before every key
    return _masked(q, k, v, scale, geometry, used)


def _documents(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """Packed: document by document. The lengths are read on the host."""
    assert geometry.cu_seqlens_q is not None and geometry.cu_seqlens_k is not None
    cu_q, cu_k = geometry.cu_seqlens_q.tolist(), geometry.cu_seqlens_k.tolist()
    lengths_q = [end - begin for begin, end in pairwise(cu_q)]
    lengths_k = [end - begin for begin, end in pairwise(cu_k)]
    used = lengths_k if geometry.seqused_k is None else geometry.seqused_k.tolist()
    # split, not slices: its backward is one concatenation
    qs = q[None].split([*lengths_q, q.shape[0] - cu_q[-1]], 1)
    ks = k[None].split([*lengths_k, k.shape[0] - cu_k[-1]], 1)
    vs = v[None].split([*lengths_k, k.shape[0] - cu_k[-1]], 1)
    outs = [
        _dense(qd, kd[:, :n], vd[:, :n], scale, geometry, None)
        for qd, kd, vd, n in zip(qs, ks, vs, used, strict=False)
        if qd.shape[1]
    ]
    outs.append(q.new_zeros(1, q.shape[0] - cu_q[-1], q.shape[1], v.shape[-1]))
    return torch.cat(outs, 1)[0]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """Standard attention; shapes as `megadiff.kernels.attention`."""
    width = v.shape[-1]
    if q.shape[-1] != width and q.device.type == "cpu":
        # The CPU kernel that needs no maps in memory wants equal widths; zeros change no product.
        q, k, v = (F.pad(x, (0, max(q.shape[-1], width) - x.shape[-1])) for x in (q, k, v))
    if geometry.packed:
        out = _documents(q, k, v, scale, geometry)
    else:
        out = _dense(q, k, v, scale, geometry, geometry.seqused_k)
    return out[..., :width]


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, scale: float, geometry: Geometry
) -> Tensor:
    """Both branches in one call of all 2h query heads, then the difference in at least float32."""
    groups, pairs = v.shape[-2], q.shape[-2] // 2
    repeats = pairs // groups
    own_keys = k.shape[-2] != groups
    if own_keys:
        # heads ordered (group, branch, pair of the group): each branch of a group is a key/value
        # head
        q = q.unflatten(-2, (groups, repeats, 2)).transpose(-3, -2).flatten(-4, -2)
        v = v.repeat_interleave(2, dim=-2)
    out = attention(q, k, v, scale, geometry)
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    if own_keys:
        out = out.unflatten(-2, (groups, 2, repeats))
        first, second = out.unbind(-3)
        first, second = first.flatten(-3, -2), second.flatten(-3, -2)
    else:
        first, second = out.unflatten(-2, (pairs, 2)).unbind(-2)
    return first - lam.to(first.dtype).expand(first.shape[:-1]).unsqueeze(-1) * second
