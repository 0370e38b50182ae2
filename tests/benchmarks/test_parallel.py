"""What the measurements of splits are made of; the rows themselves run with `--quick`."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parallel import (
    ROWS,
    covered,
    flags_of,
    given_rows,
    kind_of,
    launcher_variables,
    together,
)
from megadiff.config import load_config, validate
from megadiff.training.setup import world_size

ROOT = Path(__file__).parents[2]


def test_time_that_several_kernels_share_counts_once():
    kernels = [(0, 4, "a"), (2, 6, "b"), (3, 4, "c"), (8, 9, "d")]
    assert covered([(b * 10**6, e * 10**6, name) for b, e, name in kernels]) == 7


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("forward", "attention"),  # on Hopper
        ("forward_in_turn", "attention"),
        ("backward_keys", "attention"),
        ("_swiglu_forward", "other"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "messages"),
        ("Memcpy PtoP (Device -> Device)", "messages"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_splitK_NTN", "products"),
        ("_adamw", "optimizer"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert kind_of(kernel) == kind


def test_rows_of_one_gpu_run_together_and_are_the_baseline_of_what_follows():
    given = [["a", "1"], ["b", "1"], ["c", "1"], ["d", "2"], ["e", "1"]]
    rows = list(given_rows([[*row, "config.yaml", ""] for row in given]))
    assert [row.baseline for row in rows] == [None, None, None, "c", None]
    rounds = [[(row.name, gpu) for row, gpu in together_now] for together_now in together(rows, 2)]
    assert rounds == [[("a", 0), ("b", 1)], [("c", 0)], [("d", 0)], [("e", 0)]]


@pytest.mark.parametrize(("rank", "gpus", "first_gpu"), [(7, 8, 0), (0, 1, 5)])
def test_ranks_of_a_row_are_told_places_that_a_run_accepts(monkeypatch, rank, gpus, first_gpu):
    """The last of eight, and a row of one GPU beside five others."""
    for name, value in launcher_variables(rank, gpus, first_gpu).items():
        monkeypatch.setenv(name, value)
    assert world_size() == gpus


def test_known_rows_are_valid():
    for row in ROWS:
        flags = flags_of(row, argparse.Namespace(quick=False))
        flags[1] = str(ROOT / row.config)
        validate(load_config(flags), row.gpus)


@pytest.mark.parametrize(("second", "code"), [([2.0, 1.011], 0), ([2.0, 1.03], 1)])
def test_losses_are_compared_with_their_spread(tmp_path, second, code):
    for name, losses in {"one": [2.0, 1.0], "other": [2.0, 1.01], "split": second}.items():
        lines = [
            json.dumps({"kind": "train", "iteration": i, "lm_loss": loss})
            for i, loss in enumerate(losses, 1)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    program = [sys.executable, ROOT / "benchmarks" / "compare_losses.py", tmp_path, "one"]
    done = subprocess.run([*program, "--spread", "other", "--of", "split"], capture_output=True)
    assert done.returncode == code, done.stderr
