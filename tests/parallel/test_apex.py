"""Apex needs a GPU; here its kernels are replaced by some that do what its source says."""

import sys
import time
from types import ModuleType

import pytest
import torch

from megadiff.config import OptimizerConfig
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel import apex
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
