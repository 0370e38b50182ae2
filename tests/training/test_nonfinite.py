"""The first value that is not finite is named with its micro-batch, in whatever order they run."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megadiff.config import Config
from megadiff.optim.buckets import Buckets
from megadiff.parallel.linear import RowParallelLinear
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init, initialize
from megadiff.parallel.recompute import recomputed
from megadiff.training import nonfinite
from megadiff.training.metrics import Outcome
from megadiff.training.nonfinite import Origin, report, watch_modules


class Breaking(torch.autograd.Function):
    """The identity, whose result or gradient is not finite where `way` says so."""

    @staticmethod
    def forward(ctx, x, way):
        ctx.way = way
        return x * torch.nan if way == "forward" else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.inf if ctx.way == "backward" else 1.0), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, way: str | None) -> Tensor:
        return Breaking.apply(self.linear(x.tanh()), way).tanh()


class Stage(nn.Module):
    """Two layers, the second of which breaks."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.recompute = recompute

    def forward(self, x: Tensor, way: str | None) -> Tensor:
        for layer, does in zip(self.layers, (None, way), strict=True):
            x = recomputed(layer, x, does) if self.recompute else layer(x, does)
        return x


SCHEDULES = {  # micro-batches, twice each: forward, then backward
    "one after another": [0, 0, 1, 1, 2, 2, 3, 3],
    "1F1B": [0, 1, 0, 2, 1, 3, 2, 3],
    "all forward first": [0, 1, 2, 3, 0, 1, 2, 3],
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("broken", range(4))
def test_the_micro_batch_is_the_right_one(
    broken: int, way: str, schedule: str, recompute: bool
) -> None:
    stage, outputs = Stage(recompute), {}
    with watch_modules([stage], ParallelMesh()) as origins:
        for micro_batch in SCHEDULES[schedule]:
            if micro_batch not in outputs:
                does = way if micro_batch == broken else None
                outputs[micro_batch] = stage(torch.ones(2, 4, requires_grad=True), does)
            else:
                outputs[micro_batch].sum().backward()
    (origin,) = origins
    assert (origin.backward, origin.micro_batch) == (way == "backward", broken)
    assert origin.module.startswith("layers.1")


def test_a_weight_s_gradient_that_goes_straight_to_its_sum(monkeypatch) -> None:
    """1e30 x 1e30 is more than float32 holds; the input's gradient, 1e30 x 1, is not."""
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)  # what autograd gets instead
    factory = {"dtype": torch.bfloat16, "device": "cpu", "init": Init(mean=1.0)}
    layer = RowParallelLinear(4, 4, 1, ParallelMesh(), "out", **factory)
    initialize(layer, seed=0)
    stage = nn.Sequential(layer)
    buckets = Buckets(stage.named_parameters())
    buckets.zero(3)
    with watch_modules([stage], ParallelMesh()) as origins:
        for x in (1.0, 1e30, 1.0):
            y = stage(torch.full((1, 2, 4), x, dtype=torch.bfloat16, requires_grad=True))
            y.backward(torch.full_like(y, x))
    (origin,) = origins
    assert (origin.backward, origin.micro_batch, origin.module) == (True, 1, "0.weight")


def test_a_full_disk_does_not_hide_what_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, encoding: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = Config()
    config.logging.log_dir = str(tmp_path)
    env = SimpleNamespace(is_main=True)
    bad = [Outcome(3, 16, 8, torch.nan, torch.nan, True, 1.0)]
    origin = Origin(False, 1, 0, 2, 0, 0, "layers.1.mlp")
    monkeypatch.setattr(nonfinite, "_samples", Mock(return_value=[{"sample": 16}]))
    monkeypatch.setattr(Path, "write_text", full)
    error = report(bad, origin, config, env, Mock())  # pyright: ignore[reportArgumentType]
    assert "it comes from the forward of layers.1.mlp on rank 0, micro-batch 1" in str(error)
    assert "its samples could not be written to" in str(error) and "No space left" in str(error)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(nonfinite, "_samples", Mock(return_value=[{"sample": 16}]))
    report(bad, origin, config, env, Mock())  # pyright: ignore[reportArgumentType]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["samples"] == [{"sample": 16}]
