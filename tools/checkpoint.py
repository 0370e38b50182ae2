#!/usr/bin/env python3
"""Look at, check, compare, thin out, average and convert checkpoints.

PATH is a checkpoint (.../iter_0000100) or a folder of them, which stands for its newest. Nothing
here needs a GPU, the number of processes that saved, or more memory than one block of a tensor (but
for `to-deepspeed`, which runs DeepSpeed itself).
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.ranks import CheckpointError, describe
from megadiff.checkpoint.state import ComputedPiece, Piece, ShardedTensor, Tensors
from megadiff.checkpoint.storage import CheckpointReader, read_metadata, save
from megadiff.config import ConfigError, load_config
from megadiff.data.errors import DataError
from megadiff.training.errors import wait_for_first_rank

NOT_WEIGHTS = ("optimizer.", "rng.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("list", help="the checkpoints of a folder")
    command.add_argument("path", type=Path)

    command = commands.add_parser("show", help="tensors and metadata of a checkpoint")
    command.add_argument("path", type=Path)
    command.add_argument("--json", action="store_true", help="one JSON object, for programs")

    command = commands.add_parser("verify", help="compare checksums; fails on any damage")
    command.add_argument("path", type=Path, help="a folder stands for all of its checkpoints")
    command.add_argument("--values", action="store_true", help="also look for NaN and infinity")

    command = commands.add_parser("compare", help="differences of two checkpoints; fails on any")
    command.add_argument("path", type=Path)
    command.add_argument("other", type=Path)
    command.add_argument("--weights-only", action="store_true")
    command.add_argument(
        "--tolerance", type=float, default=0.0, help="largest |a - b| / max |b| of a tensor allowed"
    )

    command = commands.add_parser("prune", help="delete old checkpoints of a folder")
    command.add_argument("path", type=Path)
    command.add_argument("--keep-last", type=int, required=True, metavar="N")
    command.add_argument("--keep-every", type=int, metavar="M", help="keep steps divisible by M")
    command.add_argument("--dry-run", action="store_true", help="only say what would go")

    command = commands.add_parser("average", help="mean of the weights of several checkpoints")
    command.add_argument("paths", type=Path, nargs="+", metavar="path")
    command.add_argument("--output", type=Path, required=True, help="the new checkpoint")

    command = commands.add_parser("convert", help="rewrite a checkpoint as one file")
    command.add_argument("path", type=Path)
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the new checkpoint, such as runs/bf16/iter_0000100",
    )
    command.add_argument("--weights-only", action="store_true", help="without optimizer state")
    command.add_argument("--dtype", choices=DTYPES, help="of the weights")

    command = commands.add_parser(
        "from-deepspeed",
        help="a checkpoint that DeepSpeed's engine wrote, in megadiff's format",
        epilog="further flags describe the model: --config configs/..., --bf16, ...",
    )
    command.add_argument("path", type=Path, help="the folder of save_checkpoint, or a tag in it")
    command.add_argument("--output", type=Path, required=True, help="the new checkpoint")

    command = commands.add_parser(
        "to-deepspeed",
        help="a folder for DeepSpeed's load_checkpoint; run with torchrun, on as many processes as "
        "will load it",
        epilog="further flags: --deepspeed-config, --tensor-model-parallel-size, ...",
    )
    command.add_argument("path", type=Path)
    command.add_argument("--output", type=Path, required=True, help="the new folder")
    arguments, flags = parser.parse_known_args(words)
    if arguments.command in ("from-deepspeed", "to-deepspeed"):
        arguments.flags = flags
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    return arguments


def checkpoint_at(path: Path) -> Path:
    """The checkpoint at `path`, or the one that a run would resume from in that folder."""
    if (path / layout.MANIFEST).exists() or not path.is_dir():
        return path
    found = find_checkpoint(path, verify=False)
    if found is None:
        raise CheckpointError(f"no checkpoint in {path}")
    return found


def list_checkpoints(path: Path) -> int:
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    steps = layout.list_steps(path)
    if not steps:
        raise CheckpointError(f"no checkpoints in {path}")
    try:
        latest = layout.read_tracker(path)
    except ValueError as error:
        latest = None
        print(error)
    print(f"{'step':>10} {'GB':>9}  state")
    for step in steps:
        problems = layout.damage(layout.checkpoint_path(path, step), checksums=False)
        size = "-"
        if not problems:
            files = layout.read_manifest(layout.checkpoint_path(path, step))
            size = f"{sum(entry['bytes'] for entry in files.values()) / 1e9:.3f}"
        state = "; ".join(problems) or "whole"
        print(f"{step:>10} {size:>9}  {state}{' (latest)' if step == latest else ''}")
    return 0


def show(path: Path, as_json: bool) -> int:
    path = checkpoint_at(path)
    reader = CheckpointReader(path)
    metadata = read_metadata(path)
    if as_json:
        tensors = {
            name: {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
            for name, (shape, dtype) in reader.tensors.items()
        }
        print(json.dumps({"path": str(path), "tensors": tensors, "metadata": metadata}))
        return 0
    print(path)
    for name, (shape, dtype) in reader.tensors.items():
        print(f"  {name:<60} {str(dtype).removeprefix('torch.'):<9} {list(shape)}")
    weights = [s for n, (s, _) in reader.tensors.items() if not n.startswith(NOT_WEIGHTS)]
    print(f"{len(weights)} weight tensors, {sum(map(math.prod, weights)):,} parameters")
    for key, value in metadata.items():
        print(f"{key}: {json.dumps(value)}")
    return 0


def verify(path: Path, values: bool) -> int:
    paths = [path]
    if not (path / layout.MANIFEST).exists() and layout.list_steps(path):
        paths = [layout.checkpoint_path(path, step) for step in layout.list_steps(path)]
    damaged = 0
    for checkpoint in paths:
        problems = layout.damage(checkpoint)
        if values and not problems:
            problems = not_finite(CheckpointReader(checkpoint))
        print(f"{checkpoint}: {'; '.join(problems) or 'whole'}", flush=True)
        damaged += bool(problems)
    return 1 if damaged else 0


def not_finite(reader: CheckpointReader) -> list[str]:
    """Tensors with values that are no numbers, and how many."""
    problems = []
    for name, (_, dtype) in reader.tensors.items():
        if dtype.is_floating_point:
            blocks = (reader.read(name, *block) for block in reader.blocks(name))
            bad = sum(int((~block.isfinite()).sum()) for block in blocks)
            if bad:
                problems.append(f"{name} has {bad} values that are not finite")
    return problems


def compare(path: Path, other: Path, weights_only: bool, tolerance: float) -> int:
    a, b = CheckpointReader(checkpoint_at(path)), CheckpointReader(checkpoint_at(other))
    skipped = NOT_WEIGHTS if weights_only else ()
    names = [n for n in sorted(a.tensors | b.tensors) if not n.startswith(skipped)]
    different = 0
    for name in names:
        difference = differ(a, b, name, tolerance)
        if difference:
            different += 1
            print(f"{name}: {difference}", flush=True)
    print(f"{len(names) - different} tensors are equal, {different} differ")
    return 1 if different else 0


def differ(a: CheckpointReader, b: CheckpointReader, name: str, tolerance: float) -> str:
    """How the tensor `name` differs between two checkpoints; empty when it does not."""
    if name not in a.tensors or name not in b.tensors:
        return f"only in {a.directory if name in a.tensors else b.directory}"
    (shape, dtype), (other_shape, other_dtype) = a.tensors[name], b.tensors[name]
    if shape != other_shape:
        return f"shapes {list(shape)} and {list(other_shape)}"
    if dtype != other_dtype and tolerance == 0:
        return f"types {dtype} and {other_dtype}"
    largest, scale, count = 0.0, 0.0, 0
    for block in a.blocks(name):
        x, y = a.read(name, *block), b.read(name, *block)
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        count += int(unequal.sum())
        if unequal.any():
            largest = max(
                largest, (x.double() - y.double()).abs().nan_to_num(math.inf).max().item()
            )
        scale = max(scale, y.double().abs().nan_to_num(0.0).max().item() if y.numel() else 0.0)
    if count == 0 or largest <= tolerance * scale:
        return ""
    return f"{count} of {math.prod(shape)} values, largest difference {largest:.3g} of {scale:.3g}"


def prune(path: Path, keep_last: int, keep_every: int | None, dry_run: bool) -> int:
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise CheckpointError("--keep-last and --keep-every must be at least 1")
    paths = {step: layout.checkpoint_path(path, step) for step in layout.list_steps(path)}
    whole = [s for s, checkpoint in paths.items() if not layout.damage(checkpoint, checksums=False)]
    try:
        spared = layout.read_tracker(path)
    except ValueError as error:
        raise CheckpointError(f"{error}; nothing deleted") from None
    for step in layout.expired(whole, keep_last, keep_every):
        if step != spared:
            print(f"{'would delete' if dry_run else 'deleting'} {paths[step]}", flush=True)
            if not dry_run:
                layout.remove(paths[step])
    return 0


def average(paths: list[Path], output: Path) -> int:
    sources = [checkpoint_at(path) for path in paths]
    readers = [CheckpointReader(source) for source in sources]
    first = {n: t for n, t in readers[0].tensors.items() if not n.startswith(NOT_WEIGHTS)}
    for reader in readers[1:]:
        other = {n: t for n, t in reader.tensors.items() if not n.startswith(NOT_WEIGHTS)}
        if other != first:
            names = sorted(n for n in first | other if first.get(n) != other.get(n))
            raise CheckpointError(
                f"{reader.directory} is not of the same model as {readers[0].directory}: "
                f"{', '.join(names[:5])} differ in name, shape or type"
            )

    def mean(name: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        total = torch.zeros(sizes, dtype=torch.float64)
        for reader in readers:
            total += reader.read(name, offset, sizes)
        return (total / len(readers)).to(first[name][1])

    tensors = computed(readers[0], list(first), mean, None)
    metadata = read_metadata(sources[-1])
    metadata["averaged"] = {"of": [str(source) for source in sources]}
    write_new(output, tensors, metadata)
    return 0


def convert(path: Path, output: Path, weights_only: bool, dtype: str | None) -> int:
    source = checkpoint_at(path)
    reader = CheckpointReader(source)
    skipped = NOT_WEIGHTS if weights_only else ()
    names = [name for name in reader.tensors if not name.startswith(skipped)]
    tensors = computed(reader, names, reader.read, DTYPES[dtype] if dtype else None)
    write_new(output, tensors, read_metadata(source))
    return 0


def from_deepspeed(path: Path, output: Path, flags: list[str]) -> int:
    from megadiff.training.deepspeed_files import read_deepspeed

    tensors, metadata = read_deepspeed(path, load_config(flags))
    write_new(output, tensors, metadata)
    return 0


def to_deepspeed(path: Path, output: Path, flags: list[str]) -> int:
    from megadiff.training.deepspeed_files import write_deepspeed

    write_deepspeed(checkpoint_at(path), output, flags)
    return 0


def computed(
    reader: CheckpointReader,
    names: list[str],
    compute: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    weight_dtype: torch.dtype | None,
) -> Tensors:
    """Tensors of the shapes that `reader` has, computed block by block when they are written."""
    tensors: Tensors = {}
    for name in names:
        shape, dtype = reader.tensors[name]
        if weight_dtype is not None and not name.startswith(NOT_WEIGHTS):
            dtype = weight_dtype
        pieces: list[Piece] = [
            ComputedPiece(
                offset,
                sizes,
                lambda n=name, o=offset, s=sizes, d=dtype: compute(n, o, s).to(d),
            )
            for offset, sizes in reader.blocks(name)
        ]
        tensors[name] = ShardedTensor(shape, dtype, pieces)
    return tensors


def write_new(output: Path, tensors: Tensors, metadata: dict[str, dict]) -> None:
    """Save beside `output` and rename when whole."""
    if output.exists():
        raise CheckpointError(f"{output} exists already")
    unfinished = output.with_name(f".saving_{output.name}")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    save(unfinished, tensors, metadata, alone=True)
    unfinished.rename(output)
    steps = layout.list_steps(output.parent)
    if len(steps) == 1 and layout.checkpoint_path(output.parent, steps[0]) == output:
        layout.write_tracker(output.parent, steps[0])  # a folder that --load takes
    print(f"wrote {output}")


def main(words: list[str] | None = None) -> int:
    arguments = vars(parse_arguments(words))
    command = arguments.pop("command")
    if command == "show":
        arguments["as_json"] = arguments.pop("json")
    commands: dict[str, Callable[..., int]] = {
        "list": list_checkpoints,
        "show": show,
        "verify": verify,
        "compare": compare,
        "prune": prune,
        "average": average,
        "convert": convert,
        "from-deepspeed": from_deepspeed,
        "to-deepspeed": to_deepspeed,
    }
    try:
        return commands[command](**arguments)
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        wait_for_first_rank()
        reason = describe(error) if isinstance(error, OSError) else error
        print(f"checkpoint: error: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
