#!/usr/bin/env python3
"""Convert weights between megadiff checkpoints and other formats.

    python tools/convert.py to-hf --load runs/x/checkpoints --output exported
    python tools/convert.py from-hf --input exported --output checkpoints
    python tools/convert.py llama-to-diff --input llama --output checkpoints --variant v2 --exact
    python tools/convert.py from-plain --input model.pt --output checkpoints

One process, without a process group, one tensor in memory at a time, whatever the split.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tqdm import tqdm

from megadiff.checkpoint.ranks import CheckpointError
from megadiff.config import ConfigError
from megadiff.interop.hf.architecture import Architecture
from megadiff.interop.hf.convert import Report, export_checkpoint, import_folder
from megadiff.interop.hf.start import Variant
from megadiff.interop.plain import import_plain
from megadiff.interop.tensors import InteropError

DTYPES = ("float32", "bfloat16", "float16", "float64")
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def common(sub: argparse.ArgumentParser, output: str) -> None:
        sub.add_argument("--output", required=True, help=output)
        sub.add_argument("--dtype", choices=DTYPES, help="type of the weights; as they are")

    def imports(sub: argparse.ArgumentParser, source: str) -> None:
        sub.add_argument("--input", required=True, help=source)
        common(sub, "folder for the checkpoint, without one in it")

    hf_folder = "folder with config.json and safetensors"
    sub = command("to-hf", "a checkpoint as a Hugging Face folder")
    sub.add_argument("--load", required=True, help="folder of checkpoints")
    sub.add_argument("--ckpt-step", type=int, help="step to convert; the newest by default")
    common(sub, "the folder, which must not exist")
    sub.add_argument(
        "--architecture",
        choices=get_args(Architecture),
        help="by default llama for standard attention, diffllama for DIFF V1, fla-org's delta_net "
        "and gated_deltanet for theirs, else megadiff, whose code travels with the weights",
    )
    sub.add_argument("--max-shard-size", type=gigabytes, default=5.0, metavar="GB")
    for name in TOKENIZER:
        flag = f"--{name.replace('_', '-')}"
        sub.add_argument(flag, help="instead of the checkpoint's")

    sub = command(
        "from-hf",
        "a Llama, DiffLlama, delta_net, gated_deltanet or megadiff folder as a checkpoint",
    )
    imports(sub, hf_folder)

    sub = command("llama-to-diff", "a Llama folder as the start of a differential model")
    imports(sub, hf_folder)
    sub.add_argument("--variant", choices=get_args(Variant), required=True)
    sub.add_argument(
        "--exact",
        action="store_true",
        help="the logits of the Llama at first; refused if impossible",
    )
    sub.add_argument("--head-norm", choices=["weight", "no_weight", "none"], help="of DIFF V1")
    sub.add_argument("--seed", type=int, default=1234, help="of what is drawn")

    sub = command("from-plain", "the plain DiffTransformer's state_dict as a checkpoint")
    imports(sub, ".pt or .safetensors file")
    return parser.parse_args(words)


def gigabytes(word: str) -> float:
    size = float(word)
    if not 1e-9 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{word} GB: a size above 0")
    return size


def bar(total: int) -> Callable[[], None]:
    """A progress bar over `total` tensors."""
    shown = tqdm(total=total, unit="tensor", disable=None)

    def advance() -> None:
        shown.update()
        if shown.n == total:
            shown.close()

    return advance


def convert(arguments: argparse.Namespace) -> Report:
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    options: dict[str, Any] = {"dtype": dtype, "progress": bar}
    if arguments.command == "to-hf":
        given = {name: getattr(arguments, name) for name in TOKENIZER}
        return export_checkpoint(
            arguments.load,
            arguments.output,
            step=arguments.ckpt_step,
            architecture=arguments.architecture,
            shard_bytes=int(arguments.max_shard_size * 10**9),
            tokenizer={name: value for name, value in given.items() if value is not None},
            **options,
        )
    if arguments.command == "from-plain":
        return import_plain(arguments.input, arguments.output, **options)
    if arguments.command == "llama-to-diff":
        names = ("variant", "exact", "head_norm", "seed")
        options |= {name: getattr(arguments, name) for name in names}
    return import_folder(arguments.input, arguments.output, **options)


def main(words: list[str]) -> int:
    arguments = parse_arguments(words)
    try:
        report = convert(arguments)
    except (InteropError, ConfigError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {report.path}: {'; '.join(report.notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
