"""Where a run's words and numbers go: the terminal, log.txt, metrics.jsonl, TensorBoard, W&B."""

import json
import logging
import math
from pathlib import Path
from typing import Any, TextIO

from megadiff.config import Config, ConfigError, to_dict, to_yaml
from megadiff.libraries import need_library


class RunLog:
    """Written by the main rank alone; on the others every method does nothing.

    `log_dir` gets log.txt, metrics.jsonl (one object for each log line, its numbers in full) and
    config.yaml. A resumed run appends.
    """

    def __init__(self, config: Config, main: bool) -> None:
        self._main = main
        self._text: TextIO | None = None
        self._metrics: TextIO | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._notices = _Notices(self)
        if not main:  # warnings of other ranks go to the standard error
            return
        settings = config.logging
        try:
            if settings.log_dir is not None:
                folder = Path(settings.log_dir)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
                self._text = (folder / "log.txt").open("a", encoding="utf-8")
                self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
            if settings.tensorboard_dir is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(settings.tensorboard_dir)
        except OSError as error:
            raise ConfigError(f"cannot log to {error.filename}: {error.strerror}") from None
        if settings.wandb_project is not None:
            self._wandb = _start_wandb(config)
        _LIBRARY.addHandler(self._notices)
        _LIBRARY.setLevel(logging.INFO)

    def line(self, text: str) -> None:
        """Text for people."""
        if not self._main:
            return
        print(text, flush=True)
        if self._text is not None:
            self._text.write(text + "\n")
            self._text.flush()

    def record(self, kind: str, iteration: int, values: dict[str, Any]) -> None:
        """Numbers for programs: `kind` is "train", "validation" or "test"."""
        if self._metrics is not None:
            entry = {"kind": kind, "iteration": iteration, **_finite(values)}
            self._metrics.write(json.dumps(entry, allow_nan=False) + "\n")
            self._metrics.flush()
        numbers = {
            f"{kind}/{key}": float(value)
            for key, value in _flatten(values).items()
            if isinstance(value, (int, float))
        }
        if self._tensorboard is not None:
            for tag, value in numbers.items():
                self._tensorboard.add_scalar(tag, value, iteration)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=iteration)

    def close(self) -> None:
        _LIBRARY.removeHandler(self._notices)
        for sink in (self._text, self._metrics, self._tensorboard):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()


_LIBRARY = logging.getLogger("megadiff")


class _Notices(logging.Handler):
    """What the library says while it works, such as which kernels run."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.line(f" {record.getMessage()}")


def _finite(value: Any) -> Any:
    """With None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, keys joined with a slash."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


def _start_wandb(config: Config) -> Any:
    settings = config.logging
    return need_library("wandb", "--wandb-project", "wandb").init(
        project=settings.wandb_project, name=settings.wandb_exp_name, config=to_dict(config)
    )
