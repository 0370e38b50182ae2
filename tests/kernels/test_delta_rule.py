"""The chunked delta rule against its recurrence: float64, unless rounding itself is the test."""

import functools
import itertools
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megadiff.kernels import fla
from megadiff.kernels.delta_rule import delta_rule
from megadiff.kernels.delta_rule_chunks import chunk_delta_rule
from megadiff.kernels.delta_rule_reference import delta_rule_reference

EXACT = 1e-12  # float64: some hundred roundings of 1e-16, on values of order one


def make_inputs(
    batch: int,
    length: int,
    *,
    heads: int = 2,
    key_width: int = 5,
    value_width: int = 7,
    gated: bool = False,
    negative_eigenvalues: bool = False,
    seed: int = 0,
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    shape = (batch, length, heads)
    return {
        "q": F.normalize(normal(*shape, key_width), dim=-1),
        "k": F.normalize(normal(*shape, key_width), dim=-1),
        "v": normal(*shape, value_width),
        "beta": normal(*shape).sigmoid() * (2 if negative_eigenvalues else 1),
        "g": -normal(*shape).exp() if gated else None,
    }


def make_state(count: int, inputs: dict[str, Any]) -> torch.Tensor:
    heads, key_width = inputs["q"].shape[2:]
    generator = torch.Generator().manual_seed(1)
    shape = (count, heads, key_width, inputs["v"].shape[-1])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def results(function: Any, inputs: dict[str, Any], state: Any, **options: Any) -> list[Any]:
    """Output, final state, and the gradients of every input for random gradients of both."""
    x = {name: v.clone().requires_grad_() for name, v in inputs.items() if v is not None}
    first = None if state is None else state.clone().requires_grad_()
    out, final = function(**x, initial_state=first, **options)
    generator = torch.Generator().manual_seed(2)
    d = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in (out, final)]
    torch.autograd.backward(
        (out, final), [g.to(y.dtype) for g, y in zip(d, (out, final), strict=True)]
    )
    leaves = [*x.values()] + ([] if first is None else [first])
    return [out.detach(), final.detach(), *(leaf.grad for leaf in leaves)]


def assert_equal(found: list[Any], expected: list[Any], tolerance: float = EXACT) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_chunks_equal_the_recurrence(length: int, gated: bool) -> None:
    inputs = make_inputs(2, length, gated=gated, negative_eigenvalues=length % 2 == 1, seed=length)
    state = make_state(2, inputs)
    assert_equal(results(delta_rule, inputs, state), results(delta_rule_reference, inputs, state))


def test_state_starts_at_zero() -> None:
    inputs = make_inputs(2, 70)
    zeros = torch.zeros_like(make_state(2, inputs))
    expected = results(delta_rule_reference, inputs, zeros)[:-1]
    assert_equal(results(delta_rule, inputs, None, scale=5**-0.5), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 100],
        [0, 1, 2, 65, 65, 100],
        [0, 0, 0, 30, 30, 98, 100, 100, 100],  # empty ones first, between and as padding
        [0, 64, 100],
    ],
)
def test_packed_documents_start_anew(bounds: list[int], gated: bool) -> None:
    inputs = make_inputs(2, 50, gated=gated)
    state = make_state(len(bounds) - 1, inputs)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = results(delta_rule, inputs, state, cu_seqlens=cu_seqlens)
    assert_equal(packed, results(delta_rule_reference, inputs, state, cu_seqlens=cu_seqlens))

    row = {name: None if x is None else x.flatten(0, 1)[None] for name, x in inputs.items()}
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == end:
            assert torch.equal(packed[1][n], state[n])
            continue
        alone = {name: None if x is None else x[:, begin:end] for name, x in row.items()}
        out, final = delta_rule(**alone, initial_state=state[n : n + 1])  # type: ignore[arg-type]
        torch.testing.assert_close(packed[0].flatten(0, 1)[begin:end], out[0], rtol=0, atol=EXACT)
        torch.testing.assert_close(packed[1][n : n + 1], final, rtol=0, atol=EXACT)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("pieces", [[1] * 10 + [140], [64, 86], [2, 3, 145], [100] + [1] * 50])
