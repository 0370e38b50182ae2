import dataclasses

import pytest
import torch
import torch.distributed as dist

from megadiff.config import OptimizerConfig
from megadiff.optim.optimizer import Optimizer
from tests.distributed import run_distributed
from tests.optim.toy import Toy, batch

CONFIG = OptimizerConfig(weight_decay=0.1, clip_grad=0.7, adam_beta2=0.95, lambda_lr_multiplier=2.0)


def train(
    config: OptimizerConfig,
    dtype: torch.dtype,
    steps: int = 4,
    micro_batches: int = 2,
    alignment: int = 1,
    bucket_size: int = 20,
) -> dict:
    """Losses, gradient norms and final weights of the toy model on this world's ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = Toy(dtype)
    optimizer = Optimizer(
        model,
        config,
        data_parallel_group=dist.group.WORLD if world > 1 else None,
        alignment=alignment,
        bucket_size=bucket_size,
    )
    norms = []
    for step in range(steps):
        x, y = batch(step, dtype)
        optimizer.zero_grad(micro_batches)
        for part in range(rank, world * micro_batches, world):
            mine = slice(part * len(x) // (world * micro_batches), None)
            mine = slice(mine.start, mine.start + len(x) // (world * micro_batches))
            loss = (model(x[mine]) - y[mine]).square().sum() / y.numel()
            loss.backward()
        norms.append(optimizer.step(0.05 / (step + 1)).grad_norm.item())
    return {
        "norms": torch.tensor(norms, dtype=torch.float64),
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def reference(config: OptimizerConfig, steps: int = 4) -> dict:
    """The same training by torch.optim alone, in float64."""
    model = Toy(torch.float64)
    first_a = model.first.detach()[:4].clone().requires_grad_()
    first_b = model.first.detach()[4:].clone().requires_grad_()
    rest = {n: p for n, p in model.named_parameters() if n != "first"}
    leaves = {"a": first_a, "b": first_b, **rest}
    rules = {"a": (0.1, 1), "b": (0.0, 2), "second": (0.1, 1), "lam": (0.0, 2)}
    groups = [
        {"params": [p], "weight_decay": rules.get(n, (0.0, 1))[0], "x": rules.get(n, (0.0, 1))[1]}
        for n, p in leaves.items()
    ]
    if config.optimizer == "adam":
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config.sgd_momentum)
    norms = []
    for step in range(steps):
        x, y = batch(step, torch.float64)
        first = torch.cat([first_a, first_b])
        out = (torch.tanh(x @ first.T) @ model.second.T) * model.scale + model.lam
        optimizer.zero_grad()
        ((out - y).square().sum() / y.numel()).backward()
        model.unused.grad = torch.zeros_like(model.unused)
        norms.append(torch.nn.utils.clip_grad_norm_(leaves.values(), config.clip_grad).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1) * group["x"]
        optimizer.step()
    weights = {"first": torch.cat([first_a, first_b]).detach()}
    weights |= {n: p.detach() for n, p in rest.items()}
    return {"norms": torch.tensor(norms, dtype=torch.float64), "weights": weights}


def assert_same(got: dict, expected: dict, rtol: float) -> None:
    torch.testing.assert_close(got["norms"], expected["norms"], rtol=rtol, atol=0)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            got["weights"][name].double(), weight.double(), rtol=rtol, atol=rtol
        )


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_one_process_equals_torch(name: str) -> None:
    config = dataclasses.replace(CONFIG, optimizer=name)
    # torch divides by norm + 1e-6 when it clips, hence the tolerance
    assert_same(train(config, torch.float64), reference(config), 1e-5)


def test_clipping_is_exact() -> None:
    """With plain SGD an update is lr times the clipped gradient, whose norm is the limit."""
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.01)
    got = train(config, torch.float64, steps=1)
    start = dict(Toy(torch.float64).named_parameters())
    moved = torch.cat([(got["weights"][n] - p).flatten() for n, p in start.items()])
    assert moved.norm().item() == pytest.approx(0.05 * 0.01, rel=1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_parallel_sharded_or_not_equals_one_process(world: int, dtype: torch.dtype) -> None:
    alone = train(CONFIG, dtype, micro_batches=2 * world)
    rtol = 1e-9 if dtype == torch.float64 else 2e-5
    for sharded in (False, True):
        for overlap in (False, True):
            config = dataclasses.replace(
                CONFIG, use_distributed_optimizer=sharded, overlap_grad_reduce=overlap
            )
            for result in run_distributed(world, train, config, dtype):
                assert_same(result, alone, rtol)


def test_default_alignment_leaves_whole_shards_empty() -> None:
    config = dataclasses.replace(CONFIG, use_distributed_optimizer=True)
    alone = train(CONFIG, torch.float64, micro_batches=6)
    for result in run_distributed(3, train, config, torch.float64, 4, 2, 64, 40_000_000):
        assert_same(result, alone, 1e-9)
