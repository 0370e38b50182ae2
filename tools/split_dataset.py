#!/usr/bin/env python3
"""Cut a `.bin/.idx` dataset into several, by documents in their order."""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.data_path import SPLITS, parse_split, split_range
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, refuse_existing
from megadiff.data.preprocess_output import exclusive
from tools.common import run


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="prefix of the dataset")
    parser.add_argument("--output-prefix", required=True, help="of PREFIX_train, ..., or PREFIX_0")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--split", help="shares of documents for train, valid and test: 969,30,1")
    group.add_argument("--shards", type=int, help="number of parts with about as many tokens each")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args(words)


def parts_by_share(dataset: IndexedDataset, split: str) -> dict[str, tuple[int, int]]:
    """Documents `[first, last)` of each part of `split` that is not 0."""
    return {
        name: split_range(part, dataset.document_count)
        for name, part in zip(SPLITS, parse_split(split), strict=True)
        if part is not None
    }


def parts_by_tokens(dataset: IndexedDataset, shards: int) -> dict[str, tuple[int, int]]:
    """Documents `[first, last)` of `shards` parts of about equal numbers of tokens."""
    if not 1 <= shards <= dataset.document_count:
        raise DataError(f"--shards {shards}: the dataset has {dataset.document_count} documents")
    before = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
    ends = before[dataset.documents[1:]]  # tokens up to the end of each document
    targets = before[-1] * np.arange(1, shards) / shards
    cuts = [0, *(np.searchsorted(ends, targets) + 1).tolist(), dataset.document_count]
    for number in range(1, shards):  # every part has a document
        cuts[number] = min(max(cuts[number], cuts[number - 1] + 1), cuts[-1] - (shards - number))
    return {str(i): (cuts[i], cuts[i + 1]) for i in range(shards)}


def split(arguments: argparse.Namespace) -> int:
    """Write each part as `PREFIX_NAME`."""
    dataset, prefix = IndexedDataset(arguments.input), arguments.output_prefix
    if arguments.split is not None:
        parts = parts_by_share(dataset, arguments.split)
    else:
        parts = parts_by_tokens(dataset, arguments.shards)
    outputs = [f"{prefix}_{name}" for name in parts]
    source = Path(arguments.input + ".idx").resolve()
    if any(Path(output + ".idx").resolve() == source for output in outputs):
        raise DataError(f"--input {arguments.input} is one of the outputs")
    refuse_existing(outputs, arguments.overwrite)
    for output, (first, last) in zip(outputs, parts.values(), strict=True):
        with exclusive(output), IndexedDatasetBuilder(output, dataset.dtype) as builder:
            for document in range(first, last):
                begin, end = dataset.documents[document : document + 2].tolist()
                for sequence in range(begin, end):
                    builder.add_sequence(dataset[sequence])
                builder.end_document()
        print(f"wrote {output}: documents {first} to {last}")
    return 0


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run("split_dataset", lambda: split(arguments))


if __name__ == "__main__":
    sys.exit(main())
