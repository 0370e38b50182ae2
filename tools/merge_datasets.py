#!/usr/bin/env python3
"""Join `.bin/.idx` datasets, one after another, into one."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, refuse_existing
from megadiff.data.inputs import natural_key
from megadiff.data.preprocess_output import exclusive
from tools.common import run


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="prefixes of datasets, or folders whose datasets are taken in natural order",
    )
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args(words)


def find_prefixes(words: list[str]) -> list[str]:
    """Prefixes that `--input` names; a folder must hold whole pairs only."""
    prefixes: list[str] = []
    for word in words:
        if not Path(word).is_dir():
            prefixes.append(word)
            continue
        files = [p for p in Path(word).iterdir() if p.suffix in (".bin", ".idx")]
        found = sorted({str(path.with_suffix("")) for path in files}, key=natural_key)
        if not found:
            raise DataError(f"--input {word}: no .bin/.idx pair in this folder")
        prefixes += found
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            raise DataError(f"--input names {prefix} more than once")
    return prefixes


def merge(arguments: argparse.Namespace) -> int:
    """Write the datasets of `--input` one after another to `--output-prefix`."""
    output = arguments.output_prefix
    prefixes = find_prefixes(arguments.input)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if any(Path(p + ".idx").resolve() == Path(output + ".idx").resolve() for p in prefixes):
        raise DataError(f"--output-prefix {output} is one of the inputs")
    refuse_existing([output], arguments.overwrite)
    with exclusive(output), IndexedDatasetBuilder(output, datasets[0].dtype) as builder:
        for number, dataset in enumerate(datasets, 1):
            builder.add_dataset(dataset)
            print(f"{number}/{len(datasets)}: {dataset.prefix}, {len(dataset)} sequences")
    print(f"wrote {output}: {IndexedDataset(output).document_count} documents")
    return 0


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run("merge_datasets", lambda: merge(arguments))


if __name__ == "__main__":
    sys.exit(main())
