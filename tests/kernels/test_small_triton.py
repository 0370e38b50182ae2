"""The memory-bound Triton kernels in the interpreter, in float32, against the plain torch forms."""

import pytest
import torch
from torch import Tensor

from megadiff.kernels import (
    cross_entropy_grad,
    cross_entropy_partials,
    rotary,
    rotary_cos_sin,
    swiglu,
)

pytest.importorskip("triton")
from megadiff.kernels import small_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def close(mine: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(mine.double(), exact, rtol=2e-6, atol=2e-6)


def test_swiglu() -> None:
    x, dy = random(3, 7, 2 * 1100), random(3, 7, 1100).detach()
    wide = x.detach().double().requires_grad_()
    out, exact = small_triton.swiglu(x), swiglu(wide)
    close(out, exact)
    close(torch.autograd.grad(out, x, dy)[0], torch.autograd.grad(exact, wide, dy.double())[0])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_rotary_of_views(interleaved: bool, per_row: bool) -> None:
    rows = random(2, 5, 3 * 16 + 16)
    positions = (
        torch.arange(10, device=DEVICE).view(2, 5) if per_row else torch.arange(5, device=DEVICE)
    )
    cos, sin = rotary_cos_sin(positions, 16)

    def run(operator, x: Tensor, *tables: Tensor) -> Tensor:
        q, k = x[..., :48].unflatten(-1, (3, 16)), x[..., 48:].unflatten(-1, (1, 16))
        return torch.cat(operator(q, k, *tables, interleaved), 2)

    wide = rows.detach().double().requires_grad_()
    out, exact = (
        run(small_triton.rotary, rows, cos, sin),
        run(rotary, wide, cos.double(), sin.double()),
    )
    close(out, exact)
    dy = torch.randn_like(out)
    close(torch.autograd.grad(out, rows, dy)[0], torch.autograd.grad(exact, wide, dy.double())[0])


def test_cross_entropy() -> None:
    logits = 10 * random(6, 5000).detach()
    labels = torch.tensor([100, 4099, 101, -100, 5090, 3000], device=DEVICE)
    dloss = torch.randn(6, device=DEVICE)
    mine = small_triton.cross_entropy_partials(logits, labels, 100, 4990)
    exact = cross_entropy_partials(logits.double(), labels, 100, 5090)
    for a, b in zip(mine, exact, strict=True):
        close(a, b)
    grad = torch.full_like(logits, torch.nan)
    small_triton.cross_entropy_grad(logits, labels, mine[0], mine[1], dloss, grad, 100, 4990)
    expected = cross_entropy_grad(
        logits.double(), labels, exact[0], exact[1], dloss.double(), 100, 5090
    )
    close(grad, expected)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_opcheck() -> None:
    x, dy = random(2, 3, 20), random(2, 3, 10).detach()
    torch.library.opcheck(small_triton.swiglu, (x,))
    torch.library.opcheck(small_triton.swiglu_backward, (x.detach(), dy))
    q, k = random(2, 5, 3, 16), random(2, 5, 1, 16)
    angles = rotary_cos_sin(torch.arange(5, device=DEVICE), 16)
    torch.library.opcheck(small_triton.turn, (q, k, *angles, True, 1.0))
    logits, labels = random(4, 50).detach(), torch.arange(4, device=DEVICE)
    torch.library.opcheck(small_triton.cross_entropy_partials, (logits, labels, 0, 40))
    rows = small_triton.cross_entropy_partials(logits, labels, 0, 40)[:2]
    grad, dloss = torch.empty_like(logits), torch.ones(4, device=DEVICE)
    torch.library.opcheck(
        small_triton.cross_entropy_grad, (logits, labels, *rows, dloss, grad, 0, 40)
    )


def test_gradient_over_the_logits() -> None:
    """The memory of the logits takes their gradient."""
    logits, labels = random(4, 50).detach(), torch.arange(4, device=DEVICE)
    maximum, total, _ = small_triton.cross_entropy_partials(logits, labels, 0, 50)
    arguments = (labels, maximum, total, torch.ones(4, device=DEVICE))
    apart = torch.empty_like(logits)
    small_triton.cross_entropy_grad(logits, *arguments, apart, 0, 50)
    small_triton.cross_entropy_grad(logits, *arguments, logits, 0, 50)
    assert torch.equal(logits, apart)
