"""Kernels whose gradients autograd can not follow refuse a second derivative."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megadiff.kernels import (
    delta_rule,
    diff_attention,
    gated_rms_norm,
    l2_norm,
    rotary_cos_sin,
    short_convolution,
)
from megadiff.parallel.loss import vocab_parallel_cross_entropy
from megadiff.parallel.mesh import Axis

pytest.importorskip("triton")
from megadiff.kernels import norm_triton, small_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def split_rotary(x: Tensor) -> Tensor:
    angles = rotary_cos_sin(torch.arange(4, device=DEVICE), 16)
    return torch.cat(small_triton.split_rotary(x.repeat(1, 1, 3), [16, 16, 16], *angles, True), -1)


def attention(x: Tensor) -> Tensor:
    q = x.bfloat16().unsqueeze(2).expand(-1, -1, 2, -1)
    return diff_attention(q, q, q[:, :, :1], torch.ones(1, device=DEVICE), backend="triton")


def cross_entropy(x: Tensor) -> Tensor:
    labels = torch.zeros(1, 4, dtype=torch.int64)
    return vocab_parallel_cross_entropy(x.clone(), labels, 16, Axis())


def deltas(x: Tensor) -> Tensor:
    heads = x.unsqueeze(2)
    return delta_rule(heads, heads, heads, x[:, :, :1])[0]


IN_TRITON: list[Callable[[Tensor], Tensor]] = [
    small_triton.swiglu,
    split_rotary,
    lambda x: norm_triton.add_rms_norm(x, None, None, 1e-5)[1],
    attention,
]
PLAIN: list[Callable[[Tensor], Tensor]] = [
    cross_entropy,
    l2_norm,
    lambda x: gated_rms_norm(x, x, x[0, 0]),
    lambda x: short_convolution(x, x[0].T.unsqueeze(1))[0],
    deltas,
]


@pytest.mark.parametrize(
    ("kernel", "device"), [(k, DEVICE) for k in IN_TRITON] + [(k, "cpu") for k in PLAIN]
)
def test_a_second_derivative_is_refused(kernel: Callable[[Tensor], Tensor], device: str) -> None:
    """Also where the gradient that arrives is a constant; the first one is given."""
    x = torch.randn(1, 4, 16, device=device).requires_grad_()
    gradient = partial(torch.autograd.grad, inputs=x)
    assert gradient(kernel(x).sum())[0].isfinite().all()
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient(kernel(x).sum(), create_graph=True)
