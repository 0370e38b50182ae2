"""When the Hopper kernels are chosen, and what they say when they are not. On a GPU of that
generation also their results; that they compile is checked wherever their Triton is installed."""

from importlib import import_module

import pytest
import torch

from megadiff.kernels import hopper
from megadiff.kernels.attention import _choose, diff_attention
from megadiff.kernels.geometry import Geometry
from tests.kernels.cases import Case

V1 = {"d": 64, "d_v": 128}


def reason(monkeypatch: pytest.MonkeyPatch, case: Case, **more) -> str | None:
    """What keeps the kernels from a case on a card that could run them."""
    monkeypatch.setattr(hopper, "_why_not_here", lambda *_: None)
    q, k, v, _ = case.inputs(more.get("dtype", torch.bfloat16))
    geometry = more.get("geometry", Geometry(right=0))
    return hopper.why_not(q, k, v, more.get("scale", 0.1), geometry)


def test_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for d, d_v, own_keys in hopper.WIDTHS:
        case = Case("served", d=d, d_v=d_v, own_keys=own_keys, pairs=4)
        assert reason(monkeypatch, case) is None
        assert reason(monkeypatch, case, geometry=Geometry()) is None


def test_what_they_do_not_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("refused", **V1)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    for expected, more in {
        "bfloat16": {"dtype": torch.float16},
        "packed": {"geometry": Geometry(right=0, cu_seqlens_q=cu, cu_seqlens_k=cu)},
        "seqused_k": {"geometry": Geometry(right=0, seqused_k=torch.ones(2))},
        "window": {"geometry": Geometry(left=4, right=0)},
        "positive": {"scale": 0.0},
    }.items():
        assert expected in (reason(monkeypatch, case, **more) or ""), expected
    assert "heads of 64 and 128" in (reason(monkeypatch, Case("narrow", d=32, d_v=64)) or "")
    assert "empty" in (reason(monkeypatch, Case("none", n_q=0, n_k=3, **V1)) or "")


def test_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hopper._why_not_here
    monkeypatch.setattr(hopper, "_installed", lambda: "3.6.1")
    assert here("cuda", (9, 0)) is None
    assert "8.0, not 9.0" in (here("cuda", (8, 0)) or "")
    assert "NVIDIA GPU" in (here("cpu", (0, 0)) or "")
    monkeypatch.setattr(hopper, "_installed", lambda: "3.7.1")
    assert here("cuda", (9, 0)) == "it is written for Triton 3.6, and 3.7.1 is installed"


def test_auto_takes_them_where_it_can_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    module = import_module(_choose.__module__)
    monkeypatch.setattr(module, "_say_once", lambda *what: said.append(what))

    def choose(device: str, no_hopper: str | None, no_triton: str | None = None) -> str:
        geometry = Geometry(right=0, max_seqlen_q=100)
        return _choose("auto", device, geometry, True, no_hopper, no_triton, None)

    assert choose("cuda", None) == "hopper"
    assert choose("cuda", "a window is given") == "triton"
    assert choose("cuda", "a window is given", "it takes bfloat16") == "sdpa"
    assert choose("cpu", "no GPU") == "sdpa"
    assert [reason for *_, reason in said] == [
        "",
        "hopper is not possible, a window is given",
        "triton is not possible, it takes bfloat16",
        "the tensors are on the CPU",
    ]


def test_a_named_backend_that_cannot_serve_refuses() -> None:
    with pytest.raises(ValueError, match="'hopper' cannot serve this call"):
        diff_attention(*Case("cpu", **V1).inputs(torch.bfloat16), backend="hopper")


