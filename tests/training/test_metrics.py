"""The log line has Megatron-LM's fields, under their names and in their order."""

import math
import re
import time

import pytest
import torch

from megadiff.optim.optimizer import StepResult
from megadiff.parallel.mesh import ParallelMesh
from megadiff.training.metrics import Clock, Interval, evaluation_line, train_line
from megadiff.training.setup import Environment

VALUES = {
    "consumed_samples": 640,
    "iteration_ms": 123.44,
    "tflops_per_device": 312.34,
    "tokens_per_second_per_device": 54321.0,
    "learning_rate": 3e-4,
    "global_batch_size": 16,
    "lm_loss": 2.5,
    "loss_scale": 1.0,
    "grad_norm": 0.98765,
    "skipped_iterations": 1,
    "nan_iterations": 0,
    "memory_bytes": 12_340_000_000,
    "seconds_left": 3725.0,
    "lambda": {"0": 0.25, "3": 0.5},
}
FIELDS = [
    ("consumed samples", "640"),
    ("elapsed time per iteration (ms)", "123.4"),
    ("throughput per GPU (TFLOP/s/GPU)", "312.3"),
    ("learning rate", "3.000000E-04"),
    ("global batch size", "16"),
    ("lm loss", "2.500000E+00"),
    ("loss scale", "1.0"),
    ("grad norm", "0.988"),
    ("number of skipped iterations", "1"),
    ("number of nan iterations", "0"),
]


def fields(line: str) -> dict[str, str]:
    parts = [part for part in line.split("|") if ":" in part][1:]
    return {key.strip(): value.strip() for key, value in (p.split(":", 1) for p in parts)}


def test_the_fields_of_megatron_in_its_order() -> None:
    line = train_line(VALUES, 40, 100)
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration       40/     100 \|", line)
    found = fields(line)
    assert [(key, found[key]) for key in found if key in dict(FIELDS)] == FIELDS


def test_what_megatron_does_not_tell() -> None:
    found = fields(train_line(VALUES, 40, 100))
    assert found["tokens/s/device"] == "54321"
    assert found["memory (GB)"] == "12.34"
    assert found["time left"] == "1:02:05"
    assert found["lambda"] == "0.250 0.500"


def test_models_without_lambda_have_no_such_field() -> None:
    assert "lambda" not in train_line({**VALUES, "lambda": {}}, 40, 100)


def test_an_evaluation() -> None:
    assert evaluation_line("validation", 2.0, 40) == (
        " validation loss at iteration 40 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 |"
    )


@pytest.mark.parametrize("tflops", [0.0123, 9.9])
def test_small_throughputs_keep_their_digits(tflops: float) -> None:
    found = fields(train_line({**VALUES, "tflops_per_device": tflops}, 40, 100))
    assert float(found["throughput per GPU (TFLOP/s/GPU)"]) == tflops


def test_skipped_and_broken_steps_are_counted_apart() -> None:
    env = Environment(ParallelMesh(), torch.device("cpu"), torch.float32, None)
    interval = Interval()
    for loss, skipped in ((2.0, False), (math.nan, True), (9.0, True), (3.0, False)):
        result = StepResult(torch.tensor(0.5), torch.tensor(skipped), torch.tensor(8.0))
        interval.add(1, 0, 4, torch.tensor(loss, dtype=torch.float64), result, 0.1)
    assert [o.loss for o in interval.read(env)][::2] == [2.0, 9.0]
    assert interval.read(env) == []
    values = interval.summary()
    assert values["lm_loss"] == 2.5
    assert (values["skipped_iterations"], values["nan_iterations"]) == (2, 1)
    assert (values["grad_norm"], values["loss_scale"], values["learning_rate"]) == (0.5, 8.0, 0.1)


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"))
    now[0] += 2
    with clock.paused():
        now[0] += 100
    now[0] += 1
    assert clock.lap() == 3
    now[0] += 4
    assert clock.lap() == 4
