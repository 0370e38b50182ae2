"""What the command lines of the data tools share."""

import argparse
import signal
import sys
from collections.abc import Callable

from megadiff.data.tokenizers import TYPES, TokenizerSettings


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", choices=TYPES, required=required)
    group.add_argument(
        "--tokenizer-model", help="SentencePiece model, tokenizer.json, tiktoken ranks"
    )
    group.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, help="of NullTokenizer")
    group.add_argument("--tiktoken-pattern", choices=["cl100k", "o200k"], default="cl100k")


def tokenizer_settings(arguments: argparse.Namespace) -> TokenizerSettings:
    """What the flags of `add_tokenizer_flags` say."""
    return TokenizerSettings.of(arguments, arguments.vocab_size)


def run(tool: str, work: Callable[[], int], interrupted: str = "interrupted") -> int:
    """The exit status of `work`; what a user can mend is said in one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: work is kept
    try:
        return work()
    except BrokenPipeError:  # into head, for example; the rest of the work was not done
        return 128 + signal.SIGPIPE  # as of a program that the closed pipe ended
    except (ValueError, OSError) as error:  # DataError, ConfigError, LibraryError are ValueErrors
        print(f"{tool}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{tool}: {interrupted}", file=sys.stderr)
        return 130
