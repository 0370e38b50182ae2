import dataclasses

import pytest
import torch
import torch.distributed as dist

from megadiff.config import OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer
from megadiff.optim.shards import Shard
from megadiff.parallel.mesh import build_mesh
from megadiff.parallel.parameter import initialize
from tests.distributed import run_distributed
from tests.optim.test_model_splits import MODEL
from tests.optim.toy import Toy, batch

CONFIG = OptimizerConfig(clip_grad=1.0, initial_loss_scale=64.0, hysteresis=1)


def main_weights(shard: Shard) -> torch.Tensor:
    return shard.main.state()["main_weight"]


def step(model: Toy, optimizer: Optimizer, number: int, poison: bool = False):
    """One step on this rank's share of the batch; `poison` makes its gradient infinite."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = batch(number, model.first.dtype)
    optimizer.zero_grad()
    loss = (model(x[rank::world]) - y[rank::world]).float().square().sum() / y.numel()
    optimizer.scale_loss(loss * (float("inf") if poison else 1.0)).backward()
    return optimizer.step(0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_weights_keep_updates_that_the_parameters_lose(dtype: torch.dtype) -> None:
    """At 1e-5 of a weight an update vanishes in 8 or 11 bits, and adds up in the main weights."""
    model = Toy(dtype)
    optimizer = Optimizer(model, CONFIG)
    before = [main_weights(shard).clone() for shard in optimizer.shards]
    start = model.second.detach().clone()
    for number in range(3):
        x, y = batch(number, dtype)
        optimizer.zero_grad()
        optimizer.scale_loss((model(x) - y).float().square().mean()).backward()
        optimizer.step(1e-6)
    assert torch.equal(model.second, start)
    for shard, main in zip(optimizer.shards, before, strict=True):
        now = main_weights(shard)
        assert now.dtype == torch.float32 and not torch.equal(now, main)
        assert torch.equal(shard.bucket.own_parameters, now.to(dtype))


def test_gradients_accumulate_in_float32() -> None:
    """Adding 1/256 to 1 is lost in bfloat16; four such micro-batches must not be."""
    for in_float32 in (True, False):
        config = OptimizerConfig(accumulate_allreduce_grads_in_fp32=in_float32)
        model = Toy(torch.bfloat16)
        optimizer = Optimizer(model, config)
        optimizer.zero_grad(5)
        for weight in (1.0, *[2.0**-9] * 4):
            (model.unused.sum() * weight).backward()
        optimizer.buckets.finish()
        slot = next(
            slot
            for bucket in optimizer.buckets.buckets
            for slot in bucket.slots
            if slot.name == "unused"
        )
        expected = 1 + 4 * 2.0**-9 if in_float32 else 1.0
        assert slot.gradient.float().tolist() == [expected] * 5
        optimizer.step(0.1)  # and the update reads either


def overflow_on_one_rank(sharded: bool) -> list:
    config = dataclasses.replace(CONFIG, use_distributed_optimizer=sharded)
    model = Toy(torch.float16)
    optimizer = Optimizer(
        model, config, data_parallel_group=dist.group.WORLD, alignment=1, bucket_size=30
    )
    seen = []
    for number in range(4):
        before = [main_weights(s).clone() for s in optimizer.shards]
        result = step(model, optimizer, number, poison=number == 1 and dist.get_rank() == 1)
        changed = any(
            not torch.equal(main_weights(s), b)
            for s, b in zip(optimizer.shards, before, strict=True)
        )
        seen.append((bool(result.skipped), result.loss_scale.item(), changed))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [seen, optimizer.state_scalars(), weights]


@pytest.mark.parametrize("sharded", [False, True])
def test_one_overflow_skips_the_step_on_every_rank(sharded: bool) -> None:
    results = run_distributed(2, overflow_on_one_rank, sharded)
    for seen, scalars, weights in results:
        assert seen == [(False, 64, True), (True, 64, False), (False, 32, True), (False, 32, True)]
        assert scalars["updates"] == 3 and scalars["loss_scale"] == 32
        assert torch.equal(weights, results[0][2]) and weights.isfinite().all()


def overflow_in_one_part_of_the_model(name: str) -> tuple:
    mesh = build_mesh(tensor=2)
    model = Decoder(MODEL, mesh, dtype=torch.float16)
    initialize(model, 1)
    optimizer = Optimizer(model, CONFIG, model_parallel_group=mesh.model.group)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        parameter = dict(model.named_parameters())[name]
        parameter.grad = torch.full_like(parameter, torch.inf)
    result = optimizer.step(0.1)
    same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return bool(result.skipped), same, optimizer.state_scalars()["loss_scale"]


@pytest.mark.parametrize("name", ["layers.0.mixer.out.weight", "final_norm.weight"])
def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(name: str) -> None:
    """Also in a copy, whose gradient has no part in the norm."""
    expected = (True, True, 32.0)
    assert run_distributed(2, overflow_in_one_part_of_the_model, name) == [expected] * 2


def test_loss_scale_does_not_change_the_update() -> None:
    """A power of two cancels exactly, so the weights after a step are those of any other scale."""
    ends = []
    for scale in (1.0, 256.0):
        model = Toy(torch.float16)
        optimizer = Optimizer(model, dataclasses.replace(CONFIG, loss_scale=scale))
        norm = step(model, optimizer, 0).grad_norm
        ends.append((norm, main_weights(optimizer.shards[0]).clone()))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-3, atol=0)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    model = Toy(dtype)
    optimizer = Optimizer(model, CONFIG)
    before = [p.detach().clone() for p in model.parameters()]
    result = step(model, optimizer, 0, poison=True)
    assert result.skipped and not result.grad_norm.isfinite()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    assert not step(model, optimizer, 1).skipped
