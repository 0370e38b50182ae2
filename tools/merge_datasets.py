#!/usr/bin/env python3
"""Join `.bin/.idx` datasets, one after another, into one."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megadiff.data.inputs import natural_key


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


def merge(inputs: list[str], output_prefix: str, overwrite: bool) -> IndexedDataset:
    """Write the datasets `inputs` one after another to `output_prefix`."""
    prefixes = find_prefixes(inputs)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if any(Path(p + ".idx").resolve() == Path(output_prefix + ".idx").resolve() for p in prefixes):
        raise DataError(f"--output-prefix {output_prefix} is one of the inputs")
    if Path(output_prefix + ".idx").exists() and not overwrite:
        raise DataError(f"{output_prefix}.idx exists; give --overwrite to replace it")
    with IndexedDatasetBuilder(output_prefix, datasets[0].dtype) as builder:
        for number, dataset in enumerate(datasets, 1):
            builder.add_dataset(dataset)
            print(f"{number}/{len(datasets)}: {dataset.prefix}, {len(dataset)} sequences")
    return IndexedDataset(output_prefix)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        merged = merge(arguments.input, arguments.output_prefix, arguments.overwrite)
    except (DataError, OSError) as error:
        print(f"merge_datasets: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.output_prefix}: {merged.document_count} documents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
