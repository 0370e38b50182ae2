from dataclasses import replace

import pytest
import torch

from megadiff.config import OptimizerConfig
from megadiff.optim import shards
from megadiff.optim.optimizer import Optimizer
from megadiff.optim.weights import KahanWeights, make_main_weights, round_stochastically
from tests.distributed import run_distributed
from tests.optim.test_model_splits import Split, train
from tests.optim.toy import Toy, batch

CONFIG = OptimizerConfig(clip_grad=1.0, weight_decay=0.0)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_stochastic_rounding_has_the_right_mean(device: str) -> None:
    """A quarter of the way to the next of bfloat16's numbers goes up in a quarter of the cases."""
    step = 2.0**-7  # between neighbours in [1, 2)
    for value in (1 + step / 4, -1 - step / 4):
        x = torch.full((40_000,), value, device=device)
        rounded = torch.empty_like(x, dtype=torch.bfloat16)
        round_stochastically(x, torch.Generator(device).manual_seed(0), out=rounded)
        sign = 1 if value > 0 else -1
        assert {sign * v for v in rounded.float().unique().tolist()} == {1.0, 1.0 + step}
        up = (rounded.float() * sign > 1).float().mean().item()
        assert up == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 40_000) ** 0.5)
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    again = torch.empty_like(exact)
    round_stochastically(exact.float(), torch.Generator(device).manual_seed(0), out=again)
    assert torch.equal(again, exact)


@DEVICES
def test_kahan_keeps_what_rounding_loses(device: str) -> None:
    weights = KahanWeights(torch.ones(3, dtype=torch.bfloat16, device=device))
    for step in range(1000):
        weights.store(weights.load() + 1e-4, step)
    # what is lost is at most 2^-8 / 2 and kept to 2^-9 of that, so a step errs by at most 2^-18;
    # bfloat16 alone would still be at 1
    expected = torch.full((3,), 1.1)
    torch.testing.assert_close(weights.load().cpu(), expected, rtol=0, atol=1000 * 2**-18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_are_their_own_main_weights(dtype: torch.dtype) -> None:
    parameters = torch.ones(3, dtype=dtype)
    for mode in ("float32", "kahan", "stochastic"):
        main = make_main_weights(parameters, mode, "x")
        assert main.load() is parameters and not main.state()


def distance_to_float32(mode: str, dtype: torch.dtype) -> float:
    """After small steps that bfloat16 alone would lose: the distance to training in float32."""
    ends = []
    for main_weights, width in ((mode, dtype), ("float32", torch.float32)):
        model = Toy(torch.bfloat16).to(width)
        optimizer = Optimizer(model, replace(CONFIG, main_weights=main_weights))
        for number in range(300):
            x, _ = batch(number, width)
            optimizer.zero_grad()
            (model(x).float().sum() / len(x)).backward()  # a steady drift
            optimizer.step(1e-4)
        ends.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    return (ends[0] - ends[1]).norm().item() / ends[1].norm().item()


def test_pure_bfloat16_keeps_up_with_main_weights() -> None:
    ulp = 2.0**-9  # rounding the final weights alone
    assert distance_to_float32("float32", torch.bfloat16) < 4 * ulp
    assert distance_to_float32("kahan", torch.bfloat16) < 4 * ulp
    # random rounding walks: sqrt(300) steps of at most an ulp each, in places where it rounds
    assert distance_to_float32("stochastic", torch.bfloat16) < 300**0.5 * 2 * ulp


def train_in_bfloat16(config: OptimizerConfig, in_one_pass: bool) -> tuple:
    shards.on_triton = lambda x: in_one_pass
    return train(Split(tensor=4), config, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "in_one_pass"),
    [
        ({"main_weights": "kahan"}, False),
        ({"main_weights": "stochastic"}, False),
        (
            {"main_weights": "stochastic", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            False,
        ),
        ({"main_weights": "stochastic"}, True),
    ],
)
def test_copies_on_tensor_parallel_ranks_stay_equal(
    options: dict[str, str], in_one_pass: bool
) -> None:
    """Four ranks share two key/value groups, which are 16-bit weights in two copies."""
    if in_one_pass:
        pytest.importorskip("triton")
    config = replace(CONFIG, **options)
    results = run_distributed(4, train_in_bfloat16, config, in_one_pass)
    found: dict[tuple, list[torch.Tensor]] = {}
    for _, parts in results:
        for name, _, offset, values in parts:
            found.setdefault((name, offset, values.shape), []).append(values)
    copied = [name for (name, _, _), c in found.items() if len(c) == 2]
    assert any(name.endswith(".k.weight") for name in copied)
    for (name, _, _), (first, *others) in found.items():
        assert all(torch.equal(first, values) for values in others), name
