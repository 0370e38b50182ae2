"""The datasets of a run from data paths, split and sample counts; blends; the cache of indices."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Literal

import numpy as np

from megadiff.data import cache
from megadiff.data.blended_dataset import (
    BlendedDataset,
    BlendOrder,
    blend_size,
    build_blend_order,
    normalize,
    samples_to_request,
)
from megadiff.data.data_path import SPLITS, Blend, parse_blend, parse_split, split_range
from megadiff.data.errors import DataError
from megadiff.data.gpt_dataset import (
    GPTDataset,
    NoSamples,
    PiecewiseDataset,
    SampleOrder,
    build_order,
)
from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.packed_dataset import PackedDataset, PackedOrder, build_packed_order

Dataset = PiecewiseDataset | BlendedDataset

Packing = Literal["concat", "best-fit"]
"""How documents fill samples: one after another (Megatron), or whole (`packed_dataset`)."""

_LARGE = 10_000_000  # entries of an index from which its making is announced


@dataclass(frozen=True)
class _Split:
    """What all datasets of a split share; it reads the sequences `fractions` of each."""

    name: str  # for messages
    fractions: tuple[float, float]
    seq_length: int
    seed: int
    cache_path: str | None
    mmap: bool
    packing: Packing

    def open(self, prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, mmap=self.mmap, cache_path=self.cache_path)


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
    packing: Packing = "concat",
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The three datasets of a run.

    Give `data_path` with `split` (a list of words as in `--data-path`), or the lists of the three
    splits. `samples` says how many samples each split must hold (None: one epoch; 0: not needed,
    the split is None). A share of `split` for validation or test without a sample is left out with
    a note. `seq_length` in tokens. Every process builds the same; with `cache_path` one process per
    disk builds the index and the others map it. Raises DataError for anything that is not as it
    should be.
    """
    paths = (train_data_path, valid_data_path, test_data_path)
    parts: Sequence[tuple[float, float] | None] = [(0.0, 1.0)] * 3
    if data_path is not None:
        if any(path is not None for path in paths):
            raise DataError("give --data-path, or --train/valid/test-data-path, not both")
        if split is None:
            raise DataError("--data-path needs --split, for example 969,30,1")
        paths, parts = (data_path,) * 3, parse_split(split)
    elif split is not None:
        raise DataError("--split belongs to --data-path; per-split paths are used whole")
    blends = [None if words is None else parse_blend(words) for words in paths]
    datasets: list[Dataset | None] = [None, None, None]
    for number, (blend, part, wanted) in enumerate(zip(blends, parts, samples, strict=True)):
        if blend is None or part is None or wanted == 0:
            continue
        name = SPLITS[number]
        try:
            shared = _Split(name, part, seq_length, seed, cache_path, mmap, packing)
            datasets[number] = _build(blend, shared, wanted)
        except NoSamples as error:
            if data_path is None or number == 0:
                raise
            note(f"no {name} set: {error}")
    return tuple(datasets)  # type: ignore[return-value]


def _build(blend: Blend, split: _Split, samples: int | None) -> Dataset:
    if len(blend.prefixes) == 1:
        return _build_source(blend.prefixes[0], split, samples)
    blend = _without_empty(blend, split, samples is None)
    if blend.weights is None:
        datasets = [_build_source(prefix, split, None) for prefix in blend.prefixes]
        sizes = [len(dataset) for dataset in datasets]
        size = sum(sizes) if samples is None else min(samples, sum(sizes))
        return _blend(datasets, normalize(sizes), size, split.cache_path)
    if samples is None:
        raise DataError(f"a weighted blend for {split.name} needs a number of samples")
    weights = normalize(blend.weights)
    datasets = [
        _build_source(prefix, split, samples_to_request(weight, samples))
        for prefix, weight in zip(blend.prefixes, weights, strict=True)
    ]
    return _blend(datasets, weights, blend_size(weights, samples), split.cache_path)


def _without_empty(blend: Blend, split: _Split, one_epoch: bool) -> Blend:
    """The blend without datasets that give this split no sample; others take over their share."""
    whole = split.packing == "concat" and (one_epoch or blend.weights is None)
    least = split.seq_length + 1 if whole else 2
    kept = []
    for prefix in blend.prefixes:
        lengths = split.open(prefix).lengths
        first, last = split_range(split.fractions, len(lengths))
        kept.append(lengths[first:last].sum(dtype=np.int64) >= least)
        if not kept[-1]:
            note(f"{prefix} has nothing for the {split.name} split and is left out of its blend")
    if not any(kept):
        raise NoSamples(
            f"no dataset of the {split.name} blend has data for this split; change --split"
        )
    weights = None if blend.weights is None else tuple(compress(blend.weights, kept))
    return Blend(tuple(compress(blend.prefixes, kept)), weights)


def _build_source(prefix: str, split: _Split, samples: int | None) -> PiecewiseDataset:
    dataset = split.open(prefix)
    first, last = sequences = split_range(split.fractions, len(dataset))
    packed = split.packing == "best-fit"
    key = {
        "kind": "PackedDataset" if packed else "GPTDataset",
        "lengths": cache.digest(dataset.lengths) if split.cache_path else None,
        "sequences": sequences,
        "samples": samples,
        "seq_length": split.seq_length,
        "seed": split.seed,
    }

    def make() -> dict[str, np.ndarray]:
        where = f"{prefix}, {split.name} split (sequences {first} to {last})"
        build = build_packed_order if packed else build_order
        with _announced(f"the sample order of {where}", last - first):
            try:
                order = build(dataset.lengths, sequences, samples, split.seq_length, split.seed)
            except NoSamples as error:
                raise NoSamples(
                    f"{where}: {error}; change --split or give the split data of its own"
                ) from None
        return vars(order)

    arrays = cache.load_or_make(split.cache_path, key, make)
    if packed:
        return PackedDataset(dataset, PackedOrder(**arrays), split.seq_length)
    return GPTDataset(dataset, SampleOrder(**arrays), split.seq_length)


def _blend(
    datasets: Sequence[PiecewiseDataset], weights: Sequence[float], size: int, folder: str | None
) -> BlendedDataset:
    """`size` samples of `datasets` by normalized `weights`."""
    key = {"kind": "BlendedDataset", "weights": list(weights), "size": size}

    def make() -> dict[str, np.ndarray]:
        with _announced(f"a blend of {len(weights)} datasets", size):
            return vars(build_blend_order(weights, size))

    order = BlendOrder(**cache.load_or_make(folder, key, make))
    used = np.bincount(order.dataset_index, minlength=len(datasets))
    for dataset, count in zip(datasets, used, strict=True):
        if count > len(dataset):
            raise DataError(
                f"the blend reads {count} samples of {dataset.dataset.prefix}, which has "
                f"{len(dataset)}"
            )
    return BlendedDataset(datasets, order)


@contextmanager
def _announced(what: str, entries: int) -> Iterator[None]:
    """Says when a large index is being made and how long it took."""
    began, large = time.monotonic(), entries >= _LARGE
    if large:
        _say(f"making {what}, {entries} entries")
    yield
    if large:
        _say(f"made {what} in {time.monotonic() - began:.0f} s")


def note(line: str) -> None:
    """Say what every process of the run finds alike, once."""
    if os.environ.get("RANK", "0") == "0":
        _say(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
