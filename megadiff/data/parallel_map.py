"""A function over items in several processes, results in the order of the items."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megadiff.data.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

_function: Callable[[Any], Any]  # of a worker process, made once when it starts


def ordered_map(
    make_function: Callable[..., Callable[[Item], Result]],
    arguments: tuple[Any, ...],
    items: Iterable[Item],
    workers: int,
) -> Iterator[Result]:
    """Results of `make_function(*arguments)` for each of `items`, in order.

    The function is made once in each of `workers` processes (with one worker, in this one); items
    are taken as workers need them. An exception of a worker, or its death, ends the iteration with
    an exception, and no worker outlives this process.
    """
    if workers == 1:
        yield from map(make_function(*arguments), items)
        return
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(make_function, arguments),
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            # a worker that this starts inherits the mask: an interrupt is for the parent to decide
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                pending.append(executor.submit(_call, item))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, most likely for memory: use fewer --workers"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(make_function: Callable[..., Callable], arguments: tuple[Any, ...]) -> None:
    global _function
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    _function = make_function(*arguments)


def _call(item: Any) -> Any:
    return _function(item)
