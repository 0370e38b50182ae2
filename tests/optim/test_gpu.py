"""What only a CUDA device shows: the fused kernels there, and that a step never waits for it."""

from dataclasses import replace

import pytest
import torch

from megadiff.config import OptimizerConfig
from megadiff.optim.optimizer import Optimizer
from tests.optim.toy import Toy, batch

pytestmark = pytest.mark.gpu
CONFIG = OptimizerConfig(clip_grad=0.7, weight_decay=0.1)


def train(config: OptimizerConfig, dtype: torch.dtype, device: str) -> torch.Tensor:
    model = Toy(dtype).to(device)
    optimizer = Optimizer(model, config)
    for number in range(4):
        x, y = (t.to(device) for t in batch(number, dtype))
        optimizer.zero_grad()
        optimizer.scale_loss((model(x) - y).float().square().mean()).backward()
        optimizer.step(0.01)
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_cuda_trains_like_the_cpu(name: str) -> None:
    config = replace(CONFIG, optimizer=name)
    tolerance = 0.05 if name == "muon" else 1e-5  # Muon iterates in bfloat16
    cuda, cpu = train(config, torch.float32, "cuda"), train(config, torch.float32, "cpu")
    torch.testing.assert_close(cuda, cpu, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({}, torch.float16),
        ({"main_weights": "kahan"}, torch.bfloat16),
        ({"main_weights": "stochastic"}, torch.bfloat16),
        ({"accumulate_allreduce_grads_in_fp32": False}, torch.bfloat16),
        ({"optimizer": "sgd"}, torch.bfloat16),
        ({"optimizer": "muon"}, torch.bfloat16),
    ],
)
def test_a_step_does_not_wait_for_the_device(changes: dict, dtype: torch.dtype) -> None:
    model = Toy(dtype).to("cuda")
    optimizer = Optimizer(model, replace(CONFIG, **changes))
    x, y = (t.to("cuda") for t in batch(0, dtype))
    loss = (model(x) - y).float().square().mean()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.zero_grad()
        optimizer.scale_loss(loss).backward()
        optimizer.step(0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
