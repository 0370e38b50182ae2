#!/usr/bin/env python3
"""Turn raw text into the `.bin/.idx` datasets that training reads."""

import argparse
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.errors import DataError
from megadiff.data.inputs import list_inputs
from megadiff.data.preprocess import PreprocessSettings, Totals, preprocess
from megadiff.data.progress import clock
from tools.common import add_tokenizer_flags, run, tokenizer_settings


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="files (JSON lines, Parquet, .txt; plain, gzip, zstd, xz, bz2), globs, folders, or - "
        "for standard input",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys or columns to read")
    group.add_argument("--input-format", choices=["auto", "jsonl", "text"], default="auto")
    group.add_argument(
        "--document-separator",
        help=r"ends a document of plain text, such as '\n\n\n' (default: a file is one document)",
    )
    group.add_argument("--split-sentences", action="store_true", help="a sequence per sentence")
    group.add_argument("--on-error", choices=["stop", "skip"], default="stop")
    group.add_argument("--max-errors", type=int, default=1000, help="most that skip passes over")

    add_tokenizer_flags(parser, required=True)
    group = parser.add_argument_group("output and work")
    group.add_argument("--append-eod", action="store_true", help="end documents with its token")
    group.add_argument("--bos", action="store_true", help="begin documents with its token")
    group.add_argument(
        "--output-prefix", required=True, help="writes PREFIX_KEY_document.{bin,idx}"
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace output, discard unfinished work of other settings",
    )
    group.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    group.add_argument(
        "--partitions",
        type=int,
        help="times that work is made durable; an interrupted run goes on from the last "
        "(default: every 256 MB of text)",
    )
    group.add_argument(
        "--log-interval", type=int, default=100_000, help="documents between log lines"
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="always so: the output is the same for any number of workers",
    )
    return parser.parse_args(words)


def settings_of(arguments: argparse.Namespace) -> PreprocessSettings:
    if arguments.workers < 1:
        raise DataError(f"--workers {arguments.workers}: at least 1")
    keys = arguments.json_keys
    if len(set(keys)) < len(keys):
        raise DataError(f"--json-keys {' '.join(keys)}: each key once")
    partition_bytes = PreprocessSettings.partition_bytes
    if arguments.partitions is not None:
        if arguments.partitions < 1:
            raise DataError(f"--partitions {arguments.partitions}: at least 1")
        files = [path for path in list_inputs(arguments.input) if path != "-"]
        size = sum(Path(path).stat().st_size for path in files)
        partition_bytes = max(1, size // arguments.partitions)
    given = vars(arguments) | {
        "inputs": arguments.input,
        "tokenizer": tokenizer_settings(arguments),
        "keys": keys,
        "separator": unescaped(arguments.document_separator),
        "partition_bytes": partition_bytes,
    }
    names = {field.name for field in fields(PreprocessSettings)}
    return PreprocessSettings(**{name: given[name] for name in names})


def unescaped(separator: str | None) -> str | None:
    r"""`--document-separator`, in which \n stands for a line end."""
    if separator is None:
        return None
    try:
        text = separator.encode("latin-1", "backslashreplace").decode("unicode_escape")
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(f"--document-separator {separator!r}: {error.reason}") from None
    if not text:
        raise DataError("--document-separator '': at least one character")
    return text


def report(totals: Totals, seconds: float, outputs: list[str]) -> str:
    lines = [
        f"documents {totals.documents} ({totals.empty} empty, left out), skipped {totals.skipped}",
        *(f"  {count} x {reason}" for reason, count in sorted(totals.reasons.items())),
        f"tokens {totals.tokens}, {totals.text_bytes / totals.tokens:.3f} bytes per token, "
        f"longest document {totals.longest} tokens",
        f"time {clock(seconds)}, {totals.text_bytes / seconds / 1e6:.2f} MB/s, "
        f"{totals.tokens / seconds:.0f} tokens/s",
        f"wrote {' '.join(outputs)} (.bin, .idx)",
    ]
    return "\n".join(lines)


def preprocess_and_report(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    settings = settings_of(arguments)
    totals = preprocess(settings)
    print(report(totals, time.monotonic() - began, settings.outputs()))
    return 0


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    interrupted = "interrupted; the same command goes on from here"
    if "-" in arguments.input:  # which cannot be read again
        interrupted = "interrupted; nothing was written"
    return run("preprocess_data", lambda: preprocess_and_report(arguments), interrupted)


if __name__ == "__main__":
    sys.exit(main())
