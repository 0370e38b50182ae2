"""How a run ends: exit codes, and the reason on standard error."""

import errno
import os
import signal
import sys
from typing import NoReturn

import pytest

from megadiff.checkpoint.ranks import CheckpointError
from megadiff.config import ConfigError
from megadiff.data.indexed_dataset import DataError
from megadiff.libraries import LibraryError
from megadiff.training import errors


class Exited(BaseException):
    pass


def end(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int:
    """The exit code of a run whose main raises `error`."""

    def leave(code: int) -> NoReturn:
        raise Exited(code)

    def main(argv: list[str]) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited) as exited:
        errors.run(main, [])
    return exited.value.args[0]


@pytest.mark.parametrize("kind", [ConfigError, DataError, LibraryError, CheckpointError])
def test_what_a_user_can_mend_is_one_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert end(monkeypatch, kind("--lr is missing")) == 2
    assert capsys.readouterr().err == "error: --lr is missing\n"


def test_anything_else_is_a_traceback_with_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert end(monkeypatch, ZeroDivisionError("by zero")) == 1
    text = capsys.readouterr().err
    assert text.startswith("rank 3: Traceback") and "ZeroDivisionError: by zero" in text


def test_a_run_that_returns_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, None) == 0


def test_help_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, SystemExit(0)) == 0


def test_a_rank_that_lost_another_leaves_the_reason_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1234")
    assert end(monkeypatch, lost) == 1
    text = capsys.readouterr().err
    assert text.startswith("rank 1: another rank has ended") and "Traceback" not in text


def test_a_reader_that_leaves_ends_the_run_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    broken = BrokenPipeError(errno.EPIPE, "Broken pipe")
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert end(monkeypatch, broken) == 1  # another pipe, such as a storage's
        assert "Broken pipe" in capsys.readouterr().err
        os.close(reader)
        assert end(monkeypatch, broken) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
