"""Cross entropy over a vocabulary that is sharded over the tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.kernels import cross_entropy_grad, cross_entropy_partials
from megadiff.kernels.device import refuse_second_derivative
from megadiff.parallel.mesh import Axis


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        start = tp.rank * logits.shape[-1]
        maximum, total, target = cross_entropy_partials(logits, labels, start, vocab_size)
        if tp.size > 1:
            local = maximum.clone()
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=tp.group)
            sums = torch.stack([total * torch.exp(local - maximum), target])
            dist.all_reduce(sums, group=tp.group)
            total, target = sums
        ctx.save_for_backward(logits, labels, maximum, total)
        ctx.start, ctx.vocab_size, ctx.overwritten = start, vocab_size, False
        return total.log() + maximum - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        if ctx.overwritten:
            raise RuntimeError("a second backward of the loss: the first wrote over the logits")
        ctx.overwritten = True
        logits, labels, maximum, total = ctx.saved_tensors
        grad_logits = cross_entropy_grad(
            logits, labels, maximum, total, grad, ctx.start, ctx.vocab_size, inplace=True
        )
        return grad_logits, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis
) -> Tensor:
    """The loss of every token, `[b, s]`, in at least float32.

    `logits` `[b, s, vocab / tp]` are this rank's columns of the padded vocabulary; columns at or
    past `vocab_size` take no part. `labels` `[b, s]` are global ids. Backward writes the gradient
    of the logits over them: nothing else may read them after it.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, tp)
