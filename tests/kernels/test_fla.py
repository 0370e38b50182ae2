"""How fla-core's kernels are called, with functions of the same signatures in their place.

The signatures are those of fla-core 0.6.0; its own kernels need a GPU (tests marked `gpu`).
"""

import itertools
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megadiff.kernels import fla
from megadiff.kernels.delta_rule_chunks import chunk_delta_rule
from megadiff.kernels.short_convolution import torch_short_convolution

CPU = torch.device("cpu")
VARIANTS = [fla.Variant(*flags) for flags in itertools.product((False, True), repeat=3)]


def check_delta_rule(q: Any, scale: Any, initial_state: Any, cu_seqlens: Any) -> None:
    assert isinstance(scale, float)
    assert initial_state is None or initial_state.dtype == torch.float32
    assert cu_seqlens is None or (q.shape[0] == 1 and cu_seqlens.dtype == torch.int64)


def fake_chunk_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> Any:
    check_delta_rule(q, scale, initial_state, cu_seqlens)
    return chunk_delta_rule(
        q, k, v, beta, None, scale, initial_state, cu_seqlens, output_final_state
    )


def fake_chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
) -> Any:
    check_delta_rule(q, scale, initial_state, cu_seqlens)
    return chunk_delta_rule(q, k, v, beta, g, scale, initial_state, cu_seqlens, output_final_state)


def fake_causal_conv1d(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    activation: Any = None,
    backend: str = "triton",
    cu_seqlens: Any = None,
) -> Any:
    """States are `[sequences, channels, width]`, newest last; the oldest entry is of no use."""
    assert weight.dim() == 2 and output_final_state and activation in (None, "silu")
    assert cu_seqlens is None or x.shape[0] == 1
    state = None if initial_state is None else initial_state[..., 1:].mT
    y, final = torch_short_convolution(
        x, weight.unsqueeze(1), bias, state, activation == "silu", cu_seqlens
    )
    return y, F.pad(final.mT, (1, 0), value=7.0)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in {
        "fla.ops.delta_rule.chunk_delta_rule": fake_chunk_delta_rule,
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": fake_chunk_gated_delta_rule,
        "fla.modules.causal_conv1d.causal_conv1d": fake_causal_conv1d,
    }.items():
        path, attribute = name.rsplit(".", 1)
        module = ModuleType(path)
        setattr(module, attribute, function)
        monkeypatch.setitem(sys.modules, path, module)
        while "." in path:
            path = path.rpartition(".")[0]
            monkeypatch.setitem(sys.modules, path, ModuleType(path))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: str(v) or "plain")
@pytest.mark.parametrize("gated", [False, True])
def test_delta_rule(gated: bool, variant: fla.Variant) -> None:
    operator = fla.DeltaRule(torch.bfloat16, 2, 8, 16, gated)
    case = operator.case(CPU, variant)
    assert fla.disagreement(operator.load(), chunk_delta_rule, case) == ""


@pytest.mark.parametrize("variant", VARIANTS[1::2], ids=str)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(bias: bool, silu: bool, variant: fla.Variant) -> None:
    operator = fla.ShortConvolution(torch.bfloat16, torch.float32, 6, 4, bias, silu)
    case = operator.case(CPU, variant)
    assert fla.disagreement(operator.load(), torch_short_convolution, case) == ""


def test_the_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, versions = torch.device("cuda"), iter(["0.5.2", "0.6.0", "0.6.0"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: next(versions))
    right = fla.DeltaRule(torch.bfloat16, 2, 8, 16, gated=False)
    assert "on cpu" in fla._obstacle(right, CPU, False)
    assert "deterministic" in fla._obstacle(right, cuda, True)
    assert "bfloat16 or all float16" in fla._obstacle(replace(right, dtype=None), cuda, False)
    assert "0.5.2 is older than 0.6" in fla._obstacle(right, cuda, False)
    assert "up to 256, not 257" in fla._obstacle(replace(right, key_width=257), cuda, False)
    assert fla._obstacle(right, cuda, False) == ""


def test_a_kernel_that_agrees_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.6.0")
    monkeypatch.setattr(fla, "_obstacle", lambda *_: "")
    fla._kernel_for.cache_clear()
    operator = fla.DeltaRule(torch.bfloat16, 2, 8, 16, gated=False)
    variant = fla.Variant(packed=True, state=False, final=False)
    with caplog.at_level("INFO", logger="megadiff"), torch.inference_mode():
        chosen = fla.kernel_for(operator, variant, CPU, chunk_delta_rule)
    assert chosen is not None
    assert caplog.messages == ["delta rule of documents: fla-core 0.6.0, tested on cpu"]
