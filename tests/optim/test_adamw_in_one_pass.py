"""AdamW in one pass over 16-bit parameters follows the other path, step for step."""

from dataclasses import replace

import pytest
import torch

from megadiff.config import OptimizerConfig
from megadiff.optim import shards
from megadiff.optim.optimizer import Optimizer
from tests.optim.toy import Toy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)


def train(config: OptimizerConfig, in_one_pass: bool, steps: int, monkeypatch) -> list:
    """The optimizer's state after `steps`; the gradients of step 2 are not finite."""
    monkeypatch.setattr(shards, "on_triton", lambda x: in_one_pass)
    model = Toy(torch.bfloat16).to(DEVICE)
    optimizer = Optimizer(model, config)
    assert bool(optimizer._one_pass) == in_one_pass
    for number in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)  # gradients that do not depend on weights
        for p in model.parameters():
            slope = torch.randn(p.shape, generator=generator).to(DEVICE)
            (p.float() * slope * (float("inf") if number == 2 else 1.0)).sum().backward()
        optimizer.step(1e-2)
    state = [(p.key, p.values) for p in optimizer.state_pieces() if p.key.startswith("exp_avg")]
    state += [("weights", shard.main.load()) for shard in optimizer.shards]
    return [*state, *(("parameter", p.detach().float()) for p in model.parameters())]


@pytest.mark.parametrize("mode", ["float32", "kahan"])
@pytest.mark.parametrize("wide", [True, False])
def test_same_weights_as_the_other_path(mode: str, wide: bool, monkeypatch) -> None:
    config = replace(CONFIG, main_weights=mode, accumulate_allreduce_grads_in_fp32=wide)
    for (key, mine), (_, theirs) in zip(
        train(config, True, 4, monkeypatch), train(config, False, 4, monkeypatch), strict=True
    ):
        # the compensation keeps 8 bits of what 8 bits lose; parameters may be rounded either way
        tolerance = 2**-7 if key == "parameter" else 2e-5 + 2**-15 * (mode == "kahan")
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max(), key


def test_stochastic_rounding_is_right_in_the_mean_and_repeats(monkeypatch) -> None:
    pytest.importorskip("triton")
    from megadiff.kernels.adamw_triton import adamw_

    step = 2.0**-7  # between bfloat16's neighbours in [1, 2)
    n = 10_001
    rounded = []
    for seed in (5, 5, 6):
        weights = torch.ones(n, dtype=torch.bfloat16, device=DEVICE)
        moments = [torch.full((n,), x, device=DEVICE) for x in (-1.0, 1.0)]
        scalars = torch.ones(4, device=DEVICE)
        constants = {"beta1": 1.0, "beta2": 1.0, "eps": 0.0, "weight_decay": 0.0}
        gradient = torch.zeros(n, device=DEVICE)
        adamw_(
            weights, None, gradient, *moments, scalars, mode="stochastic", seed=seed,
            lr=step / 4, **constants,
        )  # fmt: skip
        rounded.append(weights.float())
        assert set(weights.float().unique().tolist()) == {1.0, 1.0 + step}
        up = (weights.float() > 1).float().mean().item()
        assert up == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / n) ** 0.5)
    assert torch.equal(rounded[0], rounded[1]) and not torch.equal(rounded[0], rounded[2])


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_moments_in_bfloat16(in_one_pass: bool, monkeypatch) -> None:
    """A step rounds by at most 2^-7 of a moment, of which beta remains in the next."""
    exact = train(CONFIG, False, 4, monkeypatch)
    config = replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    runs = [train(config, in_one_pass, 4, monkeypatch) for _ in range(2)]
    for (key, mine), (_, again), (_, theirs) in zip(*runs, exact, strict=True):
        assert torch.equal(mine, again), key
        if key.startswith("exp_avg"):
            error = (mine.float() - theirs).abs().max()
            assert mine.dtype == torch.bfloat16 and 0 < error <= 4 * 2**-7 * theirs.abs().max(), key


def test_moments_are_rounded_right_in_the_mean() -> None:
    from megadiff.kernels.adamw_triton import adamw_

    step, n = 2.0**-7, 10_001
    weights, first, second = torch.ones(3, n, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.full((n,), 1 + step / 4, device=DEVICE)
    constants = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0}
    scalars = torch.ones(4, device=DEVICE)
    adamw_(weights, None, gradient, first, second, scalars, mode="stochastic", seed=1, **constants)
    for moment, expected in ((first, 0.25), (second, 0.5 + step / 16)):
        assert set(moment.tolist()) == {1.0, 1.0 + step}
        up = (moment > 1).float().mean().item()
        assert up == pytest.approx(expected, abs=4 * (expected * (1 - expected) / n) ** 0.5)
