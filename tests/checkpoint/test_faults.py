"""Real trainings that are killed, starved and damaged, and go on as if nothing had happened."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megadiff.checkpoint.directory import checkpoint_path, list_steps, read_tracker
from tests.checkpoint.training_runs import Training, arguments, losses, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("text") / "text"
    write_text(prefix)
    return prefix


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """Losses of 40 steps on two ranks, never stopped and without checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    training = Training(2, arguments(text, folder, 40), folder / "output")
    assert training.join() == [0, 0], (folder / "output").read_text()
    found = losses(folder)
    assert sorted(found) == list(range(1, 41))
    assert all(len(values) == 1 for values in found.values())
    return found


def damage_newest(root: Path, how: str, generator: random.Random) -> None:
    """Flip a bit of a file of the newest checkpoint, or cut the file."""
    newest = checkpoint_path(root, list_steps(root)[-1])
    path = generator.choice(sorted(p for p in newest.iterdir() if p.stat().st_size))
    data = bytearray(path.read_bytes())
    place = generator.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    else:
        path.write_bytes(data[:place])


def latest(root: Path) -> int:
    try:
        return read_tracker(root)
    except ValueError:
        return 0


def is_saving(root: Path) -> bool:
    return any(root.glob(".saving_*"))


def test_a_run_goes_on_after_kills_and_damage(text, undisturbed, tmp_path):
    root, log, output = tmp_path / "checkpoints", tmp_path / "log", tmp_path / "output"
    flags = ["--save", str(root), "--load", str(root), "--save-interval", "2", "--async-save"]
    argv = arguments(text, log, 40, *flags, "--keep-last-n-checkpoints", "3")
    generator = random.Random(1)

    def start() -> Training:
        return Training(2, argv, output)

    training = start()
    training.wait_until(lambda: list_steps(root) and is_saving(root))
    training.kill(1)  # one rank, while both write
    for step, how in [(10, "flip"), (20, "truncate")]:
        training = start()
        training.wait_until(lambda s=step: latest(root) >= s)
        training.kill(0, 1)
        damage_newest(root, how, generator)
    training = start()
    training.wait_until(lambda: max(losses(log)) >= 30)
    training.kill(0)
    assert start().join() == [0, 0], output.read_text()[-4000:]
    assert losses(log) == undisturbed
    assert read_tracker(root) == 40
    assert output.read_text().count("resumed from") == 4
    assert output.read_text().count("the newest whole one") >= 1


def test_a_run_resumes_from_its_second_place(text, tmp_path):
    root, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "output"
    flags = ["--save", str(root), "--load", str(root), "--save-interval", "10"]
    flags += [
        "--non-persistent-save-interval",
        "2",
        "--non-persistent-global-ckpt-dir",
        str(second),
    ]
    argv = arguments(text, tmp_path / "log", 20, *flags)
    training = Training(1, argv, output)
    training.wait_until(lambda: latest(second) >= 14)
    training.kill(0)
    newest = list_steps(second)[-1]
    assert Training(1, argv, output).join() == [0], output.read_text()[-4000:]
    assert f"resumed from {checkpoint_path(second, newest)}" in output.read_text()
    assert list_steps(root) == [10, 20]
    assert all(len(values) == 1 for values in losses(tmp_path / "log").values())


class Torchrun:
    """A training under `torchrun`, which starts the workers again whenever one fails."""

    def __init__(self, argv: list[str], output: Path):
        self.output = output
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "1000", "pretrain_diff.py", *argv]
        environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def workers(self) -> list[int]:
        """Process ids of the two ranks, none while they are being started."""
        found = []
        for child in _children(self.process.pid):
            with contextlib.suppress(OSError):
                if b"pretrain_diff.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.005)

    def count(self, words: str) -> int:
        return self.output.read_text(errors="replace").count(words)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 20 MB, None where one may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True
    )
    yield folder if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, how: str) -> bool:
    result = subprocess.run(["mount", "-o", f"remount,{how}", folder], capture_output=True)
    return result.returncode == 0


