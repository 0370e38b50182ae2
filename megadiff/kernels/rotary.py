"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

import math

import torch
from torch import Tensor

from megadiff.kernels.device import on_triton
from megadiff.kernels.reference import wide

# Llama 3.1 and 3.2 were trained on contexts of this length before their positions were stretched.
LLAMA3_CONTEXT = 8192


def rotary_frequencies(
    dim: int,
    base: float,
    scaling_factor: float | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`base^(-2i / dim)`, `[dim / 2]` float64: the turn per position of each pair of columns.

    `scaling_factor` stretches them as Llama 3.1 does ("llama3" in Hugging Face's configurations):
    frequencies with a wavelength over 8192 positions are divided by the factor, those under a
    quarter of that stay, and those between go over smoothly.
    """
    if dim % 2:
        raise ValueError(f"the rotary width must be even; got {dim}")
    frequencies = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if scaling_factor is None:
        return frequencies
    turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)  # in the original context
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling_factor)


def rotary_cos_sin(
    positions: Tensor, dim: int, base: float = 10000.0, scaling_factor: float | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of `positions * frequency`, each `[*positions.shape, dim / 2]`.

    `base` and `scaling_factor` as in `rotary_frequencies`. The angles are computed in float64,
    where a position of 10^6 keeps all its digits. Returned in float64 for float64 positions, else
    in float32.
    """
    # made on the device: a copy from the host would wait for all that runs there
    frequencies = rotary_frequencies(dim, base, scaling_factor, positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    dtype = wide(torch.promote_types(x.dtype, cos.dtype))
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    rotated, rest = x[..., :width].to(dtype), x[..., width:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = rotated.chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first `2 * cos.shape[-1]` columns of every head of q and k.

    q, k: `[batch, seq, heads, d]` or `[tokens, heads, d]`; cos, sin: `[seq, r / 2]`,
    `[batch, seq, r / 2]` or `[tokens, r / 2]` with r <= d even. interleaved: rotate the columns
    (2i, 2i + 1) together (GPT-J, and the published DIFF code); else (i, i + r / 2) (Llama,
    GPT-NeoX). Returned in the dtypes of q and k; products are formed in at least float32.
    """
    for name, x in (("q", q), ("k", k)):
        if 2 * cos.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"the rotary width {2 * cos.shape[-1]} exceeds {name}'s head width {x.shape[-1]}"
            )
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def split_rotary(
    y: Tensor, widths: list[int], cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, ...]:
    """The columns of a fused projection as `[..., width]` each; the first two, q and k, rotated.

    y `[batch, seq, columns]`, of which the last may be padding; q and k are whole heads of width
    `2 * cos.shape[-1]`, cos and sin as in `rotary`. May write over y, which must not be used again,
    and returns views of it then; the backward forms y's gradient in one pass.
    """
    if on_triton(y) and y.is_contiguous() and cos.dtype == torch.float32:
        from megadiff.kernels import small_triton

        return small_triton.split_rotary(y, widths, cos, sin, interleaved)
    q, k, *rest = y.split([*widths, y.shape[-1] - sum(widths)], -1)[: len(widths)]
    q, k = (x.unflatten(-1, (-1, 2 * cos.shape[-1])) for x in (q, k))
    q, k = rotary(q, k, cos, sin, interleaved)
    return q.flatten(-2), k.flatten(-2), *rest
