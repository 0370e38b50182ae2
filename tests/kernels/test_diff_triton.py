"""The fused kernels against the float64 oracle: in Triton's interpreter, and on a GPU (`-m gpu`).

The interpreter computes no bfloat16, so it is given float16. Tolerance, for every output and
gradient, is flash attention's: twice the error of the same formula in the half type, plus the
rounding of a value of size 0.3."""

import zlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megadiff.kernels import diff_attention, rms_norm
from megadiff.kernels.geometry import make_geometry, visibility
from megadiff.kernels.reference import probabilities
from tests.kernels.cases import CASES, V2, Case

pytest.importorskip("triton")
from megadiff.kernels import diff_launch, diff_triton
from megadiff.kernels.diff_launch import Tile, Tiles

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16
# the interpreter computes on statistics of rows outside before it discards them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIDE = {"d": 16, "d_v": 32}
SEVERAL_BLOCKS = [
    Case("groups", n_q=50, pairs=4, groups=2, batch=1, lam="tokens", **WIDE),
    Case("v2_groups", n_q=50, pairs=4, groups=2, batch=1, **V2 | {"d": 16, "d_v": 16}),
    Case("window", n_q=61, pairs=1, groups=1, batch=2, options={"window": (20, 0)}, **WIDE),
    Case(
        "window_two_lengths",
        n_q=50,
        n_k=60,
        batch=1,
        pairs=1,
        groups=1,
        options={"window": (20, 13), "causal": False},
        **WIDE,
    ),
    Case(
        "packed",
        n_q=90,
        groups=1,
        lam="tokens",
        options={"cu_seqlens_q": [0, 30, 30, 31, 80, 82], "max_seqlen_q": 49},
        **WIDE,
    ),
    Case("seqused", n_q=40, n_k=90, lam="scalar", options={"seqused_k": [60, 35]}, **WIDE),
    Case("not_causal", n_q=48, n_k=64, batch=1, options={"causal": False}, **WIDE),
]
# Each of them with the forward that fits it; a GPU runs all with both.
INTERPRETED = {
    "joint": ("groups", "v2_groups", "window_two_lengths", "not_causal"),
    "in_turn": ("groups", "window", "packed", "seqused"),
}
INTERPRETED_OPTIONS = (
    "v1_one_group_odd_length",
    "window_both_sides",
    "more_queries_window",
    "decode_seqused",
    "packed_empty_and_padding",
    "packed_two_lengths",
    "packed_seqused",
)
SMALL_TILES = {
    "joint": Tiles(True, Tile(16, 32, 4, 1, 2), Tile(32, 16, 4, 1, 2), None, Tile(16, 32, 4, 1, 3)),
    "in_turn": Tiles(
        False,
        Tile(32, 16, 4, 1, 3),
        Tile(16, 32, 4, 1, 2),
        Tile(32, 16, 4, 1, 2),
        Tile(32, 16, 4, 1, 3),
    ),
}


def in_half(
    case: Case, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, weight: Tensor | None, norm: dict
) -> Tensor:
    """The plain formula in the half type, maps and all."""
    options = {"causal": True, "window": None} | case.call_options(q.device.type)
    scale = options.pop("scale", case.d**-0.5)
    rest = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
    geometry = make_geometry(q, k, **{name: options.get(name) for name in rest} | options)
    mask = visibility(geometry, q.shape[-3], k.shape[-3], q.device)
    if case.packed:
        q, k, v = q[None], k[None], v[None]
        lam = lam[None] if lam.dim() == 2 else lam
    k1, k2 = (k[:, :, 0::2], k[:, :, 1::2]) if case.own_keys else (k, k)
    p1 = probabilities(q[:, :, 0::2], k1, scale, mask)
    p2 = probabilities(q[:, :, 1::2], k2, scale, mask)
    weights = lam.transpose(1, 2) if lam.dim() == 3 else lam.expand(case.pairs)[:, None]
    v = v.repeat_interleave(case.pairs // case.groups, dim=2)
    out = torch.einsum("bhij,bjhd->bihd", p1 - weights[..., None] * p2, v)
    if norm:
        out = rms_norm(out, weight, norm["norm_eps"]) * norm["out_scale"]
    return out[0] if case.packed else out


def leaves_of(case: Case, seed: int, weighted: bool) -> list[Tensor]:
    leaves = list(case.inputs(HALF, seed, DEVICE))
    if weighted:
        weight = torch.randn(case.d_v, generator=torch.Generator().manual_seed(seed))
        leaves.append(weight.to(DEVICE, HALF).requires_grad_())
    return leaves


def results_of(case: Case, leaves: list[Tensor], backend: str, norm: bool) -> list[Tensor]:
    """Output and gradients; backend "half" is the plain formula in the half type."""
    extra = {"norm_eps": 1e-5, "out_scale": 0.7} if norm else {}
    weight = leaves[4] if len(leaves) == 5 else None
    if backend == "half":
        out = in_half(case, *leaves[:4], weight, extra)
    else:
        options = case.call_options(DEVICE) | extra
        out = diff_attention(*leaves[:4], norm_weight=weight, backend=backend, **options)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, HALF)
    return [out, *torch.autograd.grad(out, leaves, dy.to(out.dtype))]


