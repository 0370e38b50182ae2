"""Plausible mistakes must fail: each mutant of the operator is caught by the check it would
meet."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megadiff.kernels import diff_attention
from tests.kernels.cases import Case, by_loops

Operator = Callable[..., Tensor]


def halves_paired(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **options) -> Tensor:
    """Heads (i, i + h) taken for a pair, instead of (2i, 2i + 1)."""
    order = torch.arange(q.shape[-2]).view(2, -1).t().flatten()
    return diff_attention(q[..., order, :], k, v, lam, **options)


def keys_repeated_naively(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **options) -> Tensor:
    """Query head j reads key head j // n of all key heads, so that both branches can read the
    same."""
    repeats = q.shape[-2] // k.shape[-2]
    v = v.repeat_interleave(repeats, dim=-2)
    return diff_attention(q, k.repeat_interleave(repeats, dim=-2), v, lam, **options)


def lambda_rounded(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **options) -> Tensor:
    return diff_attention(q, k, v, lam.to(q.dtype), **options)


def subtracted_after_rounding(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **options) -> Tensor:
    """Each branch in the half type, and the difference in it."""
    second = diff_attention(q, k, v, torch.zeros_like(lam), **options)
    both = diff_attention(q, k, v, torch.ones_like(lam), **options)
    return second - lam.to(q.dtype)[:, None] * (second - both)


def factor_dropped(*args: Tensor, out_scale: float, **options) -> Tensor:
    return diff_attention(*args, **options)


def check_definition(operator: Operator) -> None:
    case = Case("groups", n_q=5, pairs=4, groups=2)
    inputs = case.inputs(torch.float64)
    torch.testing.assert_close(operator(*inputs), by_loops(case, *inputs))


def check_lambda(operator: Operator) -> None:
    """Values of one in bfloat16 with lambda near 1: the rounding of lambda would be seen."""
    q, k, v, _ = Case("ones", n_q=3).inputs(torch.bfloat16)
    lam = torch.tensor([0.99371, 1.0021])
    out = operator(q, k, torch.ones_like(v), lam, backend="reference")
    exact = (1 - lam)[:, None].expand(out.shape).bfloat16()
    torch.testing.assert_close(out, exact, rtol=2**-7, atol=1e-6)


def check_epilogue(operator: Operator) -> None:
    case = Case("norm", n_q=5)
    inputs = case.inputs(torch.float64)
    o = by_loops(case, *inputs)
    expected = 0.3 * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(operator(*inputs, norm_eps=1e-5, out_scale=0.3), expected)


MUTANTS = [
    (check_definition, halves_paired),
    (check_definition, keys_repeated_naively),
    (check_lambda, lambda_rounded),
    (check_lambda, subtracted_after_rounding),
    (check_epilogue, factor_dropped),
]


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_mutants_are_caught(check: Callable[[Operator], None], mutant: Operator) -> None:
    check(diff_attention)
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize("lam", [0.0, 1.0, -2.5, 40.0])
def test_values_of_one_give_one_minus_lambda(lam: float) -> None:
    q, k, v, _ = Case("ones", n_q=4).inputs(torch.float64)
    for backend in ("reference", "sdpa"):
        out = diff_attention(q, k, torch.ones_like(v), torch.tensor(lam), backend=backend)
        assert math.isclose(out.min().item(), 1 - lam, rel_tol=1e-6, abs_tol=1e-12)
        assert math.isclose(out.max().item(), 1 - lam, rel_tol=1e-6, abs_tol=1e-12)
