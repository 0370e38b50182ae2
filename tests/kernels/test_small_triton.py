"""The memory-bound Triton kernels in the interpreter, in float32, against the plain torch forms."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megadiff.kernels import (
    add_rms_norm,
    cross_entropy_grad,
    cross_entropy_partials,
    rotary_cos_sin,
    split_rotary,
    swiglu,
)
from megadiff.kernels.device import is_plain_call, on_triton

pytest.importorskip("triton")
from megadiff.kernels import norm_triton, small_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int) -> Tensor:
    """Not contiguous."""
    *rows, columns = shape
    return torch.randn(*rows, 2 * columns, device=DEVICE)[..., ::2].requires_grad_()


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
@pytest.mark.parametrize("width", [16, 24])
def test_split_rotary(interleaved: bool, per_row: bool, width: int) -> None:
    """Two query heads, one key head, other columns behind them, and padding."""
    widths = [2 * width, width, width, 5]
    rows = random(2, 5, sum(widths) + 3)
    at = torch.arange(10, device=DEVICE).view(2, 5) if per_row else torch.arange(5, device=DEVICE)
    cos, sin = (x.repeat_interleave(2, -1)[..., ::2] for x in rotary_cos_sin(at, width))
    wide = rows.detach().double().requires_grad_()
    exact = split_rotary(wide, widths, cos.double(), sin.double(), interleaved)
    mine = small_triton.split_rotary(rows.clone(), widths, cos, sin, interleaved)
    dy = [random(*x.shape).detach() for x in mine]
    got = torch.autograd.grad(mine, rows, dy)[0]
    wanted = torch.autograd.grad(exact, wide, [d.double() for d in dy])[0]
    for a, b in zip([*mine, got], [*exact, wanted], strict=True):
        close(a, b)
    assert not got[..., sum(widths) :].any()


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


def test_whoever_watches_operators_sees_those_of_torch() -> None:
    """A compiler, a mode, a transform or a subclass does not see what Triton launches."""
    x = random(2, 20)
    assert is_plain_call(x, torch.nn.Parameter(x.detach()))
    assert on_triton(x) == (DEVICE == "cuda")
    seen: list[bool] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        seen.append(is_plain_call(x))
        on_gpu = torch.empty(2, 20, device="cuda")
    assert on_gpu.is_cuda and not on_triton(on_gpu)
    seen.append(is_plain_call(FakeTensorMode().from_tensor(x)))
    torch.func.vmap(lambda row: seen.append(is_plain_call(row)) or row)(x)
    compiled = torch.compile(lambda y: y if is_plain_call(y) else 2 * y, backend="eager")
    assert torch.equal(compiled(x), 2 * x)
    assert seen == [False, False, False]


def test_turning_in_place_is_told_to_autograd() -> None:
    y = random(2, 5, 3 * 16).clone()
    squared = y * y
    small_triton.split_rotary(
        y, [16, 16, 16], *rotary_cos_sin(torch.arange(5, device=DEVICE), 16), True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_gradient_over_the_logits() -> None:
    """The memory of the logits takes their gradient, and autograd is told."""
    logits, labels = random(4, 50).detach().contiguous(), torch.arange(4, device=DEVICE)
    maximum, total, _ = small_triton.cross_entropy_partials(logits, labels, 0, 50)
    arguments = (labels, maximum, total, torch.ones(4, device=DEVICE))
    apart = torch.empty_like(logits)
    small_triton.cross_entropy_grad(logits, *arguments, apart, 0, 50)
    before = logits._version
    small_triton.cross_entropy_grad(logits, *arguments, logits, 0, 50)
    assert torch.equal(logits, apart) and logits._version > before


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_with_the_residual_sum(added: bool, weighted: bool) -> None:
    """Also where only one of the two results is used."""
    x, weight = random(2, 3, 1100), random(1100) if weighted else None
    y = random(2, 3, 1100) if added else None
    given = [t for t in (x, y, weight) if t is not None]
    exact_given = [t.detach().double().requires_grad_() for t in given]
    rest = list(exact_given)
    wide = [None if t is None else rest.pop(0) for t in (x, y, weight)]
    mine = norm_triton.add_rms_norm(x, y, weight, 1e-5)
    exact = add_rms_norm(*wide, 1e-5)  # type: ignore[arg-type]
    for used in ([0, 1], [1], [0]):
        dy = [random(2, 3, 1100).detach() for _ in used]
        wide_dy, n = [d.double() for d in dy], 1 + added if used == [0] else len(given)
        got, wanted = (
            torch.autograd.grad([out[i] for i in used], leaves[:n], d, retain_graph=True)
            for out, leaves, d in ((mine, given, dy), (exact, exact_given, wide_dy))
        )
        for a, b in zip([*mine, *got], [*exact, *wanted], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