def wide_copy(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def largest_error(mine: Tensor, reference: Tensor) -> Tensor:
    return (mine.double() - reference).abs().max()


def scatter_of_dlam(case: Case, leaves: list[Tensor], norm: bool) -> Tensor:
    """Root of the sum of squares of what dlam sums, G O2: its error in units of G's and O2's.

    G, the gradient before the norm, is large where lambda near 1 makes the output small.
    """
    q, k, v, lam, *weight = [x.detach().double() for x in leaves]
    options = case.call_options(DEVICE)
    o = diff_attention(q, k, v, lam, backend="reference", **options)
    o2 = o - diff_attention(q, k, v, lam + 1, backend="reference", **options)
    g = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, HALF).double()
    if norm:
        u = g * 0.7 * (weight[0] if weight else 1)
        r = torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
        g = r * (u - o * r.square() * (u * o).mean(-1, keepdim=True))
    terms = (g * o2).square().sum(-1)
    return terms.sum_to_size(lam.shape).sqrt() if lam.dim() else terms.sum().sqrt()


def check(case: Case, norm: bool, weighted: bool = True, backend: str = "triton") -> None:
    seed = zlib.crc32(case.name.encode())
    weighted = weighted and norm
    # the plain formula on four inputs, since the largest error of one small input can be small by
    # luck
    rough = []
    for at in range(4):
        leaves = leaves_of(case, seed + at, weighted)
        expected = results_of(case, wide_copy(leaves), "reference", norm)
        half = results_of(case, leaves, "half", norm)
        rough.append([largest_error(a, b) for a, b in zip(half, expected, strict=True)])
    leaves = leaves_of(case, seed, weighted)
    expected = results_of(case, wide_copy(leaves), "reference", norm)
    results = results_of(case, leaves, backend, norm)
    unit = torch.finfo(HALF).eps / 2
    for i, (mine, reference) in enumerate(zip(results, expected, strict=True)):
        name = ("out", "dq", "dk", "dv", "dlam", "dweight")[i]
        assert mine.isfinite().all(), name
        low = reference.to(HALF)
        bound = 2 * max(errors[i] for errors in rough)
        bound += 2 * largest_error(low + 0.3 - 0.3, low.double())
        if reference.abs().max() < 1e-12:
            # A single visible key: dP and its row mean cancel, up to the rounding of the saved
            # output. |dS| <= unit * sum |O G| per row, with |O| and |G| at most about 4 standard
            # deviations
            bound += unit * 16 * case.d_v * case.d**-0.5 * 4
        if name == "dlam":
            # the sum of G O2 over tokens and columns, both rounded to the half type
            bound = bound + unit * 4 * scatter_of_dlam(case, leaves, norm)
        over = ((mine.double() - reference).abs() - bound).max()
        assert over <= 0, f"{case.name}: {name} is off by {over:.2e} more than {bound.max():.2e}"


