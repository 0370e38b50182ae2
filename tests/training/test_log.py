"""What a run says, and where it goes."""

import json
import logging
import math
import sys
from contextlib import closing
from pathlib import Path

import pytest

from megadiff.config import Config, LoggingConfig
from megadiff.libraries import LibraryError
from megadiff.training.log import RunLog


@pytest.mark.parametrize("main", [True, False])
def test_what_the_library_says_is_in_the_log_of_the_main_rank(
    main: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(Config(logging=LoggingConfig(log_dir=str(tmp_path / "log"))), main)
    logging.getLogger("megadiff.kernels").info("delta rule: %s", "torch")
    log.close()
    logging.getLogger("megadiff.kernels").info("after the run")
    assert capsys.readouterr().out == (" delta rule: torch\n" if main else "")
    if main:
        assert (tmp_path / "log" / "log.txt").read_text() == " delta rule: torch\n"


VALUES = {"lm_loss": 2.5, "grad_norm": math.inf, "lambda": {"0": 0.25}}


def log_to(tmp_path: Path, **more: str) -> RunLog:
    settings = LoggingConfig(
        log_dir=str(tmp_path / "log"), tensorboard_dir=str(tmp_path / "tb"), **more
    )
    return RunLog(Config(logging=settings), main=True)


def test_numbers_are_json_on_a_line_each(tmp_path: Path) -> None:
    with closing(log_to(tmp_path)) as log:
        log.record("train", 3, VALUES)
    with closing(log_to(tmp_path)) as log:  # a resumed run appends
        log.record("validation", 4, {"lm_loss": 1.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {"kind": "train", "iteration": 3, **VALUES, "grad_norm": None}
    assert second == {"kind": "validation", "iteration": 4, "lm_loss": 1.5}


def test_numbers_are_tensorboard_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(log_to(tmp_path)) as log:
        log.record("train", 3, VALUES)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {"train/lm_loss", "train/lambda/0"} <= set(events.Tags()["scalars"])
    (point,) = events.Scalars("train/lm_loss")
    assert (point.step, point.value) == (3, 2.5)


def test_weights_and_biases_is_asked_for_and_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple] = []

    class Run:
        def log(self, values: dict, step: int) -> None:
            calls.append((values, step))

        def finish(self) -> None:
            calls.append(("finish",))

    class Library:
        @staticmethod
        def init(project: str, name: str | None, config: dict) -> Run:
            calls.append((project, name, config["logging"]["wandb_project"]))
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Library)
    with closing(log_to(tmp_path)) as log:
        log.record("train", 3, {"lm_loss": 2.5})
    assert calls == []
    with closing(log_to(tmp_path, wandb_project="diff")) as log:
        log.record("train", 3, {"lm_loss": 2.5})
    assert calls == [("diff", None, "diff"), ({"train/lm_loss": 2.5}, 3), ("finish",)]


def test_weights_and_biases_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LibraryError, match=r"pip install 'megadiff\[wandb\]'"):
        log_to(tmp_path, wandb_project="diff")
