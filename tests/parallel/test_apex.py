"""Apex needs a GPU; here its kernels are replaced by some that do what its source says."""

import sys
import time
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megadiff.config import OptimizerConfig
from megadiff.kernels import add_rms_norm
from megadiff.models import norm
from megadiff.models.decoder import Decoder
from megadiff.models.norm import Norm, choose_rms_norm
from megadiff.optim import optimizer
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel import apex
from megadiff.parallel.parameter import initialize
from tests.distributed import run_distributed
from tests.optim.test_groups import MODEL
from tests.optim.test_optimizer import assert_same, train
from tests.optim.toy import Toy

APEX = OptimizerConfig(adam_kernel="apex", clip_grad=0.7)


def adam_capturable(chunk, noop, lists, lr, b1, b2, eps, step, mode, correct, decay, inv_scale):
    """csrc/multi_tensor_adam.cu, AdamCapturableFunctor."""
    if noop == 1:
        return
    assert (noop.dtype, step.dtype, mode, correct) == (torch.int32, torch.int32, 1, 1)
    assert lr.dtype == inv_scale.dtype == torch.float32
    c1, c2 = 1 - b1 ** int(step), 1 - b2 ** int(step)
    for g, p, m, v in zip(*lists, strict=True):
        g.mul_(inv_scale)
        m.mul_(b1).add_((1 - b1) * g)
        v.mul_(b2).add_((1 - b2) * g * g)
        p.sub_(lr * (m / c1 / ((v / c2).sqrt() + eps) + decay * p))


@pytest.fixture
def fake_apex(monkeypatch) -> None:
    applied = ModuleType("apex.multi_tensor_apply")

    class Applier:
        available = True

        def __call__(self, op, noop, lists, *arguments):
            op(2048 * 32, noop, lists, *arguments)

    applied.multi_tensor_applier = Applier()  # type: ignore[attr-defined]

    def fused_rms_norm_affine(x, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        """apex/normalization/fused_layer_norm.py and its CUDA source: one type, float32 inside."""
        assert x.dtype == weight.dtype and tuple(normalized_shape) == weight.shape
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return wide.to(x.dtype)

    norms = ModuleType("apex.normalization.fused_layer_norm")
    norms.fused_rms_norm_affine = fused_rms_norm_affine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex.normalization", ModuleType("apex.normalization"))
    monkeypatch.setitem(sys.modules, "apex.normalization.fused_layer_norm", norms)
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", ModuleType("fused_layer_norm_cuda"))
    extension = ModuleType("amp_C")
    extension.multi_tensor_adam_capturable = adam_capturable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.multi_tensor_apply", applied)
    monkeypatch.setitem(sys.modules, "amp_C", extension)


def test_apex_trains_like_torch(fake_apex) -> None:
    expected = train(OptimizerConfig(adam_kernel="torch", clip_grad=0.7), torch.float32)
    assert_same(train(APEX, torch.float32), expected, 1e-5)
    assert Optimizer(Toy(torch.float32), APEX).adam_kernel == "AdamW: NVIDIA Apex's kernel"


@pytest.mark.parametrize(("times", "chosen"), [([1, 2], "NVIDIA Apex"), ([2, 1], "torch")])
def test_the_faster_adam_is_chosen(fake_apex, monkeypatch, times, chosen) -> None:
    def measure(functions, device):
        for function in functions:
            function()  # both run
        return times

    monkeypatch.setattr("megadiff.optim.optimizer.milliseconds", measure)
    optimizer = Optimizer(Toy(torch.float32), OptimizerConfig())
    assert optimizer.adam_kernel == (
        f"AdamW: {chosen}'s kernel; 16,777,216 elements take "
        f"Apex {times[0]:.3f} ms and torch {times[1]:.3f} ms"
    )
    assert (optimizer._apex is not None) == (chosen == "NVIDIA Apex")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("times", "chosen"), [([1, 2], "NVIDIA Apex"), ([2, 1], "megadiff")])
def test_the_faster_rms_norm_is_chosen_and_equal(
    fake_apex, monkeypatch, dtype, times, chosen
) -> None:
    def measure(functions, device):
        for function in functions:
            function()  # both run
        return times

    monkeypatch.setattr("megadiff.models.norm.milliseconds", measure)
    model = Decoder(MODEL, dtype=dtype)
    initialize(model, 1)
    tokens, positions = torch.arange(8).view(1, 8), torch.arange(7).view(1, 7)
    losses = []
    for line in (None, choose_rms_norm(model, 24, dtype)):
        assert line is None or line == (
            f"RMSNorm: {chosen}'s kernel; 24 x 16 take Apex {times[0]:.3f} ms and megadiff "
            f"{times[1]:.3f} ms"
        )
        assert all(p.grad is None for p in model.parameters())  # timing leaves none
        losses.append(model(tokens[:, :-1], positions, tokens[:, 1:]))
    used = {m.add_rms_norm is not add_rms_norm for m in model.modules() if isinstance(m, Norm)}
    assert used == {chosen == "NVIDIA Apex"}
    torch.testing.assert_close(losses[1], losses[0], rtol=4 * torch.finfo(dtype).eps, atol=0)


def kernels_where_one_rank_lacks_apex() -> list[str]:
    found = None if dist.get_rank() else lambda *arguments: None
    optimizer.find_apex_adam = norm.find_apex_rms_norm = lambda: found
    model = Decoder(MODEL)
    initialize(model, 1)
    return [Optimizer(model, APEX).adam_kernel, choose_rms_norm(model, 24, torch.float32)]


def test_apex_is_left_alone_where_a_rank_lacks_it() -> None:
    """Ranks that have it would wait in a measurement for one that has nothing to measure."""
    for found in run_distributed(2, kernels_where_one_rank_lacks_apex):
        assert found == [f"AdamW: torch's kernel; {apex.NOT_INSTALLED}", ""]


def test_times_are_those_of_the_functions() -> None:
    slow, fast = apex.milliseconds(
        [lambda: time.sleep(0.02), lambda: time.sleep(0.002)], torch.device("cpu"), repeats=3
    )
    assert slow > 20 > fast > 2


def test_another_package_called_apex_is_left_alone(monkeypatch) -> None:
    class Untouchable(ModuleType):
        def __getattr__(self, name: str):
            raise AssertionError("the other apex was used")

    monkeypatch.setitem(sys.modules, "apex", Untouchable("apex"))
    assert apex.find_apex_adam() is None
    assert apex.find_apex_rms_norm() is None


@pytest.mark.parametrize("kernel", ["auto", "apex"])
def test_without_apex_one_line_says_so_and_torch_trains(kernel: str) -> None:
    config = OptimizerConfig(adam_kernel=kernel, clip_grad=0.7)
    line = Optimizer(Toy(torch.float32), config).adam_kernel
    assert line == f"AdamW: torch's kernel; {apex.NOT_INSTALLED}"
    expected = train(OptimizerConfig(adam_kernel="torch", clip_grad=0.7), torch.float32)
    assert_same(train(config, torch.float32), expected, 0)