@pytest.mark.parametrize("tiles", SMALL_TILES)
@pytest.mark.parametrize("case", SEVERAL_BLOCKS, ids=lambda case: case.name)
def test_several_blocks(case: Case, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU and case.name not in INTERPRETED[tiles]:
        pytest.skip("left to a GPU")
    monkeypatch.setattr(diff_launch, "tiles_for", lambda *_, **__: SMALL_TILES[tiles])
    check(case, norm=case.lam == "heads")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_option(case: Case) -> None:
    """With the tiles that are really used; the widths are padded to 16."""
    if not GPU and case.name not in INTERPRETED_OPTIONS:
        pytest.skip("left to a GPU")
    check(case, norm=False)


@pytest.mark.parametrize("width", [(24, 48), (16, 16)])
def test_norm_and_widths_that_are_padded(width: tuple[int, int]) -> None:
    check(Case("padded", n_q=20, d=width[0], d_v=width[1]), norm=True)
    check(Case("no_weight", n_q=9, d=width[0], d_v=width[1]), norm=True, weighted=False)


def test_values_of_one_give_one_minus_lambda() -> None:
    q, k, v, _ = Case("ones", n_q=9, **WIDE).inputs(HALF, device=DEVICE)
    lam = torch.tensor([0.99371, -3.0], device=DEVICE)
    out = diff_attention(q, k, torch.ones_like(v), lam, backend="triton")
    # the weights are rounded to the half type before they are summed with the values
    error = (out.float() - (1 - lam)[:, None]).abs()
    assert (error <= torch.finfo(HALF).eps * (1 + lam.abs())[:, None]).all()


def test_padding_may_hold_anything() -> None:
    """NaN after the last document reaches nothing, and no output or gradient there is other than
    0."""
    case = Case("poison", n_q=40, options={"cu_seqlens_q": [0, 7, 7, 24]}, **WIDE)
    inputs = case.inputs(HALF, device=DEVICE)
    poisoned = [x.detach().clone() for x in inputs]
    for x in poisoned[:3]:
        x[24:] = torch.nan
    results = []
    for leaves in (inputs, [x.requires_grad_() for x in poisoned]):
        out = diff_attention(*leaves, **case.call_options(DEVICE), backend="triton")
        dy = torch.ones_like(out)
        results.append([out, *torch.autograd.grad(out, leaves, dy)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        if dirty.shape[0] == 40:
            assert not dirty[24:].any()


def test_rows_without_keys_are_zero() -> None:
    case = Case("blind", n_q=9, n_k=4, **WIDE)
    q, k, v, lam = case.inputs(HALF, device=DEVICE)
    out = diff_attention(q, k, v, lam, backend="triton", norm_eps=1e-5)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not out[:, :5].any() and not dq[:, :5].any() and dq[:, 6:].any()


def test_views_of_a_fused_projection_and_odd_gradients() -> None:
    """Section-major [q | k | v]; expanded and transposed gradients; strides that must be copied."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 9, 64 + 64 + 64, generator=generator).to(DEVICE, HALF).requires_grad_()
    lam = torch.tensor(0.6, device=DEVICE, requires_grad=True)

    def sections(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.split(64, -1)
        return q.unflatten(-1, (4, 16)), k.unflatten(-1, (4, 16)), v.unflatten(-1, (2, 32))

    views = diff_attention(*sections(rows), lam, backend="triton")
    copies = diff_attention(*(x.contiguous() for x in sections(rows)), lam, backend="triton")
    assert torch.equal(views, copies)
    q, k, v = sections(rows)
    across = diff_attention(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), lam, backend="triton"
    )
    assert torch.equal(views, across)
    dy = torch.randn(9, 2, 2, 32, generator=generator).to(DEVICE, HALF).transpose(0, 1)
    for grad in (torch.ones((), device=DEVICE, dtype=HALF).expand_as(views), dy):
        mine = torch.autograd.grad(views, (rows, lam), grad, retain_graph=True)
        theirs = torch.autograd.grad(views, (rows, lam), grad.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_two_runs_are_equal_bit_for_bit() -> None:
    case = Case("twice", n_q=20, pairs=2, groups=1, lam="tokens", **WIDE)
    runs = []
    for _ in range(2):
        inputs = case.inputs(HALF, device=DEVICE)
        out = diff_attention(*inputs, norm_eps=1e-5, deterministic=True, backend="triton")
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_recomputation_gives_the_same_gradients() -> None:
    inputs = Case("again", n_q=9, **WIDE).inputs(HALF, device=DEVICE)

    def run(*tensors: Tensor) -> Tensor:
        return diff_attention(*tensors, norm_eps=1e-5, backend="triton").square().sum()

    again = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)
    expected = torch.autograd.grad(run(*inputs), inputs)
    for mine, theirs in zip(torch.autograd.grad(again, inputs), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tiles", SMALL_TILES)
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_without_gradients_nothing_is_kept_and_the_output_is_the_same(
    tiles: str, eps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_launch, "tiles_for", lambda *_, **__: SMALL_TILES[tiles])
    inputs = Case("inference", n_q=20, **WIDE).inputs(HALF, device=DEVICE)
    trained = diff_attention(*inputs, norm_eps=eps, backend="triton")
    with torch.no_grad():
        assert torch.equal(diff_attention(*inputs, norm_eps=eps, backend="triton"), trained)


def test_whoever_watches_operators_sees_them() -> None:
    """A dispatch mode gets the registered operators; plain eager mode runs the same code."""

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.name())
            return func(*args, **kwargs or {})

    inputs = Case("watched", n_q=9, **WIDE).inputs(HALF, device=DEVICE)

    def run() -> list[Tensor]:
        out = diff_attention(*inputs, norm_eps=1e-5, backend="triton")
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    plain = run()
    with Watch() as watch:
        watched = run()
    assert {"megadiff::diff_attention", "megadiff::diff_attention_backward"} <= set(watch.seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_tensors_that_start_anywhere() -> None:
    """The copy engine, and the compiled kernels, take addresses that are multiples of 16."""
    inputs = Case("shifted", n_q=9, lam="tokens", **WIDE).inputs(HALF, device=DEVICE)
    shifted = []
    for x in inputs:
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)
        shifted.append(room[1:].view(x.shape).copy_(x.detach()).requires_grad_())
    dy = torch.ones(2 * 9 * 2 * 32 + 1, dtype=HALF, device=DEVICE)[1:]
    results = []
    for leaves in (inputs, shifted):
        out = diff_attention(*leaves, backend="triton")
        results.append([out, *torch.autograd.grad(out, leaves, dy.view(out.shape))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiles_without_graph_breaks() -> None:
    inputs = Case("compiled", n_q=9, **WIDE).inputs(HALF, device=DEVICE)

    def run(*tensors: Tensor) -> Tensor:
        return diff_attention(*tensors, norm_eps=1e-5, backend="triton")

    torch.compiler.reset()  # lengths stay constants, which is quicker to trace
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    expected = run(*inputs)
    assert torch.equal(compiled, expected)
    dy = torch.ones_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(compiled, inputs, dy),
        torch.autograd.grad(expected, inputs, dy),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("norm", "packed"), [(True, False), (False, True)])
def test_opcheck(norm: bool, packed: bool) -> None:
    options = {"cu_seqlens_q": [0, 4, 9]} if packed else {}
    case = Case("opcheck", n_q=9, options=options, **WIDE)
    q, k, v, lam = case.inputs(HALF, device=DEVICE)
    weight = torch.rand(32, device=DEVICE, requires_grad=True) if norm else None
    cu = case.call_options(DEVICE).get("cu_seqlens_q")
    eps = 1e-5 if norm else None
    arguments = (q, k, v, lam.detach().float().requires_grad_(), weight, cu, cu, None)
    numbers = (9, 9, -1, 0, 0.25, eps, 0.7, 32, False)
    torch.library.opcheck(diff_triton.forward_op, (*arguments, *numbers, True))
    y, out, second, lse, rstd = diff_triton.forward_op(*arguments, *numbers, True)
    saved = [x.detach() for x in (y if eps is None else out, second, lse, rstd)]
    inputs = [None if x is None else x.detach() for x in arguments]
    torch.library.opcheck(
        diff_triton.backward_op,
        (torch.ones_like(y), *inputs[:5], *saved, *inputs[5:], *numbers),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_is_kept_for_the_backward() -> None:
    """Two tensors of the output's size and the statistics; three with the norm, y among them."""
    for norm, allowed in ((None, 2), (1e-5, 2)):
        inputs = Case("memory", n_q=64, **WIDE).inputs(HALF, device=DEVICE)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x) or x, lambda x: x
        ):
            out = diff_attention(*inputs, norm_eps=norm, backend="triton")
        given = {x.untyped_storage().data_ptr() for x in inputs}
        large = [
            x
            for x in kept
            if x.numel() >= out.numel() and x.untyped_storage().data_ptr() not in given
        ]
        assert len(large) == allowed
