"""When a run stops before its last step."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadiff.checkpoint.directory import read_tracker
from megadiff.config import TrainingConfig
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.training.setup import Environment
from megadiff.training.stop import StopRequests, agree
from tests.distributed import run_distributed
from tests.training.small import flags, losses, train, write_data


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_a_request_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    env = Environment(ParallelMesh(), torch.device("cpu"), torch.float32, None)
    with StopRequests.install(TrainingConfig()) as requests:
        assert agree(10, requests, env).stop is None
        os.kill(os.getpid(), number)
        assert agree(10, requests, env).stop == "signal"
    assert signal.getsignal(number) == before


def _agree(signalled_rank: int) -> tuple[int, str | None]:
    env = Environment(build_mesh(), torch.device("cpu"), torch.float32, dist.group.WORLD)
    with StopRequests.install(TrainingConfig()) as requests:
        if dist.get_rank() == signalled_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        agreement = agree(10 + dist.get_rank(), requests, env)
    return agreement.tokens, agreement.stop


def test_all_ranks_agree_on_one_ranks_signal_and_on_the_tokens() -> None:
    assert run_distributed(2, _agree, 1) == [(21, "signal")] * 2
    assert run_distributed(2, _agree, -1) == [(21, None)] * 2


def test_time_is_up(tmp_path: Path) -> None:
    saved, log = tmp_path / "saved", tmp_path / "log"
    argv = flags(write_data(tmp_path), "--save", str(saved), "--log-dir", str(log))
    assert train([*argv, "--exit-duration-in-mins", "1e-9"]) == "exit duration"
    assert not log.joinpath("metrics.jsonl").read_text() and not list(saved.glob("iter_*"))
    assert train([*argv, "--exit-interval", "4"]) == "exit interval"
    assert read_tracker(saved) == max(losses(log)) == 4
