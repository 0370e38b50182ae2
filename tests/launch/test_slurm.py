"""launch/slurm.sbatch on a real Slurm of one machine: signal, save, requeue, resume."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.corpus import ROOT, last_losses, make_corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0
        or any(shutil.which(p) is None for p in ("slurmctld", "slurmd", "munged")),
        reason="needs root and Slurm's daemons (Debian: slurmctld slurmd slurm-client munge)",
    ),
]

CONFIG = """
ClusterName=local
SlurmctldHost={host}
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ReturnToService=2
MpiDefault=none
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch, squeue and scontrol talk to a cluster of this machine."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    config.write_text(CONFIG.format(host=host, folder=folder, cores=os.cpu_count()))
    env = os.environ | {"SLURM_CONF": str(config)}
    if subprocess.run(["munge", "-n"], check=False, capture_output=True).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)
    daemons = [
        subprocess.Popen([name, "-D", "-f", str(config)], env=env, stderr=subprocess.DEVNULL)
        for name in ("slurmctld", "slurmd")
    ]
    deadline = time.monotonic() + 60
    while "idle" not in command(env, "sinfo", "-h", "-o", "%T", check=False):
        assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
        time.sleep(1)
    yield env
    command(env, "scancel", "--user=root", check=False)
    for daemon in daemons[::-1]:
        daemon.terminate()
        daemon.wait(timeout=30)


def command(env: dict[str, str], *words: str, check: bool = True) -> str:
    result = subprocess.run(
        words, cwd=ROOT, env=env, check=check, capture_output=True, text=True, timeout=60
    )
    return result.stdout.strip()


def test_signal_save_requeue_resume(tmp_path, slurm):
    env = slurm | make_corpus(tmp_path)
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"RUN": str(tmp_path / "run"), "PROCESSES": "2"}
    output = tmp_path / "job.txt"
    job = command(
        env, "sbatch", "--parsable", "--nodes=1", "--gpus-per-node=0", f"--output={output}",
        "--time=10", "launch/slurm.sbatch", "--tensor-model-parallel-size", "2",
        "--train-iters", "200",
    )  # fmt: skip

    def wait_for(text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not output.exists() or text not in output.read_text():
            assert time.monotonic() < deadline, output.read_text() if output.exists() else job
            time.sleep(0.3)

    wait_for("iteration       40/", 120)
    # What Slurm does by itself ahead of the time limit, without waiting for it.
    command(env, "scancel", "--batch", "--signal=USR1", job)
    wait_for("ended at iteration", 60)
    saved = max(last_losses(tmp_path / "run"))
    assert 40 <= saved < 200
    # A requeued job waits about two minutes before it may begin again.
    command(env, "scontrol", "update", f"jobid={job}", "starttime=now", check=False)
    wait_for(f"at iteration {saved}\n", 300)
    wait_for("ended at iteration 200: finished", 200)
    assert sorted(last_losses(tmp_path / "run")) == list(range(1, 201))
    assert output.read_text().count("goes back into the queue") == 1
