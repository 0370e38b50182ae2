"""The operators on a CUDA GPU, at the widths and tile shapes that are really used: `make
test-gpu`."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from megadiff.kernels import (
    attention,
    diff_attention,
    rms_norm,
    rotary_cos_sin,
    split_rotary,
    swiglu,
)
from megadiff.parallel.loss import vocab_parallel_cross_entropy
from megadiff.parallel.mesh import Axis
from tests.kernels.cases import Case
from tests.kernels.test_diff_triton import check

pytestmark = pytest.mark.gpu

WIDTHS = [
    (16, 32, True),
    (32, 64, True),
    (64, 64, True),
    (64, 128, True),
    (96, 96, True),
    (96, 192, True),
    (128, 128, True),
    (128, 256, True),
    (16, 16, False),
    (32, 32, False),
    (64, 64, False),
    (96, 96, False),
    (128, 128, False),
    (128, 256, False),
]
GEOMETRIES = {
    "even": {"n_q": 512, "batch": 2},
    "odd": {"n_q": 333},
    "not_causal": {"n_q": 300, "n_k": 421, "options": {"causal": False}},
    "more_queries": {"n_q": 421, "n_k": 300},
    "more_keys": {"n_q": 210, "n_k": 421},
    "window": {"n_q": 700, "options": {"window": (150, 0)}},
    "window_two_sides": {"n_q": 400, "options": {"window": (64, 50), "causal": False}},
    "packed": {
        "n_q": 700,
        "options": {"cu_seqlens_q": [0, 0, 129, 130, 130, 500, 650], "max_seqlen_q": 370},
    },
    "packed_window": {"n_q": 512, "options": {"cu_seqlens_q": [0, 256, 512], "window": (99, 0)}},
    "seqused": {"n_q": 65, "n_k": 300, "batch": 3, "options": {"seqused_k": [300, 190, 7]}},
    "decode": {"n_q": 1, "n_k": 300, "batch": 3, "options": {"seqused_k": [300, 190, 0]}},
}


def gpu_case(name: str, d: int, d_v: int, own_keys: bool, **more) -> Case:
    lam = "heads" if own_keys else "tokens"
    shape = {"pairs": 4, "groups": 2, "batch": 1, "lam": lam, "d": d, "d_v": d_v}
    return Case(f"{name}_{d}_{d_v}", own_keys=own_keys, **shape | GEOMETRIES[name] | more)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_fused(widths: tuple[int, int, bool], geometry: str, norm: bool) -> None:
    check(gpu_case(geometry, *widths), norm)


@pytest.mark.parametrize("widths", [(64, 128, True), (128, 256, True), (128, 128, False)])
def test_fused_in_float16(widths: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.test_diff_triton.HALF", torch.float16)
    check(gpu_case("odd", *widths), norm=True)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("widths", [(64, 128, True), (128, 128, False), (64, 64, True)])
def test_sdpa(widths: tuple[int, int, bool], geometry: str) -> None:
    check(gpu_case(geometry, *widths), norm=False, backend="sdpa")


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_sdpa_with_key_lengths_and_one_gradient(needed: int) -> None:
    """Torch's kernel for key lengths has no backward that knows them."""
    case = gpu_case("seqused", 64, 64, False)
    q, k, v, lam = (x.detach() for x in case.inputs(torch.bfloat16, device="cuda"))
    options = case.call_options("cuda")
    grads = []
    for backend, dtype in (("sdpa", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype) for x in (q, k, v)]
        leaves[needed].requires_grad_()
        out = diff_attention(*leaves, lam, **options, backend=backend)
        (grad,) = torch.autograd.grad(out, leaves[needed], torch.ones_like(out))
        grads.append(grad.double())
    assert (grads[0] - grads[1]).norm() <= 0.02 * grads[1].norm()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sdpa_in_wide_types(dtype: torch.dtype, geometry: str) -> None:
    """Sums of up to 512 products, rounded in any order: a few hundred roundings at the most."""
    case = gpu_case(geometry, 64, 128, True)
    inputs, options = case.inputs(dtype, device="cuda"), case.call_options("cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = diff_attention(*inputs, **options, backend="sdpa")
    expected = diff_attention(*exact, **options, backend="reference")
    dy = torch.randn_like(expected)
    mine = [out, *torch.autograd.grad(out, inputs, dy.to(dtype))]
    dy = dy.to(dtype).double()
    for a, b in zip(mine, [expected, *torch.autograd.grad(expected, exact, dy)], strict=True):
        assert (a.double() - b).norm() <= 200 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_standard_attention(geometry: str) -> None:
    case = gpu_case(geometry, 64, 64, False)
    q, k, v, _ = case.inputs(torch.bfloat16, device="cuda")
    options = case.call_options("cuda")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, expected = attention(q, k, v, **options), attention(*exact, **options, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.03)
    dy = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dy)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, exact, dy.double()), strict=True):
        assert (mine.double() - theirs).norm() <= 0.01 * theirs.norm() + 1e-3


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_an_integer_as_scale_leaves_later_calls_alone(
    backend: Literal["triton", "auto"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel compiled for the integer 1 would be kept for every other number."""
    case = gpu_case("even", 64, 128, True)
    q, k, v, lam = (x.detach() for x in case.inputs(torch.bfloat16, device="cuda"))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(one: float) -> list[Tensor]:
        monkeypatch.setattr("megadiff.kernels.diff_launch._compiled", {})
        found: list[Tensor] = []
        for scale, factor in ((one, one), (0.125, 0.5)):
            options = {"scale": scale, "norm_eps": one, "out_scale": factor, "deterministic": True}
            options |= case.call_options("cuda")
            out = diff_attention(q, k, v, lam, **options, backend=backend)
            found += torch.autograd.grad(out, leaves, torch.ones_like(out))
        return found

    for of_integer, of_float in zip(gradients(1), gradients(1.0), strict=True):
        assert torch.equal(of_integer, of_float)


def test_queries_of_a_part_of_the_sequence_hold_no_mask() -> None:
    """As under context parallelism: the last quarter of the queries, all keys."""
    q = torch.randn(1, 2048, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 8192, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(q, k, k)
    assert sum(kept.values()) < 1.5 * (2 * q.nbytes + 2 * k.nbytes)


def test_many_runs_are_equal_bit_for_bit() -> None:
    inputs = gpu_case("odd", 128, 256, True, n_q=1500).inputs(torch.bfloat16, device="cuda")
    first: list[Tensor] = []
    for _ in range(50):
        out = diff_attention(*inputs, norm_eps=1e-5, deterministic=True, backend="triton")
        results = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_cuda_graph(backend: Literal["triton", "auto"]) -> None:
    inputs = gpu_case("odd", 64, 128, True).inputs(torch.bfloat16, device="cuda")

    def step() -> list[Tensor]:
        out = diff_attention(*inputs, norm_eps=1e-5, backend=backend)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for mine, theirs in zip(captured, step(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_compiled_with_inductor(backend: Literal["triton", "auto"]) -> None:
    inputs = gpu_case("odd", 64, 128, True).inputs(torch.bfloat16, device="cuda")

    def run(*tensors: Tensor) -> Tensor:
        return 2 * diff_attention(*tensors, norm_eps=1e-5, backend=backend)

    compiled, expected = torch.compile(run, fullgraph=True)(*inputs), run(*inputs)
    assert torch.equal(compiled, expected)
    dy = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(compiled, inputs, dy),
        torch.autograd.grad(expected, inputs, dy),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_more_than_two_to_the_31_elements() -> None:
    """The last document of 2^20 + 2048 tokens equals the same document alone."""
    tokens, last, pairs, d = 2**20 + 2048, 1024, 16, 64
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(
            tokens, heads, width, device="cuda", dtype=torch.bfloat16, generator=generator
        )

    q, k, v = random(2 * pairs, d), random(2 * pairs, d), random(pairs, 2 * d)
    assert q.numel() > 2**31
    cu = torch.arange(0, tokens + 1, last, device="cuda", dtype=torch.int32)
    lam = torch.tensor(0.4, device="cuda", requires_grad=True)
    for x in (q, k, v):
        x.requires_grad_()
    out = diff_attention(q, k, v, lam, cu_seqlens_q=cu, max_seqlen_q=last, backend="triton")
    out.backward(torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(out))
    alone = [x.detach()[None, -last:].requires_grad_() for x in (q, k, v)]
    expected = diff_attention(*alone, lam, backend="triton")
    grads = torch.autograd.grad(expected, alone, torch.ones_like(expected))
    assert torch.equal(out[-last:], expected[0])
    for x, theirs in zip((q, k, v), grads, strict=True):
        assert x.grad is not None and torch.equal(x.grad[-last:], theirs[0])


def test_memory_is_linear_in_the_sequence() -> None:
    peaks = []
    for n in (4096, 8192):
        inputs = gpu_case("even", 64, 128, True, n_q=n, batch=1).inputs(
            torch.bfloat16, device="cuda"
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        diff_attention(*inputs, norm_eps=1e-5, backend="triton").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.1 * peaks[0]


def test_small_kernels() -> None:
    """The Triton ones against float64, outputs and gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, device="cuda", generator=generator)
        return x.bfloat16().requires_grad_()

    cos, sin = rotary_cos_sin(torch.arange(300, device="cuda"), 64)
    labels = torch.randint(0, 1000, (2, 300), device="cuda", generator=generator)
    for operator, inputs in (
        (lambda x, w: rms_norm(x, w), (random(2, 300, 256), random(256))),
        (swiglu, (random(2, 300, 512),)),
        (
            lambda y: torch.cat(split_rotary(y.clone(), [256, 128, 128], cos, sin), -1),
            (random(2, 300, 576),),
        ),
        (
            lambda x: vocab_parallel_cross_entropy(x.clone(), labels, 1000, Axis()),
            (random(2, 300, 1024),),
        ),
    ):
        exact = [x.detach().double().requires_grad_() for x in inputs]
        out, expected = operator(*inputs), operator(*exact)
        dy = torch.randn(out.shape, device="cuda", generator=generator).to(out.dtype)
        mine = [out, *torch.autograd.grad(out, inputs, dy)]
        theirs = [expected, *torch.autograd.grad(expected, exact, dy.double())]
        for a, b in zip(mine, theirs, strict=True):
            assert (a.double() - b).norm() <= 2**-8 * b.norm() * math.sqrt(2)
