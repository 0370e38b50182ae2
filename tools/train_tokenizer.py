#!/usr/bin/env python3
"""Train a SentencePiece tokenizer on raw text."""

import argparse
import heapq
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.data.documents import Problem, read_documents
from megadiff.data.errors import DataError
from megadiff.data.inputs import Position, list_inputs, read_blocks
from tools.common import run


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="as in preprocess_data.py")
    parser.add_argument("--json-key", default="text")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.model, PREFIX.vocab")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model-type", choices=["unigram", "bpe"], default="unigram")
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="unknown characters become bytes, so that any text can be read back",
    )
    parser.add_argument("--character-coverage", type=float, default=0.9995)
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=1 << 30,
        help="text to train on; of a larger corpus documents are drawn at random",
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier tokenizer")
    return parser.parse_args(words)


def read_texts(inputs: list[str], key: str) -> Iterator[str]:
    """All documents of `inputs`; a bad one is an error."""
    for block in read_blocks(list_inputs(inputs), Position(), keys=[key], separator=None):
        for document in read_documents(block, [key], None):
            if isinstance(document, Problem):
                raise DataError(str(document))
            if document[0].strip():
                yield document[0]


def sample_texts(texts: Iterator[str], budget: int, seed: int) -> list[str]:
    """About `budget` bytes of documents, each as likely as any other to be among them.

    Documents get random keys and those with the smallest keep their place while they fit the
    budget.
    """
    rng = random.Random(seed)
    kept: list[tuple[float, str]] = []  # a heap of -key and text: the largest key comes first
    size, limit = 0, 1.0
    for text in texts:
        key = rng.random()
        if key >= limit:
            continue
        heapq.heappush(kept, (-key, text))
        size += len(text.encode())
        while size > budget and len(kept) > 1:
            negative_key, dropped = heapq.heappop(kept)
            size -= len(dropped.encode())
            limit = -negative_key
    return [text for _, text in sorted(kept, reverse=True)]


def train(arguments: argparse.Namespace) -> int:
    import sentencepiece

    if not Path(arguments.output_prefix).parent.is_dir():
        raise DataError(f"--output-prefix {arguments.output_prefix}: its folder does not exist")
    earlier = Path(arguments.output_prefix + ".model")
    if earlier.exists() and not arguments.overwrite:
        raise DataError(f"{earlier} exists; give --overwrite to replace it")
    texts = sample_texts(
        read_texts(arguments.input, arguments.json_key), arguments.sample_bytes, arguments.seed
    )
    if not texts:
        raise DataError("no text in the input")
    part = arguments.output_prefix + ".part"
    sentencepiece.set_random_generator_seed(arguments.seed)
    lines = (line for text in texts for line in _pieces(text))
    # Python would hear of them when the trainer returns, minutes later; there is nothing to keep
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_DFL) for number in signals]
    try:
        sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
            sentence_iterator=lines,
            model_prefix=part,
            vocab_size=arguments.vocab_size,
            model_type=arguments.model_type,
            byte_fallback=arguments.byte_fallback,
            character_coverage=arguments.character_coverage,
            num_threads=arguments.threads,
            normalization_rule_name="identity",  # text comes back as it was
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=1 << 16,
            minloglevel=1,
        )
    except RuntimeError as error:
        most = re.search(r"set it to a value <= (\d+)", str(error))
        if most:
            raise DataError(
                f"--vocab-size {arguments.vocab_size}: this text gives at most {most[1]} pieces"
            ) from None
        raise DataError(f"SentencePiece: {error}") from None
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)
    for suffix in (".model", ".vocab"):
        Path(part + suffix).rename(arguments.output_prefix + suffix)
    print(f"wrote {arguments.output_prefix}.model and .vocab")
    return 0


def _pieces(text: str, length: int = 4096) -> Iterator[str]:
    """Lines of `text`, long ones in pieces: the trainer passes over what is too long for it."""
    for line in text.split("\n"):
        for begin in range(0, len(line), length):
            yield line[begin : begin + length]


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run("train_tokenizer", lambda: train(arguments))


if __name__ == "__main__":
    sys.exit(main())
