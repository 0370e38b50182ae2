"""When one rank fails the job ends soon, and says first why."""

import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.parallel import failure

ROOT = Path(__file__).parents[2]


def launch(*arguments: str) -> tuple[str, float]:
    """The output of `failing_run.py` under torchrun, and the seconds from failure to the end."""
    command = ["bash", "-c", 'source launch/environment.sh; exec "$0" "$@"', sys.executable]
    command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["tests/parallel/failing_run.py", *arguments]
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


@pytest.mark.parametrize("over", [False, True])
def test_a_store_that_is_gone_ends_a_rank_unless_its_run_is_over(monkeypatch, over):
    def gone(_: list[str]) -> bool:
        raise RuntimeError("connection reset")

    ended, looked = threading.Event(), threading.Event()
    store = SimpleNamespace(check=lambda keys: looked.set() or gone(keys))
    store.clone = lambda: store
    monkeypatch.setattr(failure, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(failure, "_left", threading.Event())
    monkeypatch.setattr(failure, "_PERIOD", 0.01)
    monkeypatch.setattr(failure, "_GRACE", 0.5)
    monkeypatch.setattr(failure.os, "_exit", lambda _: ended.set() or failure._left.set())
    failure.end_when_others_fail()
    assert looked.wait(10)
    if over:
        failure.let_others_end()
    assert ended.wait(1.5) is not over


def test_a_first_rank_that_fails_takes_the_ranks_store_with_it():
    output, seconds = launch("first")
    assert seconds < 30  # after which the launcher kills rank 1
    assert output[: output.index("Traceback")].endswith("rank 0: ")
    assert "rank 1 ends because" in output


@pytest.mark.slow
def test_a_hang_is_reported_with_rank_and_collective():
    output, _ = launch("hang")
    report = output[output.index("rank 0: Traceback") :]
    assert "in _step_microbatches" in report  # where rank 0 waited, and in what
    assert re.search(r"Timed out waiting \d+ms for (send|recv) operation", report)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("where", ["cuda", "copies"])
@pytest.mark.parametrize("how", ["raise", "block"])
def test_an_exception_on_one_gpu_ends_all(how, where):
    """Also a rank that waits for a message, or for a copy, that will never come."""
    output, seconds = launch(how, where)
    assert seconds < 30
    assert output[: output.index("Traceback")].endswith("rank 1: ")
    assert "rank 0 ends because rank 1 failed" in output


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("where", ["cuda", "copies"])
def test_a_hang_of_one_gpu_is_reported_and_ends_all(where):
    """15 s until NCCL times out, 10 s for the recorder's files, 30 s that torchrun gives rank 1."""
    output, seconds = launch("hang", where)
    assert re.search(r"Rank 0\].* timeout: WorkNCCL\(.*OpType=", output), output
    assert "SIGABRT" in output  # rank 0 ends where it waits, and not as if all were well
    assert seconds < 90


HANGING = """
from datetime import timedelta
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
wait = timedelta(seconds=5)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
x = torch.ones(8, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
torch.cuda._sleep(10**12)  # minutes, for which the next message waits
dist.all_reduce(x)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_nccl_tells_rank_and_collective_of_a_hang_and_leaves_the_flight_recorders_file(tmp_path):
    """With the settings of the launch scripts; one GPU's own work holds its message up."""
    command = 'source launch/environment.sh; exec "$0" -c "$1"'
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the new and the old
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, HANGING],
        cwd=ROOT,
        env=os.environ | dict.fromkeys(names, str(tmp_path / "rank_")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert re.search(r"Rank 0\].* timeout: WorkNCCL\(.*OpType=ALLREDUCE", done.stdout), done.stdout
    entries = pickle.loads((tmp_path / "rank_0").read_bytes())["entries"]
    assert [e["profiling_name"] for e in entries] == ["nccl:all_reduce"] * 2
    assert [e["state"] == "completed" for e in entries] == [True, False]
