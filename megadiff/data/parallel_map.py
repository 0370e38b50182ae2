"""A function over items in several processes, results in the order of the items."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    initializer: Callable[..., None],
    initargs: tuple[Any, ...],
) -> Iterator[Result]:
    """Results of `function` for each of `items`, in order; items are taken as workers need them.

    With one worker everything runs in this process. An exception of a worker, or its death, ends
    the iteration with an exception, and no process outlives this one.
    """
    if workers == 1:
        initializer(*initargs)
        yield from map(function, items)
        return
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(initializer, initargs),
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(initializer: Callable[..., None], initargs: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    initializer(*initargs)
