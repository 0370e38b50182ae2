"""Attention through torch's own kernels: any float type, any device.

On CUDA, half precision runs on cuDNN or FlashAttention-2: dense calls through
`scaled_dot_product_attention` on strided views, one call per branch; windows, packed documents and
key lengths through the kernel behind `torch.nn.attention.varlen`. Elsewhere both branches are one
call of all 2h query heads, packed documents are taken one by one, and masks are made for blocks of
query rows.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.kernels.geometry import Geometry, visibility, visible

_ROWS = 1024  # query rows for which a mask is made at a time


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """One call on `[batch, seq, heads, width]`; query heads share the key heads of their group."""
    grouped = False
    if q.shape[2] != k.shape[2]:  # a branch, since the argument takes no symbolic comparison
        grouped = True
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask.unsqueeze(-3),
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


def _under_mask(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """mask: `[1 or batch, n_q, n_k]`. A row without keys attends to all, so that nothing is
    undefined, and is then set to 0."""
    sees_any = mask.any(-1, keepdim=True)
    out = _call(q, k, v, scale, mask | ~sees_any, False)
    return torch.where(sees_any.unsqueeze(-1), out, 0)


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
        outs.append(_under_mask(rows, k[:, low:high], v[:, low:high], scale, mask))
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
            # the first rows come before every key
            return F.pad(out, (0, 0, 0, 0, n_q - n_k, 0)) if n_q > n_k else out
    return _masked(q, k, v, scale, geometry, used)


def _documents(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """Packed: document by document. The lengths are read on the host."""
    if torch.compiler.is_compiling():  # a compiled graph cannot: one call under the whole mask
        mask = visibility(geometry, q.shape[0], k.shape[0], q.device)
        return _under_mask(q[None], k[None], v[None], scale, mask)[0]
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


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """FlashAttention-2 as torch ships it; q, k and v of one width, dense or packed."""
    causal = geometry.left is None and geometry.right == 0  # said in words, not as a window
    left, right = (
        None if causal else -1 if side is None else side for side in (geometry.left, geometry.right)
    )
    cu_q, cu_k, used = geometry.cu_seqlens_q, geometry.cu_seqlens_k, geometry.seqused_k
    dense = not geometry.packed
    batch, n_q, n_k = q.shape[0], q.shape[1], k.shape[1]
    if dense and used is not None:  # key lengths are known to the packed kernel only
        cu_q = n_q * torch.arange(batch + 1, device=q.device, dtype=torch.int32)
        cu_k = n_k * torch.arange(batch + 1, device=q.device, dtype=torch.int32)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    max_q = n_q if dense else geometry.max_seqlen_q
    max_k = n_k if dense else geometry.max_seqlen_k
    if cu_q is not None and cu_k is not None:
        cu_q, cu_k = cu_q.int(), cu_k.int()
        if geometry.packed:  # the kernel leaves padding unwritten, in outputs and in gradients
            inside_q = torch.arange(q.shape[0], device=q.device) < cu_q[-1]
            inside_k = torch.arange(k.shape[0], device=q.device) < cu_k[-1]
            q = torch.where(inside_q[:, None, None], q, 0)
            k, v = (torch.where(inside_k[:, None, None], x, 0) for x in (k, v))
    if used is not None:
        used = used.int().clamp(0, max_k)  # beyond the keys lies other memory
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right, seqused_k=used,
    )[0]  # fmt: skip
    if geometry.packed:
        return torch.where(inside_q[:, None, None], out, 0)  # type: ignore[possibly-undefined]
    return out.view(batch, n_q, *out.shape[-2:])


def _on_flash(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> bool:
    """Whether FlashAttention-2 serves the call, and `scaled_dot_product_attention` does not."""
    corner = q.shape[-3] >= k.shape[-3] or q.numel() == 0  # else causal would need a mask
    causal_or_full = geometry.right is None or (geometry.right == 0 and corner)
    plain = geometry.left is None and geometry.seqused_k is None and causal_or_full
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= 256
        and q.shape[-1] % 8 == 0
        and (geometry.packed or not plain)
        # torch's backward does not know the key lengths
        and (
            geometry.seqused_k is None
            or not torch.is_grad_enabled()
            or not any(x.requires_grad for x in (q, k, v))
        )
    )


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry) -> Tensor:
    """Standard attention; shapes as `megadiff.kernels.attention`."""
    width = v.shape[-1]
    if scale <= 0:  # torch's kernels count on a positive one
        q, scale = q * scale, 1.0
    on_flash = _on_flash(q, k, v, geometry)
    if q.shape[-1] != width and (on_flash or q.device.type == "cpu"):
        # The kernels that need no maps in memory want equal widths; zeros change no product.
        q, k, v = (F.pad(x, (0, max(q.shape[-1], width) - x.shape[-1])) for x in (q, k, v))
    if on_flash:
        out = _flash(q, k, v, scale, geometry)
    elif geometry.packed:
        out = _documents(q, k, v, scale, geometry)
    else:
        out = _dense(q, k, v, scale, geometry, geometry.seqused_k)
    return out[..., :width]


def _branches_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """A call per branch on strided views; FlashAttention-2 takes values of width 2 d by halves."""
    d = q.shape[-1]
    halves = v.split(d, -1) if _on_flash(q, k, v, geometry) and v.shape[-1] == 2 * d else (v,)
    first, second = (
        [attention(q[..., i::2, :], k[..., i::2, :], x, scale, geometry) for x in halves]
        for i in (0, 1)
    )
    if len(halves) == 1:
        return first[0], second[0]
    return torch.cat(first, -1), torch.cat(second, -1)


class _Difference(torch.autograd.Function):
    """first - lam second in lam's type; keeps `second` as it is, which its kernel keeps anyway."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor, lam: Tensor) -> Tensor:  # type: ignore[override]
        return first.to(lam.dtype) - lam * second

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        second, lam = ctx.saved_tensors
        d_lam = -(d * second).sum(-1, keepdim=True)
        return d.to(second.dtype), (-lam * d).to(second.dtype), d_lam


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, scale: float, geometry: Geometry
) -> Tensor:
    """Both branches with torch's kernels, then the difference in at least float32."""
    groups, pairs = v.shape[-2], q.shape[-2] // 2
    own_keys = k.shape[-2] != groups
    if own_keys and q.device.type == "cuda":
        first, second = _branches_on_cuda(q, k, v, scale, geometry)
    elif own_keys:
        # heads ordered (group, branch, pair of the group): a branch of a group is a key/value head
        q = q.unflatten(-2, (groups, pairs // groups, 2)).transpose(-3, -2).flatten(-4, -2)
        out = attention(q, k, v.repeat_interleave(2, dim=-2), scale, geometry)
        out = out.unflatten(-2, (groups, 2, pairs // groups))
        first, second = (x.flatten(-3, -2) for x in out.unbind(-3))
    else:
        out = attention(q, k, v, scale, geometry)
        first, second = out.unflatten(-2, (pairs, 2)).unbind(-2)
    dtype = torch.promote_types(q.dtype, torch.float32)
    lam = lam.to(dtype).expand(first.shape[:-1]).unsqueeze(-1)
    return _Difference.apply(first, second, lam)  # type: ignore[return-value]
