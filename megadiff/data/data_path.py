"""Megatron's words for data: lists of `--data-path`, files that hold such lists, `--split`."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from megadiff.data.blended_dataset import normalize
from megadiff.data.errors import DataError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Prefixes of indexed datasets, with weights or (None) in proportion to their size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str]) -> Blend:
    """Megatron's list: `prefix ...`, or `weight prefix weight prefix ...`.

    It is a weighted list when there is an even number of words and a number at every even place.
    """
    if not words:
        raise DataError("an empty list of data paths")
    if len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        weights = tuple(float(word) for word in words[::2])
        normalize(weights)
        blend = Blend(tuple(words[1::2]), weights)
    else:
        numbers = [w for w in words if _is_number(w) and not Path(w + ".idx").exists()]
        if numbers:
            raise DataError(
                f"--data-path {' '.join(words)}: {numbers[0]} looks like a weight, but weights and "
                "prefixes do not alternate; give `weight prefix weight prefix ...` or only prefixes"
            )
        blend = Blend(tuple(words))
    for prefix in blend.prefixes:
        if blend.prefixes.count(prefix) > 1:
            raise DataError(
                f"--data-path names {prefix} twice; give it once with the sum of weights"
            )
    return blend


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def parse_split(split: str) -> tuple[tuple[float, float] | None, ...]:
    """`969,30,1` as (begin, end) fractions for train, valid, test; None for a part of weight 0."""
    words = [word.strip() for word in re.split("[,/]", split)]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise DataError(f"--split {split}: give up to three numbers, as in 969,30,1") from None
    if len(weights) > 3:
        raise DataError(
            f"--split {split}: {len(weights)} numbers, at most three (train,valid,test)"
        )
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) == 0:
        raise DataError(f"--split {split}: numbers must be 0 or more, and one of them above 0")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    bounds = pairwise(accumulate((weight / total for weight in weights), initial=0.0))
    return tuple(part if weight > 0 else None for weight, part in zip(weights, bounds, strict=True))


def split_range(fractions: tuple[float, float], count: int) -> tuple[int, int]:
    """Sequences `[first, last)` of `count`, rounded as Megatron does."""
    begin, end = fractions
    return round(begin * float(count)), round(end * float(count))


def read_data_args(path: str) -> list[str]:
    """The words of a `--data-args-path` file: as after `--data-path`, on any number of lines."""
    words = _read(path).split()
    if not words:
        raise DataError(f"{path}: no data paths in it")
    return words


def read_per_split_data_args(path: str) -> dict[str, list[str] | None]:
    """The lists for train, valid and test of a `--per-split-data-args-path` file (JSON)."""
    text = _read(path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict) or not set(values) <= set(SPLITS):
        raise DataError(f"{path}: an object with the keys {', '.join(SPLITS)} is needed")
    lists: dict[str, list[str] | None] = {}
    for name in SPLITS:
        value = values.get(name)
        if isinstance(value, str):
            value = value.split()
        if value is not None and not isinstance(value, list):
            raise DataError(f"{path}: {name} is not a list")
        lists[name] = [str(word) for word in value] if value else None
    return lists


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', error)}") from None