class Faults:
    """What can happen to a run; each method lets it happen once and returns when it has."""

    def __init__(self, training: Torchrun, root: Path, disk: Path | None, generator: random.Random):
        self.training, self.root, self.disk, self.random = training, root, disk, generator
        self.kinds = [self.kill_one, self.kill_all, self.kill_in_save, self.flip, self.truncate]
        self.kinds += [self.fill_disk, self.read_only] if disk is not None else []

    def kill_one(self) -> None:
        time.sleep(self.random.uniform(0, 0.5))
        self.training.kill(self.random.choice(self.training.workers() or [0]))

    def kill_all(self) -> None:
        time.sleep(self.random.uniform(0, 0.5))
        self.training.kill(*self.training.workers())

    def kill_in_save(self) -> None:
        self.training.wait_until(lambda: is_saving(self.root))
        time.sleep(self.random.uniform(0, 0.05))
        self.training.kill(
            *self.random.choice([self.training.workers(), self.training.workers()[:1]])
        )

    def flip(self) -> None:
        self.training.kill(*self.training.workers())
        damage_newest(self.root, "flip", self.random)

    def truncate(self) -> None:
        self.training.kill(*self.training.workers())
        damage_newest(self.root, "truncate", self.random)

    def fill_disk(self) -> None:
        assert self.disk is not None
        before = self.training.count("No space left")
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self.training.wait_until(lambda: self.training.count("No space left") > before)
        filler.unlink()

    def read_only(self) -> None:
        assert self.disk is not None
        disk, before = self.disk, self.training.count("Read-only file system")
        self.training.wait_until(lambda: remount(disk, "ro"))  # busy while a file is written
        self.training.wait_until(lambda: self.training.count("Read-only file system") > before)
        assert remount(disk, "rw")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_faults_under_torchrun(text, tmp_path, small_disk):
    rounds = int(os.environ.get("FAULT_ROUNDS", "50"))
    seed = int(os.environ.get("FAULT_SEED", str(time.time_ns() % 10_000)))
    generator = random.Random(seed)
    steps = 100_000  # far more than will be reached
    decay = ["--lr-decay-iters", "1000", "--lr-decay-style", "cosine"]
    flags = ["--save-interval", "3", "--async-save", "--keep-last-n-checkpoints", "4"]
    flags += decay
    root = (small_disk or tmp_path) / "checkpoints"
    log = tmp_path / "log"
    paths = ["--save", str(root), "--load", str(root)]
    training = Torchrun(arguments(text, log, steps, *flags, *paths), tmp_path / "output")
    faults = Faults(training, root, small_disk, generator)
    happened: list[str] = []
    try:
        for number in range(rounds):
            # Both kinds of progress: whole checkpoints to fall back to, and steps after a resume.
            enough = max(losses(log), default=0) + generator.randrange(6, 20)
            training.wait_until(
                lambda n=enough: max(losses(log), default=0) >= n and len(list_steps(root)) > 1
            )
            fault = faults.kinds[number % len(faults.kinds)]
            happened.append(fault.__name__)
            print(f"seed {seed}, round {number}, step {max(losses(log))}: {fault.__name__}")
            fault()
        last = max(losses(log)) + 10
        training.wait_until(lambda: max(losses(log)) >= last)
    finally:
        training.process.terminate()
        training.process.wait(120)
    reached = losses(log)
    reference = tmp_path / "undisturbed"
    argv = arguments(text, reference, steps, "--exit-interval", str(max(reached)))
    calm = Training(2, [*argv, *decay], tmp_path / "calm")
    assert calm.join(3600) == [0, 0]
    assert reached == losses(reference)
    assert len(happened) == rounds
    print(
        f"{rounds} faults, {training.count('resumed from')} resumes, "
        f"{training.count('the newest whole one')} from an earlier checkpoint, "
        f"{max(reached)} steps"
    )
