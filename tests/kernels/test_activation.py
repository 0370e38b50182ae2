import torch

from megadiff.kernels import swiglu


def test_swiglu() -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(swiglu(x), gate / (1 + torch.exp(-gate)) * up)
    assert torch.autograd.gradcheck(swiglu, (x,))
    half = torch.randn(100, 64).bfloat16()
    torch.testing.assert_close(swiglu(half), swiglu(half.double()).bfloat16(), rtol=2**-7, atol=0)
