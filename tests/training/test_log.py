"""What a run says, and where it goes."""

import logging
from pathlib import Path

import pytest

from megadiff.config import Config, LoggingConfig
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
