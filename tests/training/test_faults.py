"""Faults in real trainings: values that are not finite, poisoned data, a slow rank."""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from megadiff.config import Config, ConfigError, load_config, validate
from megadiff.data.loader import BatchLoader
from megadiff.models.mlp import MLP
from megadiff.parallel.parameter import named_sections
from megadiff.training import loop
from megadiff.training.checkpointing import Progress
from megadiff.training.engine import NativeEngine
from megadiff.training.errors import NotFiniteError
from megadiff.training.faults import Spike, StepWatch, passed_over, window_to_skip
from megadiff.training.metrics import Outcome
from tests.distributed import run_distributed
from tests.training.small import VOCABULARY, flags, losses, read, train, write_data
from tools.checkpoint import main as checkpoint_tool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


def train_broken(argv: list[str], way: str, rank: int) -> str:
    """From the ninth micro-batch of `rank` on, its second MLP computes what is not finite.

    Returns the message of the error that ends the run.
    """
    forward, calls = MLP.forward, 0

    def broken(self, x):
        nonlocal calls
        out = forward(self, x)
        if torch.is_grad_enabled():
            calls += 1
        if calls < 18 or calls % 2 or os.environ["RANK"] != str(rank):
            return out
        if way == "forward":
            return out.index_fill(0, torch.tensor(0), torch.nan)
        return BadGradient.apply(out)

    MLP.forward = broken
    with pytest.raises(NotFiniteError) as error:
        train(argv)
    return str(error.value)


