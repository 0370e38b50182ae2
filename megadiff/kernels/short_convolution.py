"""The short causal convolution before linear attention: each channel mixes its last few tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megadiff.kernels import fla
from megadiff.kernels.device import refuse_second_derivative
from megadiff.kernels.documents import document_lengths


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[t] = bias + sum_j weight[:, 0, j] x[t - (width - 1) + j], then SiLU if asked.

    x `[batch, sequence, channels]`; weight `[channels, 1, width]`, as of a depthwise Conv1d; bias
    `[channels]`. With `cu_seqlens` `[documents + 1]` over the `batch * sequence` tokens each
    document starts anew; documents may be empty. `initial_state`
    `[batch or documents, width - 1, channels]` holds the inputs before the first token, oldest
    first (default: zeros).

    Returns y, like x, and the last `width - 1` inputs of each sequence or document, like
    `initial_state` and in the type of x: given back, they continue the convolution. Differentiable
    in everything; the backward pass keeps the inputs only. Sums are float32, or float64 where an
    input is.
    """
    batch, _, channels = x.shape
    width = weight.shape[-1]
    if weight.shape != (channels, 1, width):
        raise ValueError(
            f"short_convolution takes a weight [channels, 1, width] for the {channels} channels "
            f"of x, not {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"short_convolution takes a bias [{channels}], not {tuple(bias.shape)}")
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    state_shape = (count, width - 1, channels)
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(
            f"initial_state must be {state_shape}, not {tuple(initial_state.shape)}: the last "
            "inputs of each sequence, or of each document of cu_seqlens"
        )
    operator = fla.ShortConvolution(x.dtype, weight.dtype, channels, width, bias is not None, silu)
    variant = fla.Variant(cu_seqlens is not None, initial_state is not None, final=True)
    run = fla.kernel_for(operator, variant, x.device, torch_short_convolution)
    run = run or torch_short_convolution
    return run(x, weight, bias, initial_state, silu, cu_seqlens)


def torch_short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    silu: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`short_convolution` in torch, on any device."""
    batch, length, channels = x.shape
    kept = weight.shape[-1] - 1
    if cu_seqlens is None:
        lengths = torch.full((batch,), length)
    else:
        lengths = document_lengths(cu_seqlens, batch * length)
    if initial_state is None:
        initial_state = x.new_zeros(len(lengths), kept, channels)
    rows = _rows(lengths, kept, x.device)
    return _ShortConvolution.apply(x, weight, bias, initial_state, silu, rows)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Rows:
    """Where things lie when every sequence stands behind its initial state, one below the other."""

    token: torch.Tensor  # [tokens]
    history: torch.Tensor  # [sequences, width - 1]
    last: torch.Tensor  # [sequences, width - 1]

    def extended(self, x: torch.Tensor, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, channels]`"""
        rows = x.new_empty((self.token.numel() + self.history.numel(), x.shape[-1]), dtype=dtype)
        rows[self.history] = state.to(dtype)
        rows[self.token] = x.flatten(0, 1).to(dtype)
        return rows


def _rows(lengths: torch.Tensor, kept: int, device: torch.device) -> _Rows:
    sequence = torch.arange(len(lengths))
    end = lengths.cumsum(0) + (sequence + 1) * kept
    begin = end - lengths - kept
    offset = torch.arange(kept)
    token = torch.arange(int(lengths.sum()))
    token += (torch.repeat_interleave(sequence, lengths) + 1) * kept
    return _Rows(
        token.to(device),
        (begin[:, None] + offset).to(device),
        (end[:, None] - kept + offset).to(device),
    )


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, silu, rows):  # type: ignore[override]
        ctx.save_for_backward(x, weight, bias, state)
        ctx.silu, ctx.rows = silu, rows
        extended = rows.extended(x, state, _accumulation_dtype(x, weight))
        y = _convolve(extended, weight, bias)[rows.token - (weight.shape[-1] - 1)]
        y = F.silu(y, inplace=True) if silu else y
        return y.to(x.dtype).view_as(x), extended[rows.last].to(x.dtype)

    @staticmethod
    def backward(ctx, d_y, d_final):  # type: ignore[override]
        refuse_second_derivative()
        x, weight, bias, state = ctx.saved_tensors
        rows, dtype = ctx.rows, _accumulation_dtype(x, weight)
        width = weight.shape[-1]
        extended = rows.extended(x, state, dtype)
        span = extended.shape[0] - (width - 1)
        d_z = extended.new_zeros(span, extended.shape[1])
        d_z[rows.token - (width - 1)] = d_y.flatten(0, 1).to(dtype)
        if ctx.silu:
            d_z = torch.ops.aten.silu_backward(d_z, _convolve(extended, weight, bias))
        taps = weight.to(dtype)[:, 0]
        d_extended = torch.zeros_like(extended)
        d_weight = torch.empty_like(taps)
        for j in range(width):
            d_extended[j : j + span].addcmul_(d_z, taps[:, j])
            d_weight[:, j] = (d_z * extended[j : j + span]).sum(0)
        d_extended.index_put_((rows.last,), d_final.to(dtype), accumulate=True)
        return (
            d_extended[rows.token].to(x.dtype).view_as(x),
            d_weight[:, None].to(weight.dtype),
            None if bias is None else d_z.sum(0).to(bias.dtype),
            d_extended[rows.history].to(state.dtype),
            None,
            None,
        )


def _accumulation_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32


def _convolve(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[rows, channels]` to `[rows - (width - 1), channels]`: row r sees r to r + width - 1."""
    taps = weight.to(rows.dtype)[:, 0]
    width = taps.shape[1]
    span = max(rows.shape[0] - (width - 1), 0)
    out = rows[:span] * taps[:, 0]
    for j in range(1, width):
        out.addcmul_(rows[j : j + span], taps[:, j])
    return out if bias is None else out.add_(bias.to(rows.dtype))
