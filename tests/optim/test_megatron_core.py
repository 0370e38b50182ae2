"""Schedules, ramp-up and loss scale beside megatron-core's, where that is installed."""

import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megadiff.config import OptimizerConfig, TrainingConfig
from megadiff.optim.scaler import LossScaler
from megadiff.optim.schedule import Schedule, learning_rate, weight_decay

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import num_microbatches_calculator  # type: ignore
from megatron.core.optimizer import grad_scaler  # type: ignore
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # type: ignore

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
INCREMENTS = ("constant", "linear", "cosine")


@pytest.mark.parametrize("style", STYLES)
def test_rates_and_decays(style: str) -> None:
    rng = random.Random(style)
    for wsd_style, increment, _ in product(WSD_STYLES, INCREMENTS, range(5)):
        length = rng.randint(20, 2000)
        warmup = rng.choice([0, rng.randint(1, length - 5)])
        s = Schedule(
            lr=rng.uniform(0.5, 1),
            min_lr=rng.uniform(0, 0.5),
            lr_warmup_init=rng.uniform(0, 0.4),
            lr_warmup_samples=warmup,
            lr_decay_style=style,
            lr_decay_samples=length,
            lr_wsd_decay_style=wsd_style,
            lr_wsd_decay_samples=rng.randint(1, length - warmup),
            start_weight_decay=0.2 if increment == "constant" else 0.01,
            end_weight_decay=0.2,
            weight_decay_incr_style=increment,
            weight_decay_incr_samples=rng.randint(10, 2000),
        )
        theirs = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[{}]),
            init_lr=s.lr_warmup_init,
            max_lr=s.lr,
            min_lr=s.min_lr,
            lr_warmup_steps=s.lr_warmup_samples,
            lr_decay_steps=s.lr_decay_samples,
            lr_decay_style=style,
            start_wd=s.start_weight_decay,
            end_wd=s.end_weight_decay,
            wd_incr_steps=s.weight_decay_incr_samples,
            wd_incr_style=increment,
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=False,
            wsd_decay_steps=s.lr_wsd_decay_samples,
            lr_wsd_decay_style=wsd_style,
        )
        edges = (0, warmup, length - s.lr_wsd_decay_samples, length, s.weight_decay_incr_samples)
        for n in (*edges, *(e + 1 for e in edges), *(rng.randint(0, 2 * length) for _ in range(9))):
            theirs.num_steps = n
            assert learning_rate(s, n) == pytest.approx(theirs.get_lr({}), abs=1e-15)
            assert weight_decay(s, n) == pytest.approx(theirs.get_wd(), abs=1e-15)


def test_batch_rampup() -> None:
    rng = random.Random(0)
    for _ in range(20):
        start, increment, rises = rng.randint(1, 8), rng.randint(1, 8), rng.randint(1, 6)
        samples, full = rng.randint(1, 500), start + increment * rises
        ours = TrainingConfig(global_batch_size=full, rampup_batch_size=[start, increment, samples])
        theirs = num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator(
            full, 1, 1, False, 1, start, increment, samples
        )
        for consumed in range(600):
            theirs.update(consumed, consistency_check=True)
            assert ours.batch_size(consumed) == theirs.get_current_global_batch_size()


def test_loss_scale(monkeypatch) -> None:
    on_cpu = SimpleNamespace(
        tensor=lambda values, dtype, device: torch.tensor(values, dtype=dtype),
        float=torch.float,
        max=torch.max,
    )
    monkeypatch.setattr(grad_scaler, "torch", on_cpu)
    rng = random.Random(0)
    for hysteresis, window in product((1, 2, 3), (1, 4, 10)):
        config = OptimizerConfig(
            initial_loss_scale=4096.0,
            min_loss_scale=8.0,
            loss_scale_window=window,
            hysteresis=hysteresis,
        )
        ours = LossScaler(config, torch.device("cpu"))
        theirs = grad_scaler.DynamicGradScaler(4096.0, 8.0, 2.0, 0.5, window, hysteresis)
        for _ in range(300):
            overflow = rng.random() < 0.3
            ours.update(torch.tensor(overflow))
            theirs.update(overflow)
            assert ours.scale.item() == theirs.scale.item()
