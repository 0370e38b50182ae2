"""Reasons to stop before the last step, on which all ranks agree at a step's boundary."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

from megadiff.config import TrainingConfig
from megadiff.training.setup import Environment

_SECOND_SIGNAL = 3.0  # seconds: torchrun repeats a terminal's signal at once, a person later


@dataclass
class StopRequests:
    """What this rank has seen: the first signal to stop, and the time."""

    exit_duration: float | None  # seconds
    started: float = field(default_factory=time.monotonic)
    signal: int | None = None
    signalled: float = 0.0

    @classmethod
    @contextmanager
    def install(cls, config: TrainingConfig) -> Iterator["StopRequests"]:
        """Catch SIGTERM, SIGINT and SIGUSR1 from here on; a second, seconds later, ends at once.

        SIGUSR1 is what clusters send ahead of a time limit.
        """
        minutes = config.exit_duration_in_mins
        requests = cls(None if minutes is None else 60 * minutes)
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, requests._handle) for number in signals}
        try:
            yield requests
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.signalled = number, now
        elif now - self.signalled > _SECOND_SIGNAL:
            os._exit(128 + number)

    @property
    def expired(self) -> bool:
        limit = self.exit_duration
        return limit is not None and time.monotonic() - self.started > limit


@dataclass(frozen=True)
class Agreement:
    """What all ranks know together before a global batch."""

    tokens: int  # unmasked tokens of the global batch
    stop: str | None  # why to stop now, the same on every rank


def agree(tokens: int, requests: StopRequests, env: Environment) -> Agreement:
    """The unmasked tokens of the global batch, and whether to stop; one message between hosts.

    `tokens` are this rank's, and also those of the ranks that read the same samples.
    """
    seen = torch.tensor([tokens, requests.signal is not None, requests.expired], dtype=torch.int64)
    if env.control is not None:
        dist.all_reduce(seen, group=env.control)
    total, signalled, expired = seen.tolist()
    stop = "signal" if signalled else "exit duration" if expired else None
    return Agreement(total // (env.mesh.world_size // env.mesh.dp.size), stop)
