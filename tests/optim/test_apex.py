"""Apex needs a GPU; here its kernel is replaced by one that does what its source says."""

import sys
from types import ModuleType

import pytest
import torch

from megadiff.config import OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.apex import find_apex_adam
from megadiff.optim.groups import describe_groups
from tests.optim.test_groups import MODEL
from tests.optim.test_optimizer import assert_same, train

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
    expected = train(OptimizerConfig(clip_grad=0.7), torch.float32)
    assert find_apex_adam() is not None
    assert_same(train(APEX, torch.float32), expected, 1e-5)
    assert len(describe_groups([Decoder(MODEL, device="meta")], APEX)) == 4


def test_another_package_called_apex_is_left_alone(monkeypatch) -> None:
    class Untouchable(ModuleType):
        def __getattr__(self, name: str):
            raise AssertionError("the other apex was used")

    monkeypatch.setitem(sys.modules, "apex", Untouchable("apex"))
    assert find_apex_adam() is None


def test_without_apex_one_line_says_so_and_torch_trains() -> None:
    lines = describe_groups([Decoder(MODEL, device="meta")], APEX)
    assert lines[-1].endswith("not installed: torch's AdamW is used")
    expected = train(OptimizerConfig(clip_grad=0.7), torch.float32)
    assert_same(train(APEX, torch.float32), expected, 0)
