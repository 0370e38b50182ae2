"""The command line under the real torchrun: signals, and errors on one rank or on all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from megadiff.checkpoint.directory import list_steps, read_tracker
from megadiff.data.indexed_dataset import IndexedDatasetBuilder
from tests.distributed import run_distributed
from tests.training.small import flags, losses, train, write_data

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*words: str) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "pretrain_diff.py"), *words],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_signal_saves_at_a_step_and_the_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    argv = flags(write_data(tmp_path), "--train-iters", "500", "--eval-interval", "0")
    saved, log = tmp_path / "saved", tmp_path / "parts"
    parts = [*argv, "--save", str(saved), "--log-dir", str(log), "--eval-iters", "0"]
    run = torchrun(*parts)
    while run.poll() is None and (not (log / "metrics.jsonl").exists() or len(losses(log)) < 5):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=120)
    assert "ended at iteration" in output and ": signal" in output, output
    step = read_tracker(saved)
    assert list_steps(saved) == [step] and step == max(losses(log)) < 500

    last = ["--exit-interval", str(step + 3)]
    run_distributed(2, train, [*parts, *last, "--load", str(saved)])
    whole = tmp_path / "whole"
    run_distributed(2, train, [*argv, *last, "--log-dir", str(whole), "--eval-iters", "0"])
    assert losses(log) == losses(whole)


def test_an_error_on_one_rank_ends_all_and_comes_first(tmp_path: Path) -> None:
    """One document of many holds a token above the vocabulary; the rank that meets it says so."""
    prefix = str(tmp_path / "data")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in range(200):
            builder.add_document([1, 2, 900 if document == 100 else 3, 4, 5, 60])
    run = torchrun(*flags(prefix, "--train-iters", "30", "--split", "100,0,0"))
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    reason = "error: the training data hold token 900, but the vocabulary has 61"
    assert reason in output, output
    before = output[: output.index(reason)]  # torchrun may end the other rank before it speaks
    assert "Traceback" not in before and "another rank has ended" not in before


def test_a_contradiction_is_told_once_and_before_anything_starts(tmp_path: Path) -> None:
    argv = flags("nothing", "--tensor-model-parallel-size", "3", "--log-dir", str(tmp_path / "log"))
    run = torchrun(*argv)
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert output.count("error: the world size 2 is not a multiple of") == 1, output
    assert "Traceback" not in output[: output.index("error:")]
    assert not (tmp_path / "log").exists()
