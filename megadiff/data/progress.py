"""Progress of long work: one line that is redrawn on a terminal, lines now and then elsewhere."""

import sys
import time

from megadiff.data.preprocess_output import Totals


class Progress:
    """Documents/s, MB/s, tokens/s and the time left of reading `total` bytes (0: not known).

    A line goes to standard error every `log_interval` documents, and on a terminal it is redrawn
    five times a second instead.
    """

    def __init__(self, total: int, log_interval: int) -> None:
        self._total, self._interval = total, log_interval
        self._terminal = sys.stderr.isatty()
        self._shown, self._next = 0.0, 0
        self._first: tuple[float, ...] | None = None

    def update(self, read: int, totals: Totals) -> None:
        """After `read` bytes of the input files."""
        documents = totals.documents
        now = (time.monotonic(), read, documents, totals.text_bytes, totals.tokens)
        if self._first is None:  # what an interrupted run had done does not count as speed
            self._first, self._next = now, documents + self._interval
            return
        due = now[0] - self._shown >= 0.2 if self._terminal else documents >= self._next
        if not due:
            return
        self._shown, self._next = now[0], documents + self._interval
        seconds, *gained = (value - first for value, first in zip(now, self._first, strict=True))
        read_rate, document_rate, byte_rate, token_rate = (x / max(seconds, 1e-9) for x in gained)
        line = (
            f"processed {documents} documents ({document_rate:.0f} docs/s, "
            f"{byte_rate / 1e6:.1f} MB/s, {token_rate:.0f} tokens/s)"
        )
        if self._total and read_rate > 0:
            left = (self._total - read) / read_rate
            line += f", {100 * read / self._total:.1f} %, {clock(left)} left"
        line = f"\r\x1b[K{line}" if self._terminal else f"{line}\n"
        print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