@pytest.mark.parametrize("split", ["data", "tensor", "pipeline"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_the_first_module_that_is_not_finite_is_named(
    way: str, split: str, data: str, tmp_path: Path
) -> None:
    """Four micro-batches a step and rank: the ninth is the first of the third step."""
    more = ["--micro-batch-size", "1", "--train-iters", "9", "--eval-iters", "0"]
    if split != "data":
        more += [f"--{split}-model-parallel-size", "2", "--micro-batch-size", "2"]
    more += ["--max-consecutive-skipped-iters", "3", "--log-interval", "2"]
    rank = 1
    if split == "pipeline":  # two layers on each rank
        more += ["--num-layers", "4"]
    messages = run_distributed(
        2, train_broken, flags(data, *more, "--log-dir", str(tmp_path)), way, rank
    )
    layer = 3 if split == "pipeline" else 1
    assert messages[0] == messages[1]
    assert "not finite in 3 iterations in a row, 3 to 5" in messages[0]
    module = f"layers.{layer}.mlp"
    if way == "forward":
        assert f"In iteration 3 it comes from the forward of {module} on rank" in messages[0]
    else:
        assert f"In iteration 3 it comes from the backward of {module}" in messages[0]
    assert "on rank 1, micro-batch 0" in messages[0]

    found = json.loads((tmp_path / "not_finite_iteration_3.json").read_text())
    assert found["iterations"] == [3, 4, 5]
    assert found["origin"]["rank"] == 1 and found["origin"]["module"].startswith(module)
    assert sorted(sample["sample"] for sample in found["samples"]) == list(range(16, 24))
    of_origin = [
        sample["sample"]
        for sample in found["samples"]
        if sample["data_parallel_rank"] == found["origin"]["data_parallel_rank"]
        and sample["micro_batch"] == 0
    ]
    assert of_origin == ([17] if split == "data" else [16, 17])
    assert all(s["dataset"] == data and s["documents"] for s in found["samples"])


def test_a_run_without_one_finite_step_is_no_success(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shorter than --max-consecutive-skipped-iters; one finite step makes it a run."""
    good = 0

    def broken(self, x):
        nonlocal good
        good -= torch.is_grad_enabled()
        return forward(self, x) * (1.0 if good >= 0 else torch.nan)

    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", broken)
    more = ["--train-iters", "4", "--log-interval", "3", "--eval-iters", "0"]
    more += ["--micro-batch-size", "8", "--recompute-granularity", "full"]
    argv = flags(data, *more, "--save", str(tmp_path))
    with pytest.raises(NotFiniteError, match=r"in a row, 1 to 4\. .* layers.0.mlp .*micro-batch 0"):
        train(argv)
    assert list(tmp_path.iterdir()) == []
    good = 4  # the MLPs of the first step, each of them twice
    assert train(argv) == "finished"
    assert checkpoint_tool(["verify", "--values", str(tmp_path)]) == 0


def outcome(iteration: int, loss: float, skipped: bool = False, scale: float = 1.0) -> Outcome:
    return Outcome(iteration, 8 * (iteration - 1), 8, loss, 1.0, skipped, scale)


def watch_of(**options: object) -> StepWatch:
    config = Config()
    for key, value in options.items():
        section = config.optimizer if hasattr(config.optimizer, key) else config.training
        setattr(section, key, value)
    return StepWatch(config)


def test_only_steps_in_a_row_count() -> None:
    watch = watch_of(max_consecutive_skipped_iters=3)
    for iteration in range(1, 31):
        bad = iteration % 3 != 0
        watch.judge([outcome(iteration, 2.0, skipped=bad)], Progress())
        assert not watch.too_many_bad
    watch.judge(
        [outcome(31, float("nan")), *(outcome(i, 2.0, True) for i in (32, 33, 34))], Progress()
    )
    assert watch.too_many_bad and [o.iteration for o in watch.bad] == [31, 32, 33]


def test_the_search_of_the_loss_scale_is_no_fault() -> None:
    def bad(scale: float, loss: float = 2.0, **more: object) -> bool:
        watch = watch_of(fp16=True, max_consecutive_skipped_iters=2, **more)
        watch.judge([outcome(i, loss, True, scale) for i in range(3)], Progress())
        return watch.too_many_bad

    assert not bad(2.0)
    assert bad(1.0)  # there is no smaller one
    assert bad(2.0, min_loss_scale=2.0)
    assert bad(2.0, loss_scale=2.0)  # it is constant
    assert bad(2.0, loss=float("inf"))  # no scale cures the forward


def test_a_float16_run_from_a_scale_far_too_large_goes_on(data: str, tmp_path: Path) -> None:
    more = ["--fp16", "--train-iters", "24", "--max-consecutive-skipped-iters", "2"]
    assert train(flags(data, *more, "--eval-iters", "0", "--log-dir", str(tmp_path))) == "finished"
    skipped = [e["skipped_iterations"] for e in read(tmp_path)]
    assert skipped[:5] == [1] * 5 and skipped[-1] == 0


def test_a_spike_is_measured_by_median_and_median_deviation() -> None:
    watch = watch_of(loss_spike_sigma_factor=5.0, loss_spike_window=5)
    progress = Progress()
    quiet = [outcome(i, loss) for i, loss in enumerate([2.0, 2.1, 1.9, 2.2, 2.0], 1)]
    assert watch.judge(quiet, progress) == []
    # median 2, median deviation 0.1: 2.74 is 4.99 of 1.4826 x 0.1 above it, 2.75 is 5.06
    assert watch.judge([outcome(6, 2.74)], Progress(recent_losses=[2.0, 2.1, 1.9, 2.2, 2.0])) == []
    (spike,) = watch.judge([outcome(6, 2.75), outcome(7, 9.0)], progress)  # one spike, not two
    assert spike.step.iteration == 6
    assert spike.deviations == pytest.approx(0.75 / 0.14826)
    assert progress.recent_losses == [1.9, 2.2, 2.0, 2.75, 9.0]


def test_going_back_from_a_spike_comes_before_the_end_by_what_follows_it() -> None:
    """After it nothing of the given-up steps counts; without a checkpoint the run ends."""
    watch = watch_of(
        loss_spike_sigma_factor=5.0, loss_spike_window=4, max_consecutive_skipped_iters=2,
        loss_spike_skip_iters=2,
    )  # fmt: skip
    run, progress = SimpleNamespace(config=watch.config, watch=watch, log=Mock()), Progress(9, 72)
    found: list[Progress | None] = [Progress(4, 32, [], [2.0, 2.1, 1.9, 2.0]), None]
    run.go_back = lambda before: found.pop(0)
    bad = [outcome(7, 9.0), outcome(8, math.nan, True), outcome(9, math.nan, True)]
    progress.recent_losses = [2.0, 2.1, 1.9, 2.0]
    with patch.object(loop, "explain", return_value=NotFiniteError("explained")):
        assert loop.judge(run, progress, bad)  # pyright: ignore[reportArgumentType]
        assert (progress.iteration, progress.skipped_windows) == (4, [[40, 56]])
        assert not watch.bad
        with pytest.raises(NotFiniteError, match="explained"):
            loop.judge(run, progress, bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--loss-spike-skip-iters 1", "less than 2, the step before a spike and the spike's own"),
        ("--loss-spike-window 3", "too few for a median deviation"),
        ("--iterations-to-skip 3 0", "steps count from 1"),
        ("--non-persistent-local-ckpt-dir out/../here", "--save here is the second place too"),
        ("--non-persistent-global-ckpt-dir ./here", "--save here is the second place too"),
    ],
)
def test_options_that_cannot_work_are_refused(argv: str, reason: str) -> None:
    more = ["--save", "here", "--loss-spike-sigma-factor", "6", *argv.split()]
    with pytest.raises(ConfigError, match=reason):
        validate(load_config(flags("data", *more)), 1)


def test_the_window_begins_with_the_step_before() -> None:
    assert window_to_skip(Spike(outcome(6, 9.0), 2.0, 9.0), 3) == (32, 56)
    config = Config()
    progress = Progress(skipped_windows=[[32, 56]])
    for consumed, expected in [(24, False), (32, True), (48, True), (56, False)]:
        progress.consumed_samples = consumed
        assert passed_over(progress, 8, config) == expected
    progress.consumed_samples = 26  # after a change of the batch size
    assert passed_over(progress, 8, config)


POISONED = range(15 * 8, 17 * 8)  # iterations 16 and 17


def train_poisoned(argv: list[str]) -> str:
    """Train on data in which the labels of the poisoned samples are all the same rare token."""
    make = BatchLoader._make

    def poisoned(self, numbers):
        batch = make(self, numbers)
        for row, number in enumerate(numbers):
            if number in POISONED:
                batch.labels[row] = VOCABULARY - 2
        return batch

    BatchLoader._make = poisoned
    return train(argv)


SPIKES = [
    "--train-iters", "24", "--eval-iters", "0", "--save-interval", "4", "--log-interval", "3",
    "--loss-spike-sigma-factor", "8", "--loss-spike-window", "6", "--lr", "1e-2",
]  # fmt: skip


@pytest.mark.parametrize("split", ["", "--use-distributed-optimizer --async-save"])
def test_a_spike_goes_back_and_passes_over_its_data(split: str, data: str, tmp_path: Path) -> None:
    """What comes out is, bit for bit, a run that knew beforehand which steps to pass over."""

    def arguments(name: str, *more: str) -> list[str]:
        places = ["--save", str(tmp_path / name), "--log-dir", str(tmp_path / name / "log")]
        return flags(data, *SPIKES, *split.split(), *places, *more)

    run_distributed(2, train, arguments("knew", "--iterations-to-skip", *map(str, range(15, 23))))
    rollback = arguments("back", "--loss-spike-skip-iters", "8")
    assert run_distributed(2, train_poisoned, rollback) == ["finished"] * 2
    text = (tmp_path / "back/log/log.txt").read_text()
    assert "loss spike at iteration 16" in text
    assert "back to iteration 12; samples 112 to 175 will be passed over" in text
    assert text.count("loss spike") == 1
    same = ["compare", str(tmp_path / "back"), str(tmp_path / "knew")]
    assert checkpoint_tool(same) == 0

    # stopped inside the window, and resumed: the window is part of the position in the data
    stopped = arguments("parts", "--loss-spike-skip-iters", "8")
    run_distributed(2, train_poisoned, [*stopped, "--exit-interval", "21"])
    run_distributed(2, train_poisoned, [*stopped, "--load", str(tmp_path / "parts")])
    assert checkpoint_tool(["compare", str(tmp_path / "parts"), str(tmp_path / "knew")]) == 0
    logs = [losses(tmp_path / name / "log") for name in ("knew", "back", "parts")]
    assert logs[0][24] == logs[1][24] == logs[2][24]


def test_a_spike_without_a_checkpoint_before_it_is_told(data: str, tmp_path: Path) -> None:
    more = ["--save-interval", "100", "--loss-spike-skip-iters", "3", "--log-dir", str(tmp_path)]
    argv = flags(data, *SPIKES, *more, "--save", str(tmp_path / "saved"))
    assert train_poisoned(argv) == "finished"
    text = (tmp_path / "log.txt").read_text()
    assert "there is no whole checkpoint from before it; the run goes on" in text


def train_drifting(argv: list[str]) -> str:
    """Train on this rank; in the third step one bit of a weight of rank 1 changes."""
    step = NativeEngine.step

    def drifting(self, *rates):
        result = step(self, *rates)
        if self.optimizer.steps == 3 and os.environ["RANK"] == "1":
            found = (
                p for p, s in named_sections(self.model) if s.name == "layers.1.mlp_norm.weight"
            )
            next(found).data.view(torch.int32)[0] ^= 1
        return result

    NativeEngine.step = drifting
    return train(argv)


def test_replicas_that_drift_apart_end_the_run_with_the_first_name(data: str) -> None:
    flag = "--check-weight-hash-across-dp-replicas-interval"
    run_distributed(2, train, flags(data, flag, "2"))
    name = "layers.1.mlp_norm.weight differs between data-parallel replicas, and so do 0 more"
    with pytest.raises(AssertionError, match=f"ReplicaError: {name}"):
        run_distributed(2, train_drifting, flags(data, flag, "2"))
    run_distributed(2, train_drifting, flags(data))  # nobody looks


def train_slowly(argv: list[str], slow: int) -> str:
    forward = MLP.forward

    def sleeping(self, x):
        time.sleep(0.25 if os.environ["RANK"] == str(slow) else 0.0)
        return forward(self, x)

    MLP.forward = sleeping
    return train(argv)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_rank_is_told_with_its_share(slow: int, data: str, tmp_path: Path) -> None:
    more = ["--log-straggler", "--log-interval", "3", "--train-iters", "3", "--eval-iters", "0"]
    run_distributed(2, train_slowly, flags(data, *more, "--log-dir", str(tmp_path)), slow)
    found = read(tmp_path)[-1]["straggler"]
    assert found["rank"] == slow
    # two micro-batches through two MLPs sleep 1 s, for which the other rank waits
    assert found["compute_seconds"] > 1.0
    assert found["median_seconds"] < found["compute_seconds"] - 0.3
    assert 0.5 < found["share"] <= 1.0
    assert f" slowest rank: {slow}, " in (tmp_path / "log.txt").read_text()
