"""From `--data-path` and `--split` to the datasets of a run: parsing, splits, blends, cache."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.data import cache
from megadiff.data.blended_dataset import (
    BlendedDataset,
    BlendOrder,
    blend_size,
    build_blend_order,
    normalize,
    samples_to_request,
)
from megadiff.data.gpt_dataset import GPTDataset, SampleOrder, build_order
from megadiff.data.indexed_dataset import DataError, IndexedDataset

SPLITS = ("train", "valid", "test")

Dataset = GPTDataset | BlendedDataset


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
    bookends = [0.0]
    for weight in weights:
        bookends.append(bookends[-1] + weight / total)
    return tuple(
        (bookends[i], bookends[i + 1]) if weights[i] > 0 else None for i in range(len(weights))
    )


def split_range(fractions: tuple[float, float], count: int) -> tuple[int, int]:
    """Sequences `[first, last)` of `count`, rounded as Megatron does."""
    begin, end = fractions
    return round(begin * float(count)), round(end * float(count))


@dataclass(frozen=True)
class DataSettings:
    """What all datasets of a run share."""

    seq_length: int
    seed: int
    cache_path: str | None = None
    mmap: bool = True


def build_train_valid_test_datasets(
    *,
    samples: tuple[int | None, int | None, int | None],
    seq_length: int,
    seed: int,
    data_path: Sequence[str] | None = None,
    split: str | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    cache_path: str | None = None,
    mmap: bool = True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The three datasets of a run.

    Give `data_path` with `split` (a list of words as in `--data-path`), or the lists of the three
    splits. `samples` says how many samples each split must hold (None: one epoch; 0: not needed,
    the split is None). `seq_length` in tokens. Every process builds the same; with `cache_path` one
    process per disk builds the index and the others map it. Raises DataError for anything that is
    not as it should be.
    """
    settings = DataSettings(seq_length, seed, cache_path, mmap)
    per_split = (train_data_path, valid_data_path, test_data_path)
    if data_path is not None:
        if any(path is not None for path in per_split):
            raise DataError("give --data-path, or --train/valid/test-data-path, not both")
        if split is None:
            raise DataError("--data-path needs --split, for example 969,30,1")
        blend = parse_blend(data_path)
        fractions = parse_split(split)
        return tuple(  # type: ignore[return-value]
            _build(blend, name, part, wanted, settings)
            for name, part, wanted in zip(SPLITS, fractions, samples, strict=True)
        )
    if split is not None:
        raise DataError("--split belongs to --data-path; per-split paths are used whole")
    return tuple(  # type: ignore[return-value]
        None if words is None else _build(parse_blend(words), name, (0.0, 1.0), wanted, settings)
        for name, words, wanted in zip(SPLITS, per_split, samples, strict=True)
    )


def _build(
    blend: Blend,
    name: str,
    fractions: tuple[float, float] | None,
    samples: int | None,
    settings: DataSettings,
) -> Dataset | None:
    if fractions is None or samples == 0:
        return None
    if len(blend.prefixes) == 1:
        return build_gpt_dataset(blend.prefixes[0], name, fractions, samples, settings)
    if blend.weights is None:
        datasets = [build_gpt_dataset(p, name, fractions, None, settings) for p in blend.prefixes]
        sizes = [len(dataset) for dataset in datasets]
        size = sum(sizes) if samples is None else min(samples, sum(sizes))
        return blend_datasets(datasets, normalize(sizes), size, settings)
    if samples is None:
        raise DataError(f"a weighted blend for {name} needs a number of samples")
    weights = normalize(blend.weights)
    datasets = [
        build_gpt_dataset(p, name, fractions, samples_to_request(w, samples), settings)
        for p, w in zip(blend.prefixes, weights, strict=True)
    ]
    return blend_datasets(datasets, weights, blend_size(weights, samples), settings)


def build_gpt_dataset(
    prefix: str,
    name: str,
    fractions: tuple[float, float],
    samples: int | None,
    settings: DataSettings,
) -> GPTDataset:
    """The dataset of sequences `fractions` of `prefix`; `name` (its split) is for messages."""
    dataset = IndexedDataset(prefix, mmap=settings.mmap)
    sequences = split_range(fractions, len(dataset))
    key = {
        "kind": "GPTDataset",
        "lengths": cache.digest(dataset.lengths) if settings.cache_path else None,
        "sequences": sequences,
        "samples": samples,
        "seq_length": settings.seq_length,
        "seed": settings.seed,
    }

    def make() -> dict:
        try:
            order = build_order(
                dataset.lengths, sequences, samples, settings.seq_length, settings.seed
            )
        except DataError as error:
            raise DataError(
                f"{prefix}, {name} split (sequences {sequences[0]} to {sequences[1]} of "
                f"{len(dataset)}): {error}; change --split or give the split data of its own"
            ) from None
        return vars(order)

    order = SampleOrder(**cache.load_or_make(settings.cache_path, key, make))
    return GPTDataset(dataset, order, settings.seq_length)


def blend_datasets(
    datasets: Sequence[GPTDataset], weights: Sequence[float], size: int, settings: DataSettings
) -> BlendedDataset:
    """`size` samples of `datasets` by normalized `weights`."""
    key = {"kind": "BlendedDataset", "weights": list(weights), "size": size}
    arrays = cache.load_or_make(
        settings.cache_path, key, lambda: vars(build_blend_order(weights, size))
    )
    order = BlendOrder(**arrays)
    for number, dataset in enumerate(datasets):
        used = order.dataset_sample_index[order.dataset_index == number]
        if len(used) and int(used[-1]) >= len(dataset):
            raise DataError(
                f"the blend reads {int(used[-1]) + 1} samples of {dataset.dataset.prefix}, which "
                f"has {len(dataset)}"
            )
    return BlendedDataset(datasets, order)
