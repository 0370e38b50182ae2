"""launch/deepspeed.sh with the real launcher, on one machine and on two that a hostfile names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.corpus import ROOT, last_losses, make_corpus

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ["--train-iters", "6", "--micro-batch-size", "1", "--global-batch-size", "4"]


def run(env: dict[str, str], folder: Path, *flags: str, **variables: str) -> dict[int, float]:
    env = env | {"RUN": str(folder)} | variables
    command = ["bash", "launch/deepspeed.sh", *FLAGS, *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in (folder / "log.txt").read_text()
    return last_losses(folder)


# In the place of ssh and pdsh, which need daemons and keys: a "machine" is an empty environment.
SSH = "#!/bin/sh\necho 127.0.0.1\n"
PDSH = """#!/usr/bin/env bash
hosts=$5
shift 5
echo "$*" >"$COMMAND"
n=0
for host in ${hosts//,/ }; do
  env -i PATH="$PATH" HOME="$HOME" bash -c "${*//%n/$n}" &
  processes+=($!)
  n=$((n + 1))
done
status=0
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit "$status"
"""


def test_one_machine_and_a_hostfile_of_two(tmp_path):
    """A run at ZeRO 1, and its second half on two machines at ZeRO 2, from its checkpoint."""
    env = os.environ | make_corpus(tmp_path) | {"DS_ACCELERATOR": "cpu"}
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"ssh": SSH, "pdsh": PDSH}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env["PATH"] = f"{programs}:{Path(sys.executable).parent}:{env['PATH']}"
    env |= {"PYTHONPATH": str(ROOT), "COMMAND": str(tmp_path / "command.txt")}
    whole = run(env, tmp_path / "whole", PROCESSES="2", ZERO="configs/deepspeed/zero1.json")
    assert list(whole) == [1, 2, 3, 4, 5, 6]

    hosts = tmp_path / "hosts.txt"
    hosts.write_text("node0 slots=1\nnode1 slots=1\n")
    parts = tmp_path / "parts"
    schedule = ["--lr-decay-iters", "6"]
    run(env, parts, *schedule, "--train-iters", "3", PROCESSES="2")
    ended = run(env, parts, *schedule, HOSTFILE=str(hosts))
    assert ended == pytest.approx(whole, rel=1e-5)
    command = (tmp_path / "command.txt").read_text()
    assert "export OMP_NUM_THREADS=1;" in command and "export NCCL_DEBUG=WARN;" in command