def test_state_continues_in_any_segmentation(pieces: list[int], gated: bool) -> None:
    inputs = make_inputs(2, 150, gated=gated)
    whole, final = delta_rule(**inputs)  # type: ignore[arg-type]
    parts = {
        n: [None] * len(pieces) if x is None else x.split(pieces, 1) for n, x in inputs.items()
    }
    state, outputs = None, []
    for i in range(len(pieces)):
        piece = {name: x[i] for name, x in parts.items()}
        out, state = delta_rule(**piece, initial_state=state)
        outputs.append(out)
    assert_equal([torch.cat(outputs, 1), state], [whole, final])


@pytest.mark.parametrize("keys", ["random", "identical", "two clusters"])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.999, 2.0])
def test_float32_on_correlated_keys(keys: str, beta: float) -> None:
    """Where keys are alike, a product of powers of the triangular matrix overflows.

    With beta < 1 errors die out, and stay within the few roundings of one chunk. At beta = 2 the
    state is reflected by 1 - beta k.k and never damped; k.k, a sum of `key_width` products, is off
    by up to half as many eps, alike for equal keys, so that the errors of all tokens add up.
    """
    length, key_width = 512, 32
    inputs: dict[str, Any] = make_inputs(1, length, key_width=key_width, value_width=16)
    if keys == "identical":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    if keys == "two clusters":
        pick = torch.arange(length)[None, :, None, None] * 7 % 11 < 5
        inputs["k"] = torch.where(pick, inputs["k"][:, :1], inputs["k"][:, 1:2])
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    single = {name: None if x is None else x.float() for name, x in inputs.items()}
    same = {name: None if x is None else x.double() for name, x in single.items()}
    expected = results(delta_rule_reference, same, None)
    roundings = 64 if beta <= 1 else length * key_width / 2
    for found, right in zip(results(delta_rule, single, None), expected, strict=True):
        assert found.dtype == torch.float32
        assert error(found, right) < roundings * torch.finfo(torch.float32).eps


