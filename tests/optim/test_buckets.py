from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megadiff.config import OptimizerConfig
from megadiff.optim.buckets import Buckets
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.linear import ColumnParallelLinear, Output, RowParallelLinear
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import (
    Init,
    Section,
    as_copy,
    initialize,
    make_parameter,
    record_of,
    set_record,
)
from megadiff.parallel.recompute import recomputed
from tests.distributed import run_distributed
from tests.optim.toy import Toy


def test_parameters_and_gradients_lie_in_buckets() -> None:
    model = Toy(torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    buckets = Buckets(model.named_parameters(), bucket_size=35)
    assert [len(bucket.slots) for bucket in buckets.buckets] == [4, 1]
    buckets.zero(1)
    model(torch.ones(2, 6)).sum().backward()
    for bucket in buckets.buckets:
        for slot in bucket.slots:
            parameter = slot.parameter
            flat = bucket.parameters[slot.start : slot.end]
            assert parameter.data_ptr() == flat.data_ptr()
            assert torch.equal(parameter, before[slot.name])
            assert parameter.grad is slot.gradient
            assert slot.start % 64 == 0
    buckets.finish()
    assert model.lam.grad is not None and model.lam.grad.item() == 6


def test_gradients_that_bypass_autograd_s_hooks_are_counted() -> None:
    """Zero-bubble schedules write `.grad` themselves."""
    model = Toy(torch.bfloat16)
    buckets = Buckets(model.named_parameters())
    buckets.zero(1)
    model.unused.grad = torch.ones_like(model.unused)
    buckets.finish()
    slot = next(s for s in buckets.buckets[0].slots if s.name == "unused")
    assert slot.gradient.tolist() == [1.0] * 5 and model.unused.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_gradients_are_forgotten(dtype: torch.dtype) -> None:
    model = Toy(dtype)
    buckets = Buckets(model.named_parameters())
    slots = {slot.name: slot for slot in buckets.buckets[0].slots}
    for used in ("unused", "lam", "unused"):
        buckets.zero(1)
        getattr(model, used).sum().backward()
        buckets.finish()
        sums = {name: slot.gradient.sum().item() for name, slot in slots.items()}
        assert sums == {name: len(slots[name].gradient) * (name == used) for name in slots}


def two_layers(dtype: torch.dtype, device: str = "cpu") -> nn.Sequential:
    mesh, init = ParallelMesh(), Init(0.1)
    factory = {"dtype": dtype, "device": device}
    up = ColumnParallelLinear(8, [Output("o", 12, 1, init)], mesh, "up", bias=True, **factory)
    down = RowParallelLinear(12, 4, 1, mesh, "down", init=init, **factory)
    model = nn.Sequential(up, down)
    initialize(model, seed=1)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_gradients_are_added_without_rounding(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, recompute: bool
) -> None:
    """Products of 16-bit numbers are exact in float32; only their sums of 3 x 32 are rounded, on a
    GPU perhaps towards zero."""
    fill = partial(torch.full_like, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty_like", fill)  # what autograd gets instead is never used
    model = two_layers(dtype, device)
    buckets = Buckets(model.named_parameters())
    slots = {slot.name: slot for slot in buckets.buckets[0].slots}
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"0.weight": [], "1.weight": []}
    for name, layer in model.named_children():
        layer.register_full_backward_hook(
            lambda layer, _, grads, name=name: seen[f"{name}.weight"].append((grads[0], layer.x))
        )
        layer.register_forward_pre_hook(lambda layer, inputs: setattr(layer, "x", inputs[0]))
    for step in range(2):
        buckets.zero(3)
        buckets.buckets[0].gradients.fill_(torch.nan)  # as an overflow leaves them
        for operands in seen.values():
            operands.clear()
        for micro_batch in range(3):
            generator = torch.Generator().manual_seed(10 * step + micro_batch)
            x = torch.randn(2, 16, 8, generator=generator).to(device, dtype).requires_grad_()
            y = recomputed(model, x) if recompute else model(x)
            y.backward(torch.randn(2, 16, 4, generator=generator).to(y))
        buckets.finish()
        for name, operands in seen.items():
            pairs = [(g.flatten(0, 1).double().T, x.flatten(0, 1).double()) for g, x in operands]
            assert len(pairs) == 3
            wanted = sum(g @ x for g, x in pairs)
            room = sum(g.abs() @ x.abs() for g, x in pairs) * 3 * 32 * 2**-23
            assert ((slots[name].gradient - wanted).abs() <= room).all()
            assert slots[name].parameter.grad is None
        bias = slots["0.bias"].gradient
        wanted = sum(g.flatten(0, 1).double().sum(0) for g, _ in seen["0.weight"])
        torch.testing.assert_close(bias.double(), wanted, rtol=0.02, atol=0.02)


def test_gradients_of_something_else_are_not_summed() -> None:
    model = two_layers(torch.bfloat16)
    buckets = Buckets(model.named_parameters())
    x = torch.ones(1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    sums = []
    for looks in (False, True):
        buckets.zero(1)
        y = model(x).sum()
        if looks:
            torch.autograd.grad(y, x, retain_graph=True)
            with pytest.raises(RuntimeError, match=r"autograd\.grad"):
                torch.autograd.grad(y, [*model.parameters()], retain_graph=True)
        y.backward()
        sums.append(buckets.buckets[0].gradients.clone())
    assert sums[0].any() and torch.equal(*sums)


@pytest.mark.parametrize("forward_first", [False, True])
def test_a_model_goes_on_without_its_optimizer(
    monkeypatch: pytest.MonkeyPatch, forward_first: bool
) -> None:
    fill = partial(torch.full_like, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty_like", fill)
    model, wide = two_layers(torch.bfloat16), two_layers(torch.float32)
    buckets = Buckets(model.named_parameters())
    buckets.zero(1)
    x = torch.ones(1, 2, 8)
    loss = model(x.bfloat16()).sum() if forward_first else None
    del buckets
    (model(x.bfloat16()).sum() if loss is None else loss).backward()
    wide(x).sum().backward()
    for p, w in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None and w.grad is not None
        torch.testing.assert_close(p.grad.float(), w.grad, rtol=0.02, atol=0.01)


def one_backward_too_many() -> None:
    model = Toy(torch.float32)
    buckets = Buckets(model.named_parameters(), group=dist.group.WORLD, bucket_size=1)
    buckets.zero(1)
    for _ in range(2):
        (model.lam.sum() + model.unused.sum()).backward()


def test_a_late_gradient_is_an_error_and_not_a_wrong_sum() -> None:
    with pytest.raises(AssertionError, match="unused: a gradient arrived after its bucket"):
        run_distributed(2, one_backward_too_many)


def ranks_in_different_order(sharded: bool) -> list[list[float]]:
    """Backward reaches the parameters in another order on each rank, and not all of them."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(5)) for _ in range(4)]
    named = [(str(i), p) for i, p in enumerate(parameters)]
    buckets = Buckets(named, group=dist.group.WORLD, sharded=sharded, bucket_size=1, alignment=1)
    for _ in range(2):
        buckets.zero(2)
        for i in (0, 1, 2) if rank == 0 else (2, 1, 0):
            for _ in range(2):
                (parameters[i].sum() * (i + 1) * (rank + 1)).backward()
        buckets.finish()
    return [b.own_gradients.tolist() for b in reversed(buckets.buckets)]


@pytest.mark.parametrize("sharded", [False, True])
def test_order_of_gradients_may_differ_between_ranks(sharded: bool) -> None:
    results = run_distributed(2, ranks_in_different_order, sharded)
    for i in range(4):
        sums = [v for rank in results for v in rank[i]] if sharded else results[0][i]
        assert sums == [*([6.0 * (i + 1)] * 5 if i < 3 else [0.0] * 5), 0.0]


class Stage(nn.Module):
    """One of two stages that both hold the tied matrix `w`, beside a matrix of their own."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.stages = stages

        def matrix(name: str, rows: int) -> nn.Parameter:
            section = Section(name, (rows, 3), 0, rows, 0, "matrix", Init(1.0))
            return make_parameter((rows, 3), [section], dtype=torch.float64, device="cpu")

        self.own = nn.ParameterList([matrix(f"own.{s}", 2 + 3 * s) for s in stages])
        self.w = matrix("w", 5)
        initialize(self, 1)
        if stages == (1,):
            set_record(self.w, as_copy(record_of(self.w)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = {0: lambda: (x @ self.w.T).square().sum(), 1: lambda: (x @ self.w.T).sin().sum()}
        own = [(own @ x.T).square().sum() for own in self.own]
        return sum((terms[s]() for s in self.stages), torch.zeros((), dtype=x.dtype)) + sum(own)


def train_tied(sharded: bool) -> tuple:
    stages, dp_rank, dp_size, ties, groups = (0, 1), 0, 1, [], {}
    if dist.is_initialized():  # rank = stage * 2 + data-parallel rank
        rank = dist.get_rank()
        stages, dp_rank, dp_size = (rank // 2,), rank % 2, 2
        dp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        groups = {"data_parallel_group": dp, "model_parallel_group": pp}
    model = Stage(stages)
    if groups:
        ties = [(model.w, groups["model_parallel_group"])]
    config = OptimizerConfig(clip_grad=0.1, use_distributed_optimizer=sharded)
    optimizer = Optimizer(model, config, ties=ties, alignment=1, bucket_size=4, **groups)
    generator = torch.Generator().manual_seed(2)
    norms = []
    for _ in range(3):
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x[dp_rank::dp_size]).backward()
        norms.append(optimizer.step(0.05).grad_norm.item())
    return norms, {record_of(p).sections[0].name: p.detach().clone() for p in model.parameters()}


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_parameters_of_two_stages_stay_equal(sharded: bool) -> None:
    norms, weights = train_tied(False)
    for got, parts in run_distributed(4, train_tied, sharded):
        assert got == pytest.approx(norms, rel=1e-12)
        for name, values in parts.items():
            torch.testing.assert_close(values, weights[name], rtol=1e-12, atol=1e-12)
