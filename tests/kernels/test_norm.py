import pytest
import torch

from megadiff.kernels import layer_norm, rms_norm


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine: bool) -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if affine else None
    out = rms_norm(x, weight, 1e-3)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-3)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    inputs = [x] if weight is None else [x, weight]
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, eps=1e-3), inputs)


def test_norms_of_half_precision_are_rounded_once() -> None:
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    exact = rms_norm(x.double(), weight.double())
    assert torch.equal(rms_norm(x, weight), exact.bfloat16())
    exact = layer_norm(x.double(), weight.double(), weight.double())
    # float32 arithmetic can land on the other side of a rounding boundary, by one unit
    torch.testing.assert_close(layer_norm(x, weight, weight).double(), exact, rtol=2**-8, atol=1e-6)


def test_layer_norm_without_affine() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    torch.testing.assert_close(layer_norm(x), expected)
