"""Cross entropy over a slice of the vocabulary: partial results, and the gradient from the whole.

With the vocabulary split, every rank forms (max, sum, target) over its columns; the caller combines
them, `M = max over ranks of max`, `S = sum over ranks of sum * exp(max - M)`, `T = sum over ranks
of target`, and the loss of a row is `log S + M - T`. Rows are processed in chunks, so that no
float32 copy of all logits exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megadiff.kernels.device import on_triton
from megadiff.kernels.reference import wide

CHUNK = 1 << 22  # logits widened at a time without Triton: 16 MiB in float32


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(columns, 1))
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def _real_columns(columns: int, vocab_start: int, vocab_size: int | None) -> int:
    """How many of the slice's columns are words and no padding."""
    return columns if vocab_size is None else max(0, min(columns, vocab_size - vocab_start))


def cross_entropy_partials(
    logits: Tensor, labels: Tensor, vocab_start: int = 0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(row maximum, sum of exp(logit - maximum), logit of the label or 0 where it is elsewhere).

    logits: `[..., columns]`, of which column c is word `vocab_start + c`; words from `vocab_size`
    on are padding and count for nothing. labels: `[...]` integers; a label outside the slice
    (another rank's, or an ignore index such as -100) gives target 0. Each result is `[...]` in at
    least float32; a slice of padding alone gives (-inf, 0, 0). No autograd: `cross_entropy_grad` is
    the backward.
    """
    columns, dtype = logits.shape[-1], wide(logits.dtype)
    real = _real_columns(columns, vocab_start, vocab_size)
    flat, flat_labels = logits.detach().reshape(-1, columns), labels.reshape(-1)
    if real and on_triton(flat):
        from megadiff.kernels import small_triton

        flat, flat_labels = flat.contiguous(), flat_labels.contiguous()
        results = small_triton.cross_entropy_partials(flat, flat_labels, vocab_start, real)
        maximum, total, target = (x.view(labels.shape) for x in results)
        return maximum, total, target
    maximum = flat.new_full(flat_labels.shape, -torch.inf, dtype=dtype)
    total = torch.zeros_like(maximum)
    target = torch.zeros_like(maximum)
    if real:
        for rows in _chunks(flat.shape[0], columns):
            x, column = flat[rows, :real].to(dtype), flat_labels[rows] - vocab_start
            maximum[rows] = x.amax(-1)
            total[rows] = (x - maximum[rows, None]).exp().sum(-1)
            inside = (column >= 0) & (column < real)
            column = torch.where(inside, column, 0)[:, None]
            target[rows] = torch.where(inside, x.gather(-1, column)[:, 0], 0)
    return maximum.view(labels.shape), total.view(labels.shape), target.view(labels.shape)


def cross_entropy_grad(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad_output: Tensor,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    *,
    inplace: bool = False,
) -> Tensor:
    """(softmax - one-hot) * grad_output, in logits' dtype; `maximum` and `total` are the combined
    ones.

    Shapes as in `cross_entropy_partials`; grad_output: `[...]`. A row with grad_output 0 gets
    exactly 0, padding columns too. inplace: write over `logits`, which saves their memory.
    """
    columns = logits.shape[-1]
    real = _real_columns(columns, vocab_start, vocab_size)
    flat = logits.detach().reshape(-1, columns)
    grad = flat if inplace else torch.empty_like(flat)
    row_max, row_sum, row_grad, row_label = (
        x.reshape(-1) for x in (maximum, total, grad_output.to(wide(logits.dtype)), labels)
    )
    if on_triton(flat) and flat.is_contiguous():
        from megadiff.kernels import small_triton

        row_label, row_max, row_sum, row_grad = (
            x.contiguous() for x in (row_label, row_max, row_sum, row_grad)
        )
        small_triton.cross_entropy_grad(
            flat, row_label, row_max, row_sum, row_grad, grad, vocab_start, real
        )
        return grad.view(logits.shape)
    grad[:, real:] = 0
    for rows in _chunks(flat.shape[0], columns):
        p = (flat[rows, :real].to(row_max.dtype) - row_max[rows, None]).exp() / row_sum[rows, None]
        is_label = torch.arange(real, device=p.device) == row_label[rows, None] - vocab_start
        grad[rows, :real] = (p - is_label.to(p.dtype)) * row_grad[rows, None]
    return grad.view(logits.shape)
