"""Node-local checkpoints of real runs: taken when newer and whole on all ranks, or passed over."""

import errno
import fcntl
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from megadiff.checkpoint.directory import checkpoint_path, list_steps
from megadiff.checkpoint.local import lock_local
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.training import loop
from megadiff.training.engine import NativeEngine
from megadiff.training.stop import Agreement
from tests.distributed import run_distributed
from tests.training.small import flags, losses, train, write_data
from tools.checkpoint import main as checkpoint_tool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


def crash(argv: list[str], step: int) -> None:
    """Train until step `step`, which fails on all ranks."""
    steps, calls = NativeEngine.step, 0

    def failing(self, *rates):
        nonlocal calls
        calls += 1
        if calls == step:
            raise ZeroDivisionError
        return steps(self, *rates)

    NativeEngine.step = failing
    with pytest.raises(ZeroDivisionError):
        train(argv)


def damage(what: str, local: Path) -> None:
    other = local / "rank_00001"
    if what == "a lost node":
        shutil.rmtree(other)
    elif what == "a cut file":
        path = checkpoint_path(other, 6) / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "an unfinished save":
        (checkpoint_path(other, 6) / "manifest.json").unlink()


CASES = ["nothing", "a lost node", "a cut file", "an unfinished save", "another split"]


@pytest.mark.parametrize("what", CASES)
def test_a_run_resumes_from_the_newest_that_all_ranks_have(
    what: str, data: str, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        folder = tmp_path / name
        places = ["--save", str(folder / "saved"), "--log-dir", str(folder / "log")]
        more = ["--use-distributed-optimizer", "--fp64", "--train-iters", "8"]
        return flags(data, "--eval-iters", "0", *more, *places)

    local, saved = tmp_path / "local", tmp_path / "parts" / "saved"
    every = ["--save-interval", "4", "--non-persistent-save-interval", "2", "--async-save"]
    parts = [*arguments("parts"), *every, "--non-persistent-local-ckpt-dir", str(local)]
    run_distributed(2, train, arguments("whole"))
    run_distributed(2, crash, parts, 8)
    assert list_steps(saved) == [4]
    assert [list_steps(local / f"rank_0000{rank}") for rank in (0, 1)] == [[6], [6]]
    damage(what, local)
    split = ["--tensor-model-parallel-size", "2"] if what == "another split" else []
    run_distributed(2, train, [*parts, *split, "--load", str(saved)])

    text = (tmp_path / "parts/log/log.txt").read_text()
    newest = checkpoint_path(local / "rank_00000", 6)
    taken = newest if what == "nothing" else checkpoint_path(saved, 4)
    assert f"resumed from {taken} at iteration" in text
    ends = [str(tmp_path / name / "saved") for name in ("whole", "parts")]
    tolerance = "1e-9" if split else "0"
    assert checkpoint_tool(["compare", *ends, "--tolerance", tolerance]) == 0
    logs = [losses(tmp_path / name / "log") for name in ("whole", "parts")]
    assert logs[0] == pytest.approx(logs[1], rel=1e-9 if split else 0)


def test_what_another_run_left_in_the_local_place_is_not_loaded(data: str, tmp_path: Path) -> None:
    """Nor does a run that wants weights alone look there; the end of a run is saved elsewhere."""

    def arguments(name: str, *more: str) -> list[str]:
        places = ["--save", str(tmp_path / name), "--log-dir", str(tmp_path / f"{name}.log")]
        places += ["--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
        every = ["--non-persistent-save-interval", "2", "--eval-iters", "0"]
        return flags(data, *every, *places, *more)

    train(arguments("first"))
    assert list_steps(tmp_path / "local/rank_00000") == [4]
    shutil.rmtree(checkpoint_path(tmp_path / "first", 6))
    save_at_two = ["--exit-interval", "2", "--train-iters", "6"]
    train(arguments("other", "--load", str(tmp_path / "other"), *save_at_two))
    assert list_steps(tmp_path / "other") == [2]  # it began anew
    (tmp_path / "first/latest_checkpointed_iteration.txt").unlink()
    for weights_only in ("--no-load-optim", "--finetune"):
        shutil.copytree(checkpoint_path(tmp_path / "other", 2), tmp_path / "first/iter_0000002")
        train(arguments("first", "--load", str(tmp_path / "first"), weights_only))
        text = (tmp_path / "first.log/log.txt").read_text()
        assert f"{tmp_path / 'first/iter_0000002'}" in text
        shutil.rmtree(tmp_path / "first")


def test_two_runs_at_once_need_two_local_places(data: str, tmp_path: Path) -> None:
    """Each would delete what the other has saved. A run that is gone keeps nobody out."""
    places = ["--save", str(tmp_path / "saved")]
    places += ["--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
    argv = flags(data, *places, "--non-persistent-save-interval", "2", "--eval-iters", "0")
    folder = tmp_path / "local/rank_00000"
    folder.mkdir(parents=True)
    hold = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX)"
    words = [sys.executable, "-c", f"{hold}; print(flush=True); input()", str(folder / ".lock")]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline()
    with pytest.raises(CheckpointError, match="rank_00000: another run saves here"):
        train(argv)
    other.kill()
    other.wait()
    train(argv)


def test_a_place_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems are mounted."""

    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock_local(tmp_path).close()


@pytest.mark.parametrize("place", ["global", "local"])
def test_a_signal_right_after_a_save_in_between_saves_for_good(
    place: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that was signalled takes its second place with it."""
    steps = count(1)

    def agree(tokens: int, *_: object) -> Agreement:
        return Agreement(tokens, "signal" if next(steps) == 3 else None)

    monkeypatch.setattr(loop, "agree", agree)
    every = ["--non-persistent-save-interval", "2", "--eval-iters", "0"]
    second = [f"--non-persistent-{place}-ckpt-dir", str(tmp_path / "second")]
    assert train(flags(data, *every, *second, "--save", str(tmp_path / "saved"))) == "signal"
    assert list_steps(tmp_path / "saved") == [2]
