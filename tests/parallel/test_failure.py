"""When one rank fails the job ends soon, and says first why."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(how: str) -> tuple[str, float]:
    """The output of `failing_run.py` under torchrun, and the seconds from failure to the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "tests/parallel/failing_run.py", how]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0, done.stdout
    failing = re.search(r"failing at ([\d.]+)", done.stdout)
    assert failing is not None, done.stdout
    return done.stdout, time.time() - float(failing[1])


@pytest.mark.parametrize("how", ["raise", "block"])
def test_an_exception_on_one_rank_ends_all(how):
    output, seconds = launch(how)
    assert seconds < 30
    first = output.index("Traceback")
    assert output[:first].endswith("rank 1: ")  # the traceback of the rank that failed comes first
    assert output.index("injected on rank 1") < output.index("Traceback", first + 1)
    assert ("rank 0 ends because rank 1 failed" in output) == (how == "block")


@pytest.mark.slow
def test_a_hang_is_reported_with_rank_and_collective():
    output, _ = launch("hang")
    report = output[output.index("rank 0: Traceback") :]
    assert re.search(r"Timed? ?out", report, re.IGNORECASE)
    assert "pipelining" in report  # what rank 0 waited in
