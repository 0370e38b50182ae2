"""The benchmark of whole steps runs on a CPU, ours and a peer in one call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step_budget import class_of, count

ROOT = Path(__file__).parents[2]


def test_quick_run_measures_ours_and_a_peer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks/train.py"), "--quick", "--device", "cpu"]
    command += ["--models", "standard", "diff_v1", "hf_llama", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["standard", "diff_v1", "hf_llama"]
    standard, diff, peer = rows
    # the peer is the same model: the same parameters (but for padding), the same FLOPs
    assert standard["parameters"] == peer["parameters"]
    assert standard["flops_per_token"] == peer["flops_per_token"] < diff["flops_per_token"]
    for row in rows:
        assert row["tokens_per_step"] == 128 and row["tokens_per_second"] > 0
        assert 5.0 < row["loss"] < 6.5  # about log 256: the weights are random


def test_budget_counts_overlap_once_and_gaps_as_idle() -> None:
    kernels = [
        ("nvjet_tst_128x256", 0.0, 4000.0),
        ("void cudnn_generated_fort_native_sdpa_sm90", 3000.0, 6000.0),  # on another stream
        ("_swiglu_forward", 8000.0, 10000.0),
    ]
    budget = count(kernels, 2, {"matrix products": 1.5})
    assert budget.milliseconds == {"matrix products": 2.0, "attention": 1.5, "SwiGLU": 1.0}
    assert (budget.whole, budget.idle) == (5.0, 1.0)
    assert "1.5" in str(budget)


def test_our_kernels_have_their_classes() -> None:
    assert class_of("forward") == class_of("backward_keys") == "attention"
    assert class_of("_forward") == class_of("_backward") == "norms"
    assert class_of("_adamw") == "optimizer"
