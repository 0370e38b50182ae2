"""Two nodes train together; one is lost and comes back; the losses are those of a quiet run."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.corpus import ROOT, iterations_logged, last_losses, make_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ITERATIONS = 400  # some ten seconds on a quiet machine: the kill must come before the end
FLAGS = ["--train-iters", ITERATIONS, "--save-interval", 10, "--distributed-timeout-minutes", 1]


@pytest.fixture
def namespaces() -> Iterator[list[list[str]]]:
    """Command prefixes of two hosts with addresses of their own; of none where we may not."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield [[], []]
        return
    names = ["megadiff0", "megadiff1"]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    for name in names:
        ip("netns", "delete", name, check=False)
        ip("netns", "add", name)
    ip(
        "link",
        "add",
        "veth0",
        "netns",
        names[0],
        "type",
        "veth",
        "peer",
        "veth1",
        "netns",
        names[1],
    )
    for i, name in enumerate(names):
        ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", f"veth{i}")
        ip("-n", name, "link", "set", f"veth{i}", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield [["ip", "netns", "exec", name] for name in names]
    for name in names:
        ip("netns", "delete", name, check=False)


def start_node(prefix: list[str], index: int, env: dict[str, str], log: Path) -> subprocess.Popen:
    if prefix:
        env = env | {"HEAD": "10.77.0.1:29411", "GLOO_SOCKET_IFNAME": f"veth{index}"}
        env["ADDRESS"] = f"10.77.0.{index + 1}"
    command = [*prefix, "bash", "launch/torchrun.sh", *map(str, FLAGS)]
    with log.open("a") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )


def kill(node: subprocess.Popen) -> None:
    """As a power cut: all its processes at once."""
    group = str(node.pid)
    found = subprocess.run(["pgrep", "-s", group], check=False, capture_output=True, text=True)
    for pid in {group, *found.stdout.split()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    node.wait()


def test_a_lost_node(tmp_path, namespaces):
    env = os.environ | make_corpus(tmp_path)
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"HEAD": "127.0.0.1:29411", "NNODES": "2", "PROCESSES": "1", "MAX_RESTARTS": "5"}

    def nodes(run: str) -> tuple[list[subprocess.Popen], list[Path], dict[str, str]]:
        own = env | {"RUN": str(tmp_path / run), "RUN_ID": run}
        logs = [tmp_path / f"{run}{i}.txt" for i in range(2)]
        started = [start_node(namespaces[i], i, own, logs[i]) for i in range(2)]
        return started, logs, own

    quiet, logs, _ = nodes("quiet")
    assert [node.wait(timeout=300) for node in quiet] == [0, 0], logs[0].read_text()
    expected = last_losses(tmp_path / "quiet")
    assert sorted(expected) == list(range(1, ITERATIONS + 1))

    faulty, logs, own = nodes("faulty")
    deadline = time.monotonic() + 240
    while iterations_logged(tmp_path / "faulty" / "log.txt") < 35:
        assert time.monotonic() < deadline, logs[0].read_text()
        time.sleep(0.2)
    kill(faulty[1])
    time.sleep(3)
    faulty[1] = start_node(namespaces[1], 1, own, logs[1])
    # After a node was replaced, torchrun's agents wait five minutes for one another at the end.
    assert [node.wait(timeout=500) for node in faulty] == [0, 0], logs[0].read_text()
    assert last_losses(tmp_path / "faulty") == expected
    assert "resumed from" in (tmp_path / "faulty" / "log.txt").read_text()
