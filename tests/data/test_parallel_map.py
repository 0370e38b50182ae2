"""Order, early ends and deaths of `ordered_map`."""

import os
import time
from collections.abc import Callable

import pytest

from megadiff.data.errors import DataError
from megadiff.data.parallel_map import ordered_map


def make_slow_square(base: int) -> Callable[[int], tuple[int, int]]:
    def square(x: int) -> tuple[int, int]:
        time.sleep(0.02 * (x % 3))  # later items finish earlier
        if x < 0:
            raise ValueError(f"negative {x}")
        if x == 666:
            os._exit(9)
        return base + x * x, os.getpid()

    return square


def test_results_come_in_order() -> None:
    results = list(ordered_map(make_slow_square, (5,), range(20), workers=2))
    assert [value for value, _ in results] == [5 + x * x for x in range(20)]
    assert len({pid for _, pid in results}) == 2


def test_items_are_taken_as_they_are_needed() -> None:
    taken = []

    def items():
        for x in range(1000):
            taken.append(x)
            yield x

    results = ordered_map(make_slow_square, (0,), items(), workers=2)
    next(results)
    assert len(taken) < 20
    results.close()  # type: ignore[attr-defined]


def test_errors_and_deaths_are_raised_at_once() -> None:
    with pytest.raises(ValueError, match="negative -1"):
        list(ordered_map(make_slow_square, (0,), [1, -1, 2], workers=2))
    with pytest.raises(DataError, match="a worker process was killed"):
        list(ordered_map(make_slow_square, (0,), [1, 666, 2], workers=2))
