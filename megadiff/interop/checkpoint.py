"""A megadiff checkpoint as a mapping of deferred tensors, read and written one by one.

Nothing here needs a process group, and no more than one tensor is in memory.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.state import ComputedPiece, ShardedTensor
from megadiff.checkpoint.storage import CheckpointReader, read_config, read_metadata, save, versions
from megadiff.config import Config, ModelConfig, sections, to_dict
from megadiff.interop.tensors import Deferred, InteropError, listed
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import named_sections

_NO_WEIGHTS = ("optimizer.", "rng.")


def global_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor of the model, by its name."""
    model = Decoder(config, device="meta", max_positions=config.max_position_embeddings or 0)
    return {section.name: section.shape for _, section in named_sections(model)}


def check_against(config: ModelConfig, tensors: Mapping[str, Deferred], source: str) -> None:
    """Raise InteropError unless `tensors` are just those of the model, by name and shape."""
    problems = misfits(global_shapes(config), {name: t.shape for name, t in tensors.items()})
    if problems:
        raise InteropError(f"{source} does not hold the model it describes: {problems}")


def misfits(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """In what the names and shapes `found` are not those `wanted`; empty where they are."""
    problems = []
    if missing := wanted.keys() - found.keys():
        problems.append(f"missing: {listed(missing)}")
    if strange := found.keys() - wanted.keys():
        problems.append(f"unknown: {listed(strange)}")
    problems += [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    return "; ".join(problems)


def read_checkpoint(
    root: str | Path, step: int | None = None
) -> tuple[Config, dict[str, Deferred]]:
    """The configuration and the weights of the checkpoint of `step` (the newest) in `root`.

    Raises CheckpointError when there is none that is whole, InteropError when it is of no model.
    """
    path = find_checkpoint(root, step)
    if path is None:
        raise InteropError(f"{root}: there is no checkpoint")
    metadata = read_metadata(path)
    if "config" not in metadata:
        raise InteropError(f"{path}: config.json is missing, so that its model is not known")
    config = read_config(path, metadata)
    m = config.model
    if m.position_embedding_type == "learned_absolute" and m.max_position_embeddings is None:
        m.max_position_embeddings = config.training.seq_length
    reader = CheckpointReader(path)
    tensors = {
        name: Deferred(shape, dtype, partial(reader.read, name))
        for name, (shape, dtype) in reader.tensors.items()
        if not name.startswith(_NO_WEIGHTS)
    }
    check_against(m, tensors, str(path))
    return config, {name: tensors[name] for name in global_shapes(m)}  # in the model's order


def need_no_checkpoint(root: Path) -> None:
    """Raise InteropError when `root` holds a checkpoint."""
    if layout.list_steps(root):
        raise InteropError(f"{root} holds a checkpoint already; give an empty or a new folder")


def write_checkpoint(
    root: str | Path,
    config: Config,
    tensors: Mapping[str, Deferred],
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write weights as the checkpoint of step 0 in `root`, for `--load` with `--finetune`.

    `model.yaml` beside it holds the options of model and tokenizer for `--config`. `progress` is
    called for each tensor.

    Raises InteropError when `root` holds a checkpoint already or the tensors are not those of the
    model; CheckpointError when it can not be written.
    """
    root = Path(root)
    need_no_checkpoint(root)
    check_against(config.model, tensors, "the converted model")

    def make(tensor: Deferred) -> Tensor:
        progress()
        return tensor.make()

    sharded = {
        name: ShardedTensor(
            t.shape, t.dtype, [ComputedPiece((0,) * len(t.shape), t.shape, partial(make, t))]
        )
        for name, t in tensors.items()
    }
    metadata = {
        "config": to_dict(config),
        "progress": {"iteration": 0, "consumed_samples": 0},
        "versions": versions(),
    }
    saving = layout.saving_path(root, 0)
    try:
        layout.sweep(root)
        save(saving, sharded, metadata, alone=True)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    (root / "model.yaml").write_text(_model_yaml(config), encoding="utf-8")
    path = layout.publish(root, 0)
    layout.write_tracker(root, 0)
    return path


def _model_yaml(config: Config) -> str:
    """What defines the model and its tokenizer, as far as it differs from the defaults."""
    default = sections(Config())
    changed: dict[str, dict[str, Any]] = {}
    for name in ("model", "data"):
        for key, value in vars(sections(config)[name]).items():
            if value != getattr(default[name], key):
                changed.setdefault(name, {})[key] = value
    return yaml.safe_dump(changed, sort_keys=False)
