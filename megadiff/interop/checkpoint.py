"""A megadiff checkpoint as a mapping of deferred tensors, read and written one by one.

Nothing here needs a process group, and no more than one tensor is in memory.
"""

import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megadiff import __version__
from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.files import TensorFile, read_index
from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.state import Piece, ShardedTensor
from megadiff.checkpoint.storage import read_metadata, save
from megadiff.config import Config, ModelConfig, sections, to_dict, update_config
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
    wanted = global_shapes(config)
    problems = []
    if missing := wanted.keys() - tensors.keys():
        problems.append(f"missing: {listed(missing)}")
    if strange := tensors.keys() - wanted.keys():
        problems.append(f"unknown: {listed(strange)}")
    problems += [
        f"{name} is {tensors[name].shape} instead of {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        raise InteropError(f"{source} does not hold the model it describes: {'; '.join(problems)}")


def read_checkpoint(
    root: str | Path, step: int | None = None
) -> tuple[Config, dict[str, Deferred]]:
    """The configuration and the weights of the checkpoint of `step` (the newest) in `root`.

    Raises CheckpointError when there is none that is whole, InteropError when it is of no model.
    """
    path = find_checkpoint(root, step)
    if path is None:
        raise InteropError(f"{root}: there is no checkpoint")
    config = Config()
    values = read_metadata(path).get("config")
    if values is None:
        raise InteropError(f"{path}: config.json is missing, so that its model is not known")
    update_config(config, values, source=f"{path}/config.json")
    m = config.model
    if m.position_embedding_type == "learned_absolute" and m.max_position_embeddings is None:
        m.max_position_embeddings = config.training.seq_length
    index = read_index(path)
    tensors = {
        name: _saved_tensor(path, index, name)
        for name in index.state_dict_metadata
        if not name.startswith(_NO_WEIGHTS)
    }
    check_against(m, tensors, str(path))
    return config, tensors


def _saved_tensor(path: Path, index: Any, name: str) -> Deferred:
    saved = index.state_dict_metadata[name]
    shape, dtype = tuple(saved.size), saved.properties.dtype

    def make() -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for chunk in saved.chunks:
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            info = index.storage_data[MetadataIndex(name, chunk.offsets)]
            with TensorFile(path / info.relative_path) as file:
                file.read(info, chunk.sizes, dtype, [0] * len(shape), target)
        return whole

    return Deferred(shape, dtype, make)


class _DeferredPiece(Piece):
    """A whole global tensor that is made when it is written."""

    def __init__(self, tensor: Deferred, said: Callable[[], None]) -> None:
        self.offset, self.write = (0,) * len(tensor.shape), True
        self._tensor, self._said = tensor, said

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        self._said()
        return self._tensor.make()

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._tensor.shape


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
    if layout.list_steps(root):
        raise InteropError(f"{root} holds a checkpoint already; give an empty or a new folder")
    check_against(config.model, tensors, "the converted model")
    sharded = {
        name: ShardedTensor(t.shape, t.dtype, [_DeferredPiece(t, progress)])
        for name, t in tensors.items()
    }
    metadata = {
        "config": to_dict(config),
        "progress": {"iteration": 0, "consumed_samples": 0},
        "versions": {
            "megadiff": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
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
