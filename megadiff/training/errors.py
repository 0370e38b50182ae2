"""How a run ends when something is wrong: the reason first, and at once on every rank."""

import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from megadiff.checkpoint.ranks import CheckpointError
from megadiff.config import ConfigError
from megadiff.data.indexed_dataset import DataError
from megadiff.libraries import LibraryError
from megadiff.parallel.failure import announce_failure


class NotFiniteError(RuntimeError):
    """Too many steps in a row whose loss or gradient is not finite; the message says where."""


USER_ERRORS = (ConfigError, DataError, LibraryError, CheckpointError, NotFiniteError)
"""What a user can mend: told in one line, without a traceback."""


def run(main: Callable[[list[str]], None], argv: list[str]) -> NoReturn:
    """Call `main(argv)` and exit: 0 when it returns, 2 after a user's error, 1 after any other.

    An error waits for nothing: other ranks' collectives fail as soon as this process is gone, and
    torchrun ends them.
    """
    try:
        main(argv)
        sys.exit(0)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except USER_ERRORS as error:
        code = 2
        wait_for_first_rank()
        print(f"error: {error}", file=sys.stderr)
    except BaseException as error:
        code = 1
        rank = os.environ.get("RANK")
        where = f"rank {rank}: " if rank is not None else ""
        if rank is None and isinstance(error, BrokenPipeError) and _reader_left():
            os._exit(128 + signal.SIGPIPE)
        text = (rank is not None and _lost_rank(error)) or traceback.format_exc()
        print(f"{where}{text}", file=sys.stderr, end="")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        announce_failure()
    os._exit(code)


def _reader_left() -> bool:
    """Whether what this process prints goes into a pipe without a reader, as `| head` leaves it."""
    hung_up = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, TypeError):  # closed, or no file of the system
            hung_up.register(stream, 0)
    return bool(hung_up.poll(0))


def _lost_rank(error: BaseException) -> str | None:
    """One line where `error` only says that another rank is gone, which has told its own reason."""
    text = str(error)
    if not re.search(r"Connection (closed|reset) by peer|Broken pipe", text):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "megadiff" in f.filename]
    place = f" in {ours[-1].name}, {ours[-1].filename}:{ours[-1].lineno}" if ours else ""
    return f"another rank has ended while this one waited for it{place}\n"


def wait_for_first_rank() -> None:
    """Let the node's first rank speak alone where all ranks have the same error.

    The others wait a moment, in which torchrun ends them if the first rank has failed too.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1.5)
