from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadiff.kernels import cross_entropy_grad, cross_entropy_partials
from megadiff.parallel.loss import vocab_parallel_cross_entropy
from megadiff.parallel.mesh import Axis


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadiff.kernels.loss.CHUNK", 64)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """As one rank computes it, of a copy, over which the gradient is written."""
    return vocab_parallel_cross_entropy(logits.clone(), labels, vocab_size, Axis())


def test_equals_torch_with_a_padded_vocabulary() -> None:
    logits = (30 * torch.randn(2, 7, 16, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 13, (2, 7))
    loss = cross_entropy(logits, labels, 13)
    expected = F.cross_entropy(logits[..., :13].transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected)
    weight = torch.rand(2, 7, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits, weight), torch.autograd.grad(expected, logits, weight)
    )


def test_parts_of_the_vocabulary_combine() -> None:
    """Four slices of 6 columns, 17 words: the last slice is padding alone."""
    logits = 20 * torch.randn(9, 24, dtype=torch.float64)
    labels = torch.randint(0, 17, (9,))
    slices = [(logits[:, at : at + 6], at) for at in range(0, 24, 6)]
    parts = [cross_entropy_partials(x, labels, at, 17) for x, at in slices]
    maximum = torch.stack([m for m, _, _ in parts]).amax(0)
    total = sum(s * torch.exp(m - maximum) for m, s, _ in parts)
    loss = total.log() + maximum - sum(t for _, _, t in parts)
    whole = logits[:, :17].clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="none")
    torch.testing.assert_close(loss, expected)
    dy = torch.randn(9, dtype=torch.float64)
    (grad,) = torch.autograd.grad(expected, whole, dy)
    mine = [cross_entropy_grad(x, labels, maximum, total, dy, at, 17) for x, at in slices]
    torch.testing.assert_close(torch.cat(mine, -1), F.pad(grad, (0, 7)))
    assert parts[3][0].isneginf().all() and not parts[3][1].any()


def test_ignored_labels_and_half_precision() -> None:
    logits = torch.randn(5, 12).bfloat16().requires_grad_()
    labels = torch.tensor([3, -100, 0, 11, -100])
    kept = labels >= 0
    loss = cross_entropy(logits, labels, 12)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss[kept], F.cross_entropy(logits.float(), labels, reduction="none")[kept]
    )
    (grad,) = torch.autograd.grad((loss * kept).sum(), logits)
    assert grad.dtype == torch.bfloat16 and not grad[~kept].any() and grad[kept].any()


def test_gradient_can_take_the_place_of_the_logits() -> None:
    logits, labels = torch.randn(6, 10), torch.randint(0, 10, (6,))
    maximum, total, _ = cross_entropy_partials(logits, labels)
    expected = cross_entropy_grad(logits, labels, maximum, total, torch.ones(6))
    grad = cross_entropy_grad(logits, labels, maximum, total, torch.ones(6), inplace=True)
    assert grad.data_ptr() == logits.data_ptr()
    assert torch.equal(grad, expected)


class _Largest(TorchDispatchMode):
    """The most elements of a float32 tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.elements = max(self.elements, x.numel())
        return result


def test_the_logits_are_never_whole_in_float32() -> None:
    logits = torch.randn(40, 32).bfloat16().requires_grad_()
    with _Largest() as largest:
        cross_entropy(logits, torch.arange(32).repeat(2)[:40], 32).sum().backward()
    assert logits.grad is not None and 0 < largest.elements <= 64  # a chunk
