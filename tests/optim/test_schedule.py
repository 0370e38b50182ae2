import math
from dataclasses import asdict, replace

import pytest

from megadiff.config import OptimizerConfig
from megadiff.optim.schedule import (
    Schedule,
    learning_rate,
    make_schedule,
    resume_schedule,
    weight_decay,
)

COSINE = Schedule(lr=1.0, min_lr=0.1, lr_warmup_samples=100, lr_decay_samples=1100)


def test_warmup_is_linear_from_its_initial_value() -> None:
    schedule = replace(COSINE, lr_warmup_init=0.2)
    assert [learning_rate(schedule, n) for n in (0, 50, 100)] == pytest.approx([0.2, 0.6, 1.0])


@pytest.mark.parametrize(
    ("style", "at_half", "at_end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.55, 0.1),
        ("cosine", 0.55, 0.1),
        ("inverse-square-root", math.sqrt(100 / 600), math.sqrt(100 / 1100)),
    ],
)
def test_decay_styles(style: str, at_half: float, at_end: float) -> None:
    schedule = replace(COSINE, lr_decay_style=style, min_lr=0.1)
    assert learning_rate(schedule, 600) == pytest.approx(at_half)
    assert learning_rate(schedule, 1100) == pytest.approx(at_end)
    assert learning_rate(schedule, 5000) == (1.0 if style == "constant" else 0.1)


@pytest.mark.parametrize(
    ("style", "at_half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_stays_at_its_peak_and_then_decays(style: str, at_half: float) -> None:
    schedule = replace(
        COSINE, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_samples=200
    )
    assert learning_rate(schedule, 101) == learning_rate(schedule, 900) == 1.0
    assert learning_rate(schedule, 1000) == pytest.approx(0.1 + 0.9 * at_half)
    assert learning_rate(schedule, 1100) == pytest.approx(0.1)


def test_iterations_samples_and_fraction_say_the_same() -> None:
    lengths = {"train_samples": 800, "global_batch_size": 8}
    by_iterations = OptimizerConfig(lr_decay_iters=50, lr_warmup_iters=5)
    by_samples = OptimizerConfig(lr_decay_samples=400, lr_warmup_samples=40)
    by_fraction = OptimizerConfig(lr_decay_iters=50, lr_warmup_fraction=0.1)
    expected = make_schedule(by_iterations, **lengths)
    assert expected.lr_decay_samples == 400 and expected.lr_warmup_samples == 40
    assert make_schedule(by_samples, **lengths) == expected
    assert make_schedule(by_fraction, **lengths) == expected
    assert make_schedule(OptimizerConfig(), **lengths).lr_decay_samples == 800


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(lr_warmup_iters=5, lr_warmup_samples=3), "not both"),
        (OptimizerConfig(lr_warmup_iters=5, lr_warmup_fraction=0.1), "not both"),
        (OptimizerConfig(lr_warmup_iters=200), "does not fit"),
        (OptimizerConfig(lr_decay_style="WSD"), "WSD decay of 0 samples"),
        (OptimizerConfig(start_weight_decay=0.1), "need --weight-decay-incr-style"),
        (OptimizerConfig(weight_decay_incr_style="linear"), "needs --start-weight-decay"),
    ],
)
def test_contradictions_are_refused(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(config, train_samples=800, global_batch_size=8)


def test_weight_decay_increments() -> None:
    config = OptimizerConfig(
        start_weight_decay=0.0, end_weight_decay=0.2, weight_decay_incr_style="cosine"
    )
    schedule = make_schedule(config, train_samples=800, global_batch_size=8)
    values = [weight_decay(schedule, n) for n in (0, 200, 400, 800, 900)]
    expected = [0, 0.1 * (1 - math.cos(math.pi / 4)), 0.1, 0.2, 0.2]
    assert values == pytest.approx(expected)
    linear = replace(schedule, weight_decay_incr_style="linear")
    assert weight_decay(linear, 200) == pytest.approx(0.05)
    constant = make_schedule(OptimizerConfig(), train_samples=800, global_batch_size=8)
    assert weight_decay(constant, 0) == weight_decay(constant, 800) == 0.1


def test_resume_rules() -> None:
    saved = asdict(COSINE)
    plain = OptimizerConfig()
    assert resume_schedule(COSINE, saved, plain) == COSINE
    longer = replace(COSINE, lr_decay_samples=2000, lr=2.0)
    with pytest.raises(ValueError, match=r"lr 2\.0 .*lr_decay_samples 2000 \(checkpoint: 1100\)"):
        resume_schedule(longer, saved, plain)
    override = OptimizerConfig(override_opt_param_scheduler=True)
    use = OptimizerConfig(use_checkpoint_opt_param_scheduler=True)
    assert resume_schedule(longer, saved, override) == longer
    assert resume_schedule(longer, saved, use) == COSINE
    with pytest.raises(ValueError, match="exclude each other"):
        resume_schedule(COSINE, saved, replace(override, use_checkpoint_opt_param_scheduler=True))


def test_a_longer_run_needs_no_override_where_its_length_has_no_effect() -> None:
    constant = OptimizerConfig(lr_decay_style="constant")
    short, long = (
        make_schedule(constant, train_samples=n, global_batch_size=8) for n in (400, 800)
    )
    assert resume_schedule(long, asdict(short), OptimizerConfig()) == long
    fixed = OptimizerConfig(lr_decay_iters=50)
    short, long = (make_schedule(fixed, train_samples=n, global_batch_size=8) for n in (400, 800))
    assert resume_schedule(long, asdict(short), OptimizerConfig()) == long
    with pytest.raises(ValueError, match="lr_decay_style cosine"):
        resume_schedule(
            replace(long, lr_decay_style="cosine"),
            asdict(replace(long, lr_decay_style="linear")),
            OptimizerConfig(),
        )
