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
import signal
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
from megadiff.config import load_config
from megadiff.training.errors import USER_ERRORS, wait_for_first_rank

NOT_WEIGHTS = ("optimizer.", "rng.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str,
        run: Callable[..., int | None],
        text: str,
        *,
        path: str | None = None,
        output: str | None = None,
        more: str | None = None,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, epilog=more)
        sub.set_defaults(run=run)
        if run is not average:
            sub.add_argument("path", type=Path, help=path)
        if output is not None:
            sub.add_argument("--output", type=Path, required=True, help=output)
        return sub

    command("list", list_checkpoints, "the checkpoints of a folder")

    sub = command("show", show, "tensors and metadata of a checkpoint")
    sub.add_argument(
        "--json", action="store_true", dest="as_json", help="one JSON object, for programs"
    )

    checkpoints = "a folder stands for all of its checkpoints"
    sub = command("verify", verify, "compare checksums; fails on any damage", path=checkpoints)
    sub.add_argument("--values", action="store_true", help="also look for NaN and infinity")

    sub = command("compare", compare, "differences of two checkpoints; fails on any")
    sub.add_argument("other", type=Path)
    sub.add_argument("--weights-only", action="store_true")
    sub.add_argument(
        "--tolerance", type=float, default=0.0, help="largest |a - b| / max |b| of a tensor allowed"
    )

    sub = command("prune", prune, "delete old checkpoints of a folder")
    sub.add_argument("--keep-last", type=int, required=True, metavar="N")
    sub.add_argument("--keep-every", type=int, metavar="M", help="keep steps divisible by M")
    sub.add_argument("--dry-run", action="store_true", help="only say what would go")

    new = "the new checkpoint, such as runs/bf16/iter_0000100"
    sub = command("average", average, "mean of the weights of several checkpoints", output=new)
    sub.add_argument("paths", type=Path, nargs="+", metavar="path")

    sub = command("convert", convert, "rewrite a checkpoint as one file", output=new)
    sub.add_argument("--weights-only", action="store_true", help="without optimizer state")
    sub.add_argument("--dtype", choices=DTYPES, help="of the weights")

    command(
        "from-deepspeed",
        from_deepspeed,
        "a checkpoint that DeepSpeed's engine wrote, in megadiff's format",
        path="the folder of save_checkpoint, or a tag in it",
        output=new,
        more="further flags describe the model: --config configs/..., --bf16, ...",
    )
    command(
        "to-deepspeed",
        to_deepspeed,
        "a folder for DeepSpeed's load_checkpoint; run with torchrun, on as many processes as will "
        "load it",
        output="the new folder",
        more="further flags: --deepspeed-config, --tensor-model-parallel-size, ...",
    )
    arguments, flags = parser.parse_known_args(words)
    if arguments.command in ("from-deepspeed", "to-deepspeed"):
        arguments.flags = flags
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    return arguments


def checkpoint_at(path: Path) -> Path:
    """The checkpoint at `path`, or the one that a run would resume from in that folder."""
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}")
    if (path / layout.MANIFEST).exists() or not path.is_dir():
        return path
    found = find_checkpoint(path, verify=False)
    if found is None:
        raise CheckpointError(f"no checkpoint in {path}")
    return found


def weights(reader: CheckpointReader) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each weight by its name."""
    return {n: tensor for n, tensor in reader.tensors.items() if not n.startswith(NOT_WEIGHTS)}


def list_checkpoints(path: Path) -> None:
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


def show(path: Path, as_json: bool) -> None:
    path = checkpoint_at(path)
    reader = CheckpointReader(path)
    metadata = read_metadata(path)
    if as_json:
        tensors = {
            name: {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
            for name, (shape, dtype) in reader.tensors.items()
        }
        print(json.dumps({"path": str(path), "tensors": tensors, "metadata": metadata}))
        return
    print(path)
    for name, (shape, dtype) in reader.tensors.items():
        print(f"  {name:<60} {str(dtype).removeprefix('torch.'):<9} {list(shape)}")
    sizes = [math.prod(shape) for shape, _ in weights(reader).values()]
    print(f"{len(sizes)} weight tensors, {sum(sizes):,} parameters")
    for key, value in metadata.items():
        print(f"{key}: {json.dumps(value)}")


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
            apart = (x.double() - y.double())[unequal].abs().nan_to_num(math.inf, math.inf)
            largest = max(largest, apart.max().item())
        finite = y[y.isfinite()]
        scale = max(scale, finite.double().abs().max().item() if finite.numel() else 0.0)
    if count == 0 or largest <= tolerance * scale:
        return ""
    return f"{count} of {math.prod(shape)} values, largest difference {largest:.3g} of {scale:.3g}"


def prune(path: Path, keep_last: int, keep_every: int | None, dry_run: bool) -> None:
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


def average(paths: list[Path], output: Path) -> None:
    sources = [checkpoint_at(path) for path in paths]
    readers = [CheckpointReader(source) for source in sources]
    first = weights(readers[0])
    for reader in readers[1:]:
        other = weights(reader)
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
        return total / len(readers)

    tensors = computed(readers[0], list(first), mean, None)
    metadata = read_metadata(sources[-1])
    metadata["averaged"] = {"of": [str(source) for source in sources]}
    write_new(output, tensors, metadata)


def convert(path: Path, output: Path, weights_only: bool, dtype: str | None) -> None:
    source = checkpoint_at(path)
    reader = CheckpointReader(source)
    skipped = NOT_WEIGHTS if weights_only else ()
    names = [name for name in reader.tensors if not name.startswith(skipped)]
    tensors = computed(reader, names, reader.read, DTYPES[dtype] if dtype else None)
    write_new(output, tensors, read_metadata(source))


def from_deepspeed(path: Path, output: Path, flags: list[str]) -> None:
    from megadiff.training.deepspeed_files import read_deepspeed

    tensors, metadata = read_deepspeed(path, load_config(flags))
    write_new(output, tensors, metadata)


def to_deepspeed(path: Path, output: Path, flags: list[str]) -> None:
    from megadiff.training.deepspeed_files import write_deepspeed

    write_deepspeed(checkpoint_at(path), output, flags)


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
                offset, sizes, lambda n=name, o=offset, s=sizes, d=dtype: compute(n, o, s).to(d)
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
    run: Callable[..., int | None] = arguments.pop("run")
    del arguments["command"]
    try:
        return run(**arguments) or 0
    except BrokenPipeError:  # into head, for example
        return 128 + signal.SIGPIPE
    except (*USER_ERRORS, OSError) as error:
        wait_for_first_rank()
        reason = describe(error) if isinstance(error, OSError) else error
        print(f"checkpoint: error: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
