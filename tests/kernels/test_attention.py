"""The attention operators against their definition, in float64."""

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megadiff.kernels import attention, diff_attention
from tests.kernels.cases import CASES, Case, by_loops, sees

DATA = Path(__file__).parents[1] / "data"
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both_backends = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def gradients(out: Tensor, inputs: tuple[Tensor, ...], seed: int = 1) -> tuple[Tensor, ...]:
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(out, inputs, dy.to(out.device, out.dtype))


@by_name
@both_backends
def test_equals_the_definition(case: Case, backend: str) -> None:
    inputs = case.inputs(torch.float64)
    out = diff_attention(*inputs, **case.call_options(), backend=backend)
    expected = by_loops(case, *inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@by_name
@both_backends
def test_standard_attention_is_the_first_branch(case: Case, backend: str) -> None:
    q, k, v, _ = case.inputs(torch.float64)
    if case.own_keys:
        k = k[..., 0::2, :]
    q1 = q[..., 0::2, :]
    out = attention(q1, k, v, **case.call_options(), backend=backend)
    both = torch.stack((q1, q1), -2).flatten(-3, -2)
    keys = torch.stack((k, k), -2).flatten(-3, -2) if case.own_keys else k
    expected = by_loops(case, both, keys, v, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@both_backends
@pytest.mark.parametrize("name", ["varlen", "window"])
def test_golden_values_of_flash_diff_attention(name: str, backend: str) -> None:
    """Values of microsoft/unilm PR 1633, whose value heads (2j, 2j + 1) are halves; no affine."""
    with np.load(DATA / f"flash_diff_attention_{name}.npz") as file:
        g = {key: torch.from_numpy(file[key]) for key in file.files}
    q, k, v = (g[x].requires_grad_() for x in "qkv")
    vectors = {x: g[f"param/lambda_{x}"].requires_grad_() for x in ("q1", "k1", "q2", "k2")}
    lambda_init = 0.8 - 0.6 * float(np.exp(-0.3 * g["depth"].item()))
    lam = (
        (vectors["q1"] * vectors["k1"]).sum().exp()
        - (vectors["q2"] * vectors["k2"]).sum().exp()
        + lambda_init
    )
    out = diff_attention(
        q,
        k,
        v.unflatten(1, (-1, 2)).flatten(2),
        lam,
        window=tuple(g["window"].tolist()),
        cu_seqlens_q=g["cu_seqlens"],
        norm_eps=1e-5,
        out_scale=1 - lambda_init,
        backend=backend,
    )
    out = out.unflatten(2, (2, -1)).flatten(1, 2)
    # the published class computes lambda and the norm in float32
    torch.testing.assert_close(out, g["y"], rtol=1e-5, atol=1e-6)
    wanted = [q, k, v, *vectors.values()]
    expected = [g["dq"], g["dk"], g["dv"], *(g[f"grad/lambda_{x}"] for x in vectors)]
    for mine, theirs in zip(torch.autograd.grad(out, wanted, g["dy"]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_weight", [False, True])
def test_scale_of_the_norm_is_not_rounded_to_16_bits(with_weight: bool) -> None:
    """The reference computes in float32: what 16-bit lambda and weight say is known exactly."""
    q, k, v, lam = (x.detach() for x in Case("scaled", pairs=3, groups=3).inputs(torch.bfloat16))
    weight = torch.linspace(0.5, 2, v.shape[-1]).bfloat16() if with_weight else None
    lam, options = lam.bfloat16(), {"norm_eps": 1e-5, "out_scale": 0.7, "backend": "reference"}
    out = diff_attention(q, k, v, lam, norm_weight=weight, **options)
    wide = None if weight is None else weight.float()
    inputs = (x.float() for x in (q, k, v, lam))
    exact = diff_attention(*inputs, norm_weight=wide, **options)
    assert torch.equal(out, exact.bfloat16())


@both_backends
def test_function_transforms(backend: str) -> None:
    q, k, v, lam = Case("transformed", pairs=3, groups=3).inputs(torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return diff_attention(q.detach(), k.detach(), v.detach(), x, backend=backend).sum()

    (expected,) = torch.autograd.grad(loss(lam), lam)
    torch.testing.assert_close(torch.func.grad(loss)(lam.detach()), expected)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type(dtype: torch.dtype, backend: str) -> None:
    case = next(case for case in CASES if case.name == "packed_empty_and_padding")
    inputs = case.inputs(dtype)
    out = diff_attention(*inputs, **case.call_options(), norm_eps=1e-5, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = diff_attention(*exact, **case.call_options(), norm_eps=1e-5, backend="reference")
    assert out.dtype == dtype
    # a dozen roundings of the type on the way to an output or a gradient
    tolerance = 12 * torch.finfo(dtype).eps
    for mine, theirs in zip(
        [out, *gradients(out, inputs)], [expected, *gradients(expected, tuple(exact))], strict=True
    ):
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()


def test_backends_are_named_and_refuse_with_the_reason() -> None:
    inputs = Case("refused").inputs(torch.float32)
    with pytest.raises(ValueError, match="'triton' cannot serve this call: it takes bfloat16"):
        diff_attention(*inputs, backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'flash'; known: auto, hopper"):
        diff_attention(*inputs, backend="flash")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("wide", d=192, d_v=200), "head widths 192 and 200 exceed 128 (q, k) and 256 (v)"),
        (Case("scale", options={"scale": 0.0}), "the softmax scale 0.0 is not positive"),
        (Case("empty", batch=0), "a tensor is empty"),
        (Case("cpu"), "the tensors are on the CPU"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_keeps_the_fused_kernel_away(
    case: Case, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, lam = case.inputs(torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(f"cannot serve this call: {reason}")):
        diff_attention(q, k, v, lam, **case.options, backend="triton")
    with pytest.raises(ValueError, match="'triton' does not serve attention; known: auto, ref"):
        attention(q, k, v.repeat_interleave(2, -2), backend="triton")


def test_shapes_that_form_no_pairs_are_refused() -> None:
    q, k, v, lam = Case("refused", pairs=3, groups=3).inputs(torch.float32)
    with pytest.raises(ValueError, match="5 query, 6 key and 3 value heads form no pairs"):
        diff_attention(q[:, :, :5], k, v, lam)
    with pytest.raises(ValueError, match=r"lam must be a scalar, \[3\] or \[2, 8, 3\]; got \[2\]"):
        diff_attention(q, k, v, lam[:2])
    with pytest.raises(ValueError, match="give norm_eps too"):
        diff_attention(q, k, v, lam, out_scale=0.2)
    for weight in (torch.ones(4), torch.ones(3, 8), torch.ones(())):
        with pytest.raises(ValueError, match=r"norm_weight must be \[8\]; got"):
            diff_attention(q, k, v, lam, norm_eps=1e-5, norm_weight=weight)
    with pytest.raises(ValueError, match="must have heads and a width"):
        diff_attention(q[..., :0], k[..., :0], v, lam)
    with pytest.raises(ValueError, match="must have heads and a width"):
        attention(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="seqused_k must be"):
        diff_attention(q, k, v, lam, seqused_k=torch.ones(3))


@pytest.mark.parametrize("name", ["window", "packed_empty_and_padding"])
def test_compiles_without_graph_breaks(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = case.inputs(torch.float64)

    def run(*tensors: Tensor) -> Tensor:
        return diff_attention(*tensors, **case.call_options(), norm_eps=1e-5)

    torch.compiler.reset()  # lengths stay constants, which is quicker to trace
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    expected = run(*inputs)
    torch.testing.assert_close(compiled, expected)
    for mine, theirs in zip(gradients(compiled, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


@both_backends
@pytest.mark.parametrize("name", ["packed_empty_and_padding", "seqused_window", "v2_groups"])
def test_gradients_with_the_norm_are_those_of_finite_differences(name: str, backend: str) -> None:
    case = next(case for case in CASES if case.name == name)
    weight = torch.rand(case.d_v, dtype=torch.float64, requires_grad=True)

    def run(*tensors: Tensor) -> Tensor:
        options = case.call_options() | {"norm_eps": 1e-2, "out_scale": 0.7}
        return diff_attention(*tensors[:4], norm_weight=tensors[4], **options, backend=backend)

    assert torch.autograd.gradcheck(run, (*case.inputs(torch.float64), weight), fast_mode=True)


@both_backends
@pytest.mark.parametrize("needed", range(5))
def test_one_input_alone_may_need_a_gradient(needed: int, backend: str) -> None:
    case = next(case for case in CASES if case.name == "prefill_seqused")
    inputs = (*case.inputs(torch.float64), torch.rand(4, dtype=torch.float64, requires_grad=True))
    results = []
    for leaves in (inputs, tuple(x.detach() for x in inputs)):
        leaves[needed].requires_grad_()
        options = case.call_options() | {"norm_weight": leaves[4], "norm_eps": 1e-5}
        out = diff_attention(*leaves[:4], **options, backend=backend)
        results.append(gradients(out, (leaves[needed],))[0])
    assert results[0].any() and torch.equal(*results)


@both_backends
@pytest.mark.parametrize(
    "name", ["more_queries", "decode_seqused", "packed_empty_and_padding", "packed_two_lengths"]
)
def test_rows_without_keys_give_and_pass_exactly_nothing(name: str, backend: str) -> None:
    """Nor do keys that no query sees get any gradient."""
    case = next(case for case in CASES if case.name == name)
    q, k, v, lam = case.inputs(torch.float32)
    n_k = k.shape[-3]
    rows = range(1 if case.packed else case.batch)
    seen = torch.tensor(
        [[[sees(case, b, i, j) for j in range(n_k)] for i in range(case.n_q)] for b in rows]
    )
    blind, unseen = (~seen.any(axis) for axis in (2, 1))
    blind, unseen = (x[0] if case.packed else x for x in (blind, unseen))
    assert blind.any()
    out = diff_attention(q, k, v, lam, **case.call_options(), norm_eps=1e-5, backend=backend)
    dq, dk, dv, dlam = gradients(out, (q, k, v, lam))
    assert not out[blind].any() and not dq[blind].any()
    assert not dk[unseen].any() and not dv[unseen].any()
    assert case.lam != "tokens" or not dlam[blind].any()


@pytest.mark.parametrize("scale", [0.0, -1.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    case = Case("scale", options={"scale": scale})
    inputs = case.inputs(torch.float64)
    out, expected = diff_attention(*inputs, scale=scale, backend="sdpa"), by_loops(case, *inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@both_backends
def test_lambda_may_be_of_another_type(backend: str) -> None:
    q, k, v, lam = Case("lambda").inputs(torch.float32)
    out = diff_attention(q, k, v, lam.double(), backend=backend)
    assert torch.equal(out, diff_attention(q, k, v, lam, backend=backend))


def test_auto_says_once_what_runs_and_why(caplog: pytest.LogCaptureFixture) -> None:
    operators = import_module("megadiff.kernels.attention")
    operators._say_once.cache_clear()
    inputs = Case("said").inputs(torch.float32)
    with caplog.at_level("INFO", logger="megadiff"):
        for _ in range(2):
            diff_attention(*inputs)
    assert caplog.messages == ["diff_attention runs on backend sdpa: the tensors are on the CPU"]


def test_torch_kernels_that_are_not_deterministic_are_refused_as_such() -> None:
    operators = import_module("megadiff.kernels.attention")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert "not deterministic" in (operators._why_not_sdpa(on_gpu, True, True) or "")
    for needs_grad, deterministic in ((False, True), (True, False)):
        assert operators._why_not_sdpa(on_gpu, needs_grad, deterministic) is None


def test_what_torch_kernels_keep_for_the_backward() -> None:
    """Both branches' outputs and the statistics, in the half type; lambda besides."""
    inputs = Case("kept", n_q=64, d=64, own_keys=False, d_v=64, lam="tokens").inputs(torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = diff_attention(*inputs, backend="sdpa")
    for x in inputs:
        kept.pop(x.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= 2.2 * out.nbytes