def test_autocast_leaves_it_in_float32() -> None:
    inputs: dict[str, Any] = make_inputs(1, 130, gated=True)
    single = {name: x.float() for name, x in inputs.items()}
    expected = results(delta_rule, single, None)

    def under_autocast(**x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return delta_rule(**x)

    for found, right in zip(results(under_autocast, single, None), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_to_do(batch: int, length: int) -> None:
    inputs: dict[str, Any] = make_inputs(2, 5, gated=True)
    some = {name: x[:batch, :length].requires_grad_() for name, x in inputs.items()}
    state = make_state(batch, inputs)
    out, final = delta_rule(**some, initial_state=state)
    assert out.shape == (batch, length, 2, 7) and torch.equal(final, state)  # type: ignore[arg-type]
    (out.sum() + final.sum()).backward()  # type: ignore[union-attr]


def test_zero_rows_leave_the_state_alone() -> None:
    inputs: dict[str, Any] = make_inputs(2, 80)
    state = make_state(2, inputs)
    for name in ("k", "beta"):
        inputs[name][:, 5:70] = 0
    kept = {
        n: None if x is None else torch.cat([x[:, :5], x[:, 70:]], 1) for n, x in inputs.items()
    }
    _, final = delta_rule(**inputs, initial_state=state)
    _, expected = delta_rule(**kept, initial_state=state)  # type: ignore[arg-type]
    torch.testing.assert_close(final, expected, rtol=0, atol=EXACT)


def test_strong_decay_forgets_and_the_tokens_after_it_stay_exact() -> None:
    """A reset of exp(-10000) inside a chunk must not drown the small decays behind it."""
    inputs: dict[str, Any] = make_inputs(1, 128, gated=True)
    inputs["g"] *= 1e-2
    inputs["g"][:, 20] = -1e4
    single = {name: x.float() for name, x in inputs.items()}
    same = {name: x.double() for name, x in single.items()}
    state = make_state(1, inputs)
    expected = results(delta_rule_reference, same, state)
    for found, right in zip(results(delta_rule, single, state.float()), expected, strict=True):
        if right.norm() == 0:  # nothing before the reset reaches the initial state's gradient
            assert found.norm() == 0
        else:
            assert error(found, right) < 64 * torch.finfo(torch.float32).eps


def test_bfloat16_stays_within_its_own_rounding_over_8192_tokens() -> None:
    """q, k, v and the output rounded to bfloat16 (2^-9 at most each), everything else float32."""
    inputs: dict[str, Any] = make_inputs(1, 8192, key_width=32, value_width=32)
    expected, state = delta_rule_reference(**inputs)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].bfloat16()
    inputs["beta"] = inputs["beta"].float()
    out, final = delta_rule(**inputs)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert error(out, expected) < 2**-8
    assert error(final, state) < 2**-8


def test_backward_keeps_the_inputs_only() -> None:
    inputs: dict[str, Any] = make_inputs(1, 256, gated=True)
    x = {name: value.requires_grad_() for name, value in inputs.items()}
    state = make_state(1, inputs)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        delta_rule(**x, initial_state=state)
    assert sum(kept.values()) == sum(value.nbytes for value in x.values()) + state.nbytes


def test_empty_documents_cost_nothing_where_no_state_is_asked_for() -> None:
    inputs: dict[str, Any] = make_inputs(1, 40)
    bounds = torch.tensor([0, 0, 25, *[40] * 1_000_000])  # states of 560 MB
    out, state = delta_rule(**inputs, cu_seqlens=bounds, output_final_state=False)
    expected, _ = delta_rule_reference(**inputs, cu_seqlens=torch.tensor([0, 25, 40]))
    torch.testing.assert_close(out, expected, rtol=0, atol=EXACT)
    assert state is None


def test_bad_input_is_named() -> None:
    inputs: dict[str, Any] = make_inputs(2, 10)
    with pytest.raises(ValueError, match=r"beta and g .*got .*\(2, 9, 2\)"):
        delta_rule(**(inputs | {"beta": inputs["beta"][:, :9]}))
    with pytest.raises(TypeError, match=r"float types; got torch.int32, torch.float64"):
        delta_rule(**(inputs | {"q": inputs["q"].int()}))
    with pytest.raises(TypeError, match="must be int32 or int64"):
        delta_rule(**inputs, cu_seqlens=torch.tensor([0.0, 20.0]))
    with pytest.raises(ValueError, match=r"initial_state must be \(2, 2, 5, 7\)"):
        delta_rule(**inputs, initial_state=make_state(3, inputs))
    for bounds, complaint in (
        ([0, 10], "ends at the 20 tokens"),
        ([1, 20], "starts at 0"),
        ([0, 12, 9, 20], "must not decrease"),
    ):
        with pytest.raises(ValueError, match=complaint):
            delta_rule(**inputs, cu_seqlens=torch.tensor(bounds))


# The gate in front of fla-core: `choose` must take a right kernel and refuse any other.


class _Faulty(torch.autograd.Function):
    """Identity whose gradient is 10 % too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return d * 1.1


def _wrong_gradient(index: int) -> Any:
    def kernel(*args: Any) -> Any:
        changed = list(args)
        changed[index] = _Faulty.apply(args[index])
        return chunk_delta_rule(*changed)

    return kernel


def _documents_not_restarted(*args: Any) -> Any:
    *inputs, scale, states, _, final = args
    out, state = chunk_delta_rule(*inputs, scale, states[:1], None, final)
    return out, state + states * 0


def _not_a_number(*args: Any) -> Any:
    out, final = chunk_delta_rule(*args)
    return out * torch.nan, final


def _refuses(*args: Any) -> Any:
    raise RuntimeError("Triton 3.6.0 on Hopper\nis not supported")


VARIANTS = [fla.Variant(*flags) for flags in itertools.product((False, True), repeat=3)]
CPU = torch.device("cpu")


def _case(gated: bool, variant: fla.Variant = VARIANTS[-1], device: torch.device = CPU) -> fla.Case:
    return fla.DeltaRule(torch.bfloat16, 2, 16, 16, gated).case(device, variant)


def _recurrence(*args: Any) -> Any:
    """The right answer by another route, rounded to bfloat16 once."""
    *inputs, scale, state, cu_seqlens, output_final_state = args
    q, k, v, beta, g, state = (None if x is None else x.double() for x in (*inputs, state))
    out, final = delta_rule_reference(
        q,  # type: ignore[arg-type]
        k,  # type: ignore[arg-type]
        v,  # type: ignore[arg-type]
        beta,  # type: ignore[arg-type]
        g,
        scale=scale,
        initial_state=state,
        cu_seqlens=cu_seqlens,
    )
    return out.to(inputs[2].dtype), final.float() if output_final_state else None


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: str(v) or "plain")
@pytest.mark.parametrize("gated", [False, True])
def test_self_test_accepts_a_right_kernel(gated: bool, variant: fla.Variant) -> None:
    assert fla.disagreement(_recurrence, chunk_delta_rule, _case(gated, variant)) == ""


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (_wrong_gradient(0), "the gradient of q"),
        (_wrong_gradient(1), "the gradient of k"),
        (_wrong_gradient(3), "the gradient of beta"),
        (_wrong_gradient(4), "the gradient of g"),
        (_wrong_gradient(6), "the gradient of initial_state"),
        (_documents_not_restarted, "the output"),
        (_not_a_number, "the output"),
    ],
)
def test_self_test_refuses_a_wrong_kernel(kernel: Any, complaint: str) -> None:
    assert complaint in fla.disagreement(kernel, chunk_delta_rule, _case(gated=True))


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (
            _refuses,
            "delta rule: torch, because fla-core failed: RuntimeError: Triton 3.6.0 on Hopper",
        ),
        (_not_a_number, "delta rule: torch, because fla-core is wrong on this device: the output"),
    ],
)
def test_one_line_says_why_the_kernel_is_not_used(
    kernel: Any, line: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla._say.cache_clear()
    fla._kernel_for.cache_clear()
    monkeypatch.setattr(fla, "_obstacle", lambda *_: "")
    monkeypatch.setattr(fla.DeltaRule, "load", lambda _: kernel)
    operator = fla.DeltaRule(torch.bfloat16, 2, 16, 16, gated=False)
    with caplog.at_level(logging.INFO, logger="megadiff"):
        chosen = fla.kernel_for(operator, VARIANTS[0], CPU, chunk_delta_rule)
    assert chosen is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(line)
    assert "\n" not in caplog.messages[0]


def test_torch_runs_on_the_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    fla._kernel_for.cache_clear()
    fla._say.cache_clear()
    inputs: Any = make_inputs(1, 4)
    with caplog.at_level(logging.INFO, logger="megadiff"):
        delta_rule(**inputs)
        delta_rule(**inputs, output_final_state=False)
    assert caplog.messages == ["delta rule: torch, because the tensors are on cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: str(v) or "plain")
@pytest.mark.parametrize("gated", [False, True])
def test_on_a_gpu(gated: bool, variant: fla.Variant, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever runs there is right, and says what it is."""
    fla._kernel_for.cache_clear()
    fla._say.cache_clear()
    with caplog.at_level(logging.INFO, logger="megadiff"):
        case = _case(gated, variant, torch.device("cuda"))

        def run(*args: Any) -> Any:
            *inputs, scale, state, cu_seqlens, final = args
            return delta_rule(
                *inputs,
                scale=scale,
                initial_state=state,
                cu_seqlens=cu_seqlens,
                output_final_state=final,
            )

        assert fla.disagreement(run, _recurrence, case) == ""
    print(*caplog.messages)
    assert any("delta rule" in message for message in caplog.messages)
