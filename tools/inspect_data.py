#!/usr/bin/env python3
"""Look into `.bin/.idx` datasets: documents as text, statistics, damage, differences, a step."""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.blended_dataset import BlendedDataset
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.integrity import difference, document_lengths, problems, statistics
from megadiff.data.tokenizers import Tokenizer, TokenizerSettings
from tools.common import add_tokenizer_flags, run, tokenizer_settings


def parse_arguments(words: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    show = commands.add_parser("show", help="documents as text")
    show.add_argument("prefix")
    show.add_argument("--documents", nargs="+", default=["0-4"], help="numbers, or first-last")
    show.add_argument("--characters", type=int, default=500, help="of each document; 0 for all")
    show.add_argument("--ids", action="store_true", help="token ids as well")
    add_tokenizer_flags(show)

    stats = commands.add_parser("stats", help="counts and document lengths")
    stats.add_argument("prefix", nargs="+")
    stats.add_argument("--histogram", help="picture of the document lengths to write, .png or .svg")

    check = commands.add_parser("check", help="look for damage")
    check.add_argument("prefix", nargs="+")
    check.add_argument(
        "--append-eod", action="store_true", help="documents must end with its token"
    )
    add_tokenizer_flags(check)

    compare = commands.add_parser("compare", help="whether two datasets hold the same")
    compare.add_argument("prefix", nargs=2)

    step = commands.add_parser(
        "step",
        help="which documents a step of training reads",
        description="All other flags are those of the run (--config FILE, --data-path, ...).",
    )
    where = step.add_mutually_exclusive_group(required=True)
    where.add_argument("--step", type=int, help="as the log counts iterations, from 1")
    where.add_argument("--consumed-samples", type=int, help="samples before the step")
    step.add_argument("--characters", type=int, default=80, help="of each document; 0 for all")
    return parser.parse_known_args(words)


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer | None:
    return tokenizer_settings(arguments).build() if arguments.tokenizer_type else None


def open_dataset(word: str) -> IndexedDataset:
    """The dataset of a prefix, or of the name of one of its files."""
    return IndexedDataset(word.removesuffix(".idx").removesuffix(".bin"))


def document_numbers(words: list[str], count: int) -> list[int]:
    """Numbers that `--documents` names; a range is cut at the last document."""
    numbers: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise DataError(f"--documents {word}: a number, or first-last")
        if int(first) >= count:
            raise DataError(f"--documents {word}: there are {count} documents, from 0 on")
        if dash and int(last) < int(first):
            raise DataError(f"--documents {word}: the first comes before the last")
        numbers += range(int(first), min(int(last) if dash else int(first), count - 1) + 1)
    return numbers


def text_of(ids: np.ndarray, tokenizer: Tokenizer | None, characters: int) -> str:
    """Text (or ids without a tokenizer) of one document, cut at `characters`."""
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids.tolist())
    return text if characters == 0 or len(text) <= characters else text[:characters] + "…"


def show(arguments: argparse.Namespace) -> int:
    dataset, tokenizer = open_dataset(arguments.prefix), tokenizer_of(arguments)
    for number in document_numbers(arguments.documents, dataset.document_count):
        ids = dataset.document(number)
        print(f"--- document {number}, {len(ids)} tokens")
        if arguments.ids and tokenizer is not None:
            print(text_of(ids, None, arguments.characters))
        print(text_of(ids, tokenizer, arguments.characters))
    return 0


def stats(arguments: argparse.Namespace) -> int:
    datasets = [open_dataset(prefix) for prefix in arguments.prefix]
    for dataset in datasets:
        print(dataset.prefix)
        for name, value in statistics(dataset).items():
            print(f"  {name} {value:.1f}" if isinstance(value, float) else f"  {name} {value}")
    if arguments.histogram:
        draw_histogram({d.prefix: document_lengths(d) for d in datasets}, arguments.histogram)
        print(f"wrote {arguments.histogram}")
    return 0


def draw_histogram(lengths: dict[str, np.ndarray], path: str) -> None:
    """Document lengths in tokens, one line for each dataset, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max((int(values.max(initial=1)) for values in lengths.values()), default=1)
    edges = np.geomspace(1, longest + 1, 60)
    figure, axes = plt.subplots(figsize=(8, 5))
    for prefix, values in lengths.items():
        axes.hist(values[values > 0], bins=list(edges), histtype="step", label=Path(prefix).name)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a document", ylabel="documents")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def check(arguments: argparse.Namespace) -> int:
    tokenizer = tokenizer_of(arguments)
    if arguments.append_eod and (tokenizer is None or tokenizer.eod is None):
        raise DataError("--append-eod needs a tokenizer with an end-of-document token")
    vocab_size = tokenizer.vocab_size if tokenizer else None
    eod = tokenizer.eod if tokenizer and arguments.append_eod else None
    damaged = False
    for prefix in arguments.prefix:
        try:
            found = list(problems(open_dataset(prefix), vocab_size, eod))
        except DataError as error:
            found = [str(error)]
        damaged |= bool(found)
        print(f"{prefix}: {'; '.join(found) or 'whole'}")
    return int(damaged)


def compare(arguments: argparse.Namespace) -> int:
    found = difference(*(open_dataset(prefix) for prefix in arguments.prefix))
    print(found or "the same")
    return int(found is not None)


def step(arguments: argparse.Namespace, run_flags: list[str]) -> int:
    """Print what each sample of a global batch of training is made of."""
    from megadiff.parallel.mesh import Axis
    from megadiff.training.data import build_data, set_vocabulary
    from tools.prepare_cache import read_run

    config = read_run(run_flags)
    eod = set_vocabulary(config)
    d = config.data
    tokenizer = None
    if d.tokenizer_model or d.vocab_file or d.tokenizer_type == "ByteTokenizer":
        tokenizer = TokenizerSettings.of(d, config.model.vocab_size).build()
    dataset = build_data(config, Axis(), eod).train.dataset
    first = arguments.consumed_samples
    if first is None:
        steps = config.training.train_iters
        assert steps is not None
        if not 1 <= arguments.step <= steps:
            raise DataError(f"--step {arguments.step}: the run has the steps 1 to {steps}")
        first = 0
        for _ in range(1, arguments.step):
            first += config.training.batch_size(first)
    size = config.training.batch_size(first)
    if not 0 <= first <= len(dataset) - size:
        raise DataError(f"samples {first} to {first + size}: the run reads {len(dataset)}")
    for number in range(first, first + size):
        part, sample = dataset, number
        if isinstance(part, BlendedDataset):
            part, sample = part.locate(number)
        print(f"sample {number}: sample {sample} of {part.dataset.prefix}")
        for piece in part.pieces(sample):
            ids = part.dataset.get(piece.sequence, piece.offset, piece.length)
            document = int(np.searchsorted(part.dataset.documents, piece.sequence, "right")) - 1
            where = f"tokens {piece.offset} to {piece.offset + piece.length}"
            text = text_of(ids, tokenizer, arguments.characters)
            print(f"  document {document}, {where}: {text!r}")
    return 0


def main(words: list[str] | None = None) -> int:
    arguments, rest = parse_arguments(words)
    if arguments.command == "step":
        return run("inspect_data", lambda: step(arguments, rest))
    commands = {"show": show, "stats": stats, "check": check, "compare": compare}

    def work() -> int:
        if rest:
            raise DataError(f"unknown words: {' '.join(rest)}")
        return commands[arguments.command](arguments)

    return run("inspect_data", work)


if __name__ == "__main__":
    sys.exit(main())
