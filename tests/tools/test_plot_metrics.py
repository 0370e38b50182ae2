"""The picture of a run."""

import json
from pathlib import Path

import pytest

from tools import plot_metrics


def entry(kind: str, iteration: int, loss: float, **more: object) -> dict:
    return {"kind": kind, "iteration": iteration, "lm_loss": loss, **more}


def training(iteration: int, loss: float, lambdas: dict[str, float]) -> dict:
    numbers = {"learning_rate": 0.1, "tokens_per_second_per_device": 10.0, "lambda": lambdas}
    return entry("train", iteration, loss, **numbers)


def write(path: Path, entries: list[dict]) -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return path


def test_a_resumed_runs_entry_replaces_the_earlier_one(tmp_path: Path) -> None:
    entries = [training(1, 3.0, {}), training(2, 2.5, {}), training(2, 2.4, {})]
    metrics = plot_metrics.read_metrics(write(tmp_path / "metrics.jsonl", entries))
    assert [e["lm_loss"] for e in metrics["train"]] == [3.0, 2.4]


@pytest.mark.parametrize("lambdas", [{}, {"0": 0.2, "1": 0.4}])
def test_the_picture_is_drawn(lambdas: dict[str, float], tmp_path: Path) -> None:
    entries = [training(i, 3.0 / i, lambdas) for i in range(1, 9)]
    entries += [entry("validation", 4, 1.0), entry("validation", 8, 0.5)]
    path = write(tmp_path / "metrics.jsonl", entries)
    plot_metrics.main([str(path)])
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_metrics_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "iteration": 1}\nnonsense\n')
    with pytest.raises(SystemExit, match="line 2: not a metrics entry"):
        plot_metrics.read_metrics(path)
    with pytest.raises(SystemExit, match="no such file"):
        plot_metrics.main([str(tmp_path / "missing")])