needs_triton = pytest.mark.skipif(
    not (hopper._installed() or "").startswith(hopper.TRITON + "."),
    reason=f"the kernels are written for Triton {hopper.TRITON}",
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("widths", hopper.WIDTHS)
def test_they_compile_without_spills(widths: tuple[int, int, bool]) -> None:
    from tests.kernels.test_sm90 import compiled

    d, d_v, own_keys = widths
    for report in compiled(d, d_v, int(own_keys), 1, 0, 1):
        assert report["shared"] <= 232448, report
        assert report["stack"] <= 64 or not report["gluon"], report
        without = ("preprocess", "sum_parts")
        assert report["wgmma"] > 0 or report["kernel"] in without, report


@pytest.mark.slow  # with them
@needs_triton
def test_programs_share_a_query_group_where_the_gpu_would_be_idle() -> None:
    """A causal call of 4096 tokens has 32 blocks of keys."""
    from megadiff.kernels.hopper.launch import _parts

    assert _parts(32 * 4, 8, causal=True) == 4  # one sequence, 4 groups of 8 pairs
    assert _parts(32 * 4, 3, causal=True) == 3
    assert _parts(32 * 4, 1, causal=True) == 1
    assert _parts(32 * 8, 4, causal=True) == 1
    assert _parts(32 * 4, 4, causal=False) == 1
    assert _parts(32 * 2, 4, causal=False) == 2


GEOMETRIES = {
    "even": {"n_q": 512, "batch": 2},
    "odd": {"n_q": 333, "batch": 3, "lam": "tokens"},
    "full": {"n_q": 320, "batch": 2, "lam": "scalar", "options": {"causal": False}},
    "full_other_keys": {"n_q": 300, "n_k": 421, "options": {"causal": False}},
    "more_keys": {"n_q": 65, "n_k": 421, "lam": "tokens"},
    "more_queries": {"n_q": 421, "n_k": 300},
    "one_query": {"n_q": 1, "n_k": 70},
}
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available()
    or hopper._why_not_here("cuda", torch.cuda.get_device_capability()) is not None,
    reason="needs a Hopper GPU and the Triton that the kernels are written for",
)


def gpu_case(name: str, widths: tuple[int, int, bool]) -> Case:
    d, d_v, own_keys = widths
    shape = {"pairs": 4, "groups": 2, "batch": 1, "lam": "heads", "d": d, "d_v": d_v}
    return Case(f"{name}_{d}_{d_v}", own_keys=own_keys, **shape | GEOMETRIES[name])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("widths", hopper.WIDTHS)
def test_results(widths: tuple[int, int, bool], geometry: str, norm: bool) -> None:
    from tests.kernels.test_diff_triton import check

    check(gpu_case(geometry, widths), norm, backend="hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("geometry", ["even", "odd", "full_other_keys"])
@pytest.mark.parametrize("widths", hopper.WIDTHS)
def test_one_program_for_all_pairs_of_a_group(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int, bool], geometry: str
) -> None:
    """As in a large call; these small ones would share them."""
    from megadiff.kernels.hopper import launch
    from tests.kernels.test_diff_triton import check

    monkeypatch.setattr(launch, "_parts", lambda *_: 1)
    check(gpu_case(geometry, widths), False, backend="hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("widths", hopper.WIDTHS)
def test_views_long_sequences_and_equal_bits(widths: tuple[int, int, bool]) -> None:
    """Sections of one projection, 20 times the same; as the Triton kernels, whose P is float32."""
    d, d_v, own_keys = widths
    sizes = [8 * d, (4 if own_keys else 2) * d, 2 * d_v]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(2, 1500, sum(sizes), device="cuda", generator=generator).bfloat16()
    rows.requires_grad_()
    lam = torch.rand(2, 1500, 4, device="cuda", generator=generator).requires_grad_()
    dy = torch.randn(2, 1500, 4, d_v, device="cuda", generator=generator).bfloat16()

    def run(backend: str) -> list[torch.Tensor]:
        parts = rows.split(sizes, -1)
        q, k, v = (x.unflatten(-1, (-1, w)) for x, w in zip(parts, (d, d, d_v), strict=True))
        out = diff_attention(q, k, v, lam, norm_eps=1e-5, backend=backend)
        return [out, *torch.autograd.grad(out, (rows, lam), dy)]

    first = run("hopper")
    for mine, theirs in zip(first, run("triton"), strict=True):
        # both are rounded to bfloat16 on the way: P, dS and the results, about 2^-9 each
        assert (mine.float() - theirs.float()).norm() <= 4 * 2**-9 * theirs.float().norm()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run("hopper"), first, strict=True))


@pytest.mark.gpu
@on_hopper
def test_nan_of_one_row_of_the_batch_stays_there() -> None:
    """A block that reaches past the end of a row does not read the next one."""
    q, k, v, lam = Case("poison", n_q=77, batch=2, **V1).inputs(torch.bfloat16, device="cuda")
    alone = [x[:1].detach().requires_grad_() for x in (q, k, v)]
    poisoned = [x.detach().clone() for x in (q, k, v)]
    for x in poisoned:
        x[1] = torch.nan
        x.requires_grad_()
    for causal in (True, False):
        out = diff_attention(*poisoned, lam, causal=causal, backend="hopper")
        expected = diff_attention(*alone, lam, causal=causal, backend="hopper")
        grads = torch.autograd.grad(out[0].float().sum(), poisoned)
        wanted = torch.autograd.grad(expected.float().sum(), alone)
        assert torch.equal(out[:1], expected)
        assert all(torch.equal(a[:1], b) for a, b in zip(grads, wanted, strict=True))
