"""The same outcome on every rank: an error on one is an error on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message says where and why."""


class Ranks:
    """The processes that save and load together: those of `group`, or this one alone.

    With a process group and `group` None it is the default group. Messages go through objects, so a
    gloo group is the right one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, alone: bool = False):
        self.group = group
        self.alone = alone or not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def all(self, what: str, action: Callable[[], T]) -> list[T]:
        """What `action` returned on each rank; CheckpointError on all if it failed on any."""
        result: T | None = None
        error: str | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as exception:  # torch's is no Exception
            error = describe(exception)
            if self.size == 1:
                raise CheckpointError(f"{what}: {error}") from exception
        outcomes: list[Any] = [(error, result)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (error, result), group=self.group)
        errors = {rank: error for rank, (error, _) in enumerate(outcomes) if error is not None}
        if errors:
            everywhere = len(errors) == self.size and len(set(errors.values())) == 1
            raise CheckpointError(f"{what}: {errors[0] if everywhere else _by_rank(errors)}")
        return [result for _, result in outcomes]

    def first(self, what: str, action: Callable[[], T]) -> T:
        """What `action` returned on rank 0, the only one that runs it; its error is everybody's."""
        if self.size == 1:
            return self.all(what, action)[0]
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                outcome = [(None, action())]
            except Exception as exception:
                outcome = [(describe(exception), None)]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(outcome, src=source, group=self.group)
        error, result = outcome[0]
        if error is not None:
            raise CheckpointError(f"{what}: {error}")
        return result


def describe(error: BaseException) -> str:
    """One line about `error`, with the rank where it happened if torch's checkpointing tells it."""
    if isinstance(error, CheckpointException):
        return _by_rank({rank: describe(e) for rank, (e, _) in error.failures.items()})
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _by_rank(errors: dict[int, str]) -> str:
    """Errors with their ranks; the same error is said once."""
    ranks: dict[str, list[int]] = {}
    for rank, error in sorted(errors.items()):
        ranks.setdefault(error, []).append(rank)
    return "; ".join(
        f"{error} (rank {', '.join(map(str, where[:8]))}{', ...' if len(where) > 8 else ''})"
        for error, where in ranks.items()
    )
