"""Packed documents: what `cu_seqlens` says, read once on the host."""

import torch


def document_lengths(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Lengths of the documents that `cu_seqlens` `[documents + 1]` cuts `tokens` tokens into.

    Returns int64 `[documents]` on the CPU; documents may be empty (padding repeats the last entry).
    Raises ValueError when the entries do not rise from 0 to `tokens`, TypeError when they are not
    integers.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, not {cu_seqlens.dtype}")
    bounds = cu_seqlens.detach().to("cpu", torch.int64)
    lengths = bounds.diff()
    if bounds.dim() != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(
            f"cu_seqlens must be one row that starts at 0 and ends at the {tokens} tokens of the "
            f"batch, not {bounds.tolist()}"
        )
    if (lengths < 0).any():
        raise ValueError(f"cu_seqlens must not decrease: {bounds.tolist()}")
    return lengths
