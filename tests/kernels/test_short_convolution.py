"""The short convolution against torch's own depthwise Conv1d."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megadiff.kernels import fla
from megadiff.kernels.short_convolution import short_convolution, torch_short_convolution

EXACT = 1e-13


def make(width: int = 4, batch: int = 2, length: int = 37, channels: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, length, channels), (channels, 1, width), (channels,))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_conv1d(width: int, silu: bool, with_bias: bool) -> None:
    x, weight, bias = make(width)
    y, state = short_convolution(x, weight, bias if with_bias else None, silu=silu)
    padded = F.pad(x.mT, (width - 1, 0))
    expected = F.conv1d(padded, weight, bias if with_bias else None, groups=6).mT
    expected = F.silu(expected) if silu else expected
    torch.testing.assert_close(y, expected, rtol=0, atol=EXACT)
    assert torch.equal(state, x[:, x.shape[1] - (width - 1) :])

    leaves = [x, weight, bias] if with_bias else [x, weight]
    d = torch.randn_like(y)
    found, right = torch.autograd.grad(y, leaves, d), torch.autograd.grad(expected, leaves, d)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_packed_documents_start_anew() -> None:
    x, weight, bias = make()
    bounds = [0, 0, 1, 3, 3, 40, 70, 74, 74]
    states = torch.randn(len(bounds) - 1, 3, 6, dtype=torch.float64)
    y, final = short_convolution(
        x, weight, bias, silu=True, initial_state=states, cu_seqlens=torch.tensor(bounds)
    )
    row = x.flatten(0, 1)[None]
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone, state = short_convolution(
            row[:, begin:end], weight, bias, silu=True, initial_state=states[n : n + 1]
        )
        torch.testing.assert_close(y.flatten(0, 1)[begin:end], alone[0], rtol=0, atol=EXACT)
        assert torch.equal(final[n : n + 1], state)
    assert torch.equal(final[0], states[0])  # an empty document


def test_gradients_of_packed_documents_and_states() -> None:
    x, weight, bias = make(length=6, channels=2)
    states = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, 1, 1, 8, 12])

    def function(*args: torch.Tensor) -> Any:
        return short_convolution(*args[:3], silu=True, initial_state=args[3], cu_seqlens=bounds)

    assert torch.autograd.gradcheck(function, (x, weight, bias, states))


@pytest.mark.parametrize("pieces", [[1] * 37, [2, 1, 3, 31], [30, 7], [36, 1]])
def test_state_continues_in_any_segmentation(pieces: list[int]) -> None:
    x, weight, bias = make()
    whole, final = short_convolution(x, weight, bias, silu=True)
    state, outputs = None, []
    for piece in x.split(pieces, 1):
        y, state = short_convolution(piece, weight, bias, silu=True, initial_state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=EXACT)
    assert state is not None and torch.equal(state, final)


def test_bfloat16_is_summed_in_float32() -> None:
    x, weight, bias = (t.detach().bfloat16() for t in make())
    y, _ = short_convolution(x, weight, bias)
    exact, _ = short_convolution(x.double(), weight.double(), bias.double())
    assert torch.equal(y, exact.bfloat16())  # rounded once


def test_bad_shapes_are_named() -> None:
    x, weight, _ = make()
    with pytest.raises(ValueError, match=r"the 6 channels of x, not \(5, 1, 4\)"):
        short_convolution(x, weight[:5])
    with pytest.raises(ValueError, match=r"a bias \[6\], not \(1,\)"):
        short_convolution(x, weight, weight[:1, 0, 0])
    with pytest.raises(ValueError, match=r"initial_state must be \(2, 3, 6\), not \(2, 4, 6\)"):
        short_convolution(x, weight, initial_state=x.new_zeros(2, 4, 6))


def _acausal(x: Any, weight: Any, *rest: Any) -> Any:
    return torch_short_convolution(x, weight.flip(2), *rest)


@pytest.mark.parametrize("packed", [False, True])
def test_self_test_tells_a_wrong_kernel(packed: bool) -> None:
    variant = fla.Variant(packed, state=packed, final=True)
    operator = fla.ShortConvolution(torch.bfloat16, torch.float32, 8, 4, bias=True, silu=True)
    case = operator.case(torch.device("cpu"), variant)
    assert fla.disagreement(torch_short_convolution, torch_short_convolution, case) == ""
    assert "the output" in fla.disagreement(_acausal, torch_short_convolution, case)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu(packed: bool) -> None:
    """Whatever runs there is right."""
    variant = fla.Variant(packed, state=packed, final=True)
    operator = fla.ShortConvolution(torch.bfloat16, torch.bfloat16, 64, 4, bias=True, silu=True)
    case = operator.case(torch.device("cuda"), variant)

    def run(x: Any, weight: Any, bias: Any, state: Any, silu: Any, cu: Any) -> Any:
        return short_convolution(x, weight, bias, silu=silu, initial_state=state, cu_seqlens=cu)

    assert fla.disagreement(run, torch_short_convolution, case) == ""
