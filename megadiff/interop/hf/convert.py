"""Whole conversions between a megadiff checkpoint and a Hugging Face folder."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megadiff.config import Config, ConfigError
from megadiff.config.validate_model import validate_model
from megadiff.interop.checkpoint import (
    check_against,
    need_no_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from megadiff.interop.hf.architecture import (
    CLASSES,
    MODELING_FILES,
    Architecture,
    from_hf_config,
    natural_architecture,
    to_hf_config,
)
from megadiff.interop.hf.names import folded, from_hf, to_hf
from megadiff.interop.hf.start import Variant, differential_config, differential_start
from megadiff.interop.hf.tokenizer import copy_tokenizer, write_tokenizer
from megadiff.interop.safetensors import read_folder, write_folder
from megadiff.interop.tensors import InteropError, Progress, Report, silent


def export_checkpoint(
    root: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    architecture: Architecture | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    tokenizer: dict[str, str] | None = None,
    progress: Progress = silent,
) -> Report:
    """Write the checkpoint of `step` (the newest) in `root` as a Hugging Face folder `output`.

    `architecture` is by default where the model's mixers are at home. Weights keep their types, or
    get `dtype`. `tokenizer` overrides the checkpoint's options of its tokenizer.

    Raises InteropError when `output` exists or the architecture can not represent the model.
    """
    output = Path(output)
    if output.exists():
        raise InteropError(f"{output} exists already; give a new folder")
    config, tensors = read_checkpoint(root, step)
    m = config.model
    architecture = architecture or natural_architecture(m)
    theirs = to_hf_config(m, architecture, config.training.seq_length, config.training.dtype)
    report = Report(output, [CLASSES[architecture]])
    if folded(m, architecture):
        report.notes.append(
            "the per-head norm's weight is folded into o_proj, as DiffLlama has none: equal but "
            "for rounding, and a way back gives a model without it; --architecture megadiff keeps "
            "it"
        )
    converted = to_hf(tensors, m, architecture)
    if dtype is not None:
        theirs["dtype"] = str(dtype).removeprefix("torch.")
        converted = {name: tensor.to(dtype) for name, tensor in converted.items()}
    for key, value in (tokenizer or {}).items():
        setattr(config.data, key, value)
    with _whole_folder(output) as folder:
        ids, note = write_tokenizer(folder, config.data, m.vocab_size)
        report.notes.append(note)
        theirs |= ids
        _write_json(folder / "config.json", theirs)
        generation = {k: theirs[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", generation)
        if architecture == "megadiff":
            for name in MODELING_FILES:
                shutil.copyfile(Path(__file__).with_name(name), folder / name)
        write_folder(folder, converted, shard_bytes, progress(len(converted)))
    return report


def import_folder(
    folder: str | Path,
    root: str | Path,
    *,
    variant: Variant | None = None,
    exact: bool = False,
    head_norm: Any = None,
    seed: int = 1234,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> Report:
    """Write the model in a Hugging Face `folder` as a checkpoint of step 0 in `root`.

    With `variant` a Llama becomes differential (`start` explains it, `exact` and `head_norm`).
    Raises InteropError for what can not be represented and when `root` holds a checkpoint.
    """
    folder, root = Path(folder), Path(root)
    need_no_checkpoint(root)  # now: it may have a tokenizer of its own
    source = folder / "config.json"
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise InteropError(f"{source}: not a model's configuration ({error})") from None
    tensors = read_folder(folder)
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):  # before anything is made for each
        raise InteropError(
            f"{source}: num_hidden_layers is {layers}, and the weights are {len(tensors)} tensors"
        )
    architecture, m = from_hf_config(values, str(source))
    if variant is not None:
        m = differential_config(m, variant, exact=exact, head_norm=head_norm)
        try:
            tensors = differential_start(tensors, m, variant, exact=exact, seed=seed)
        except KeyError as error:
            raise InteropError(f"the model has no tensor {error.args[0]}") from None
        architecture = "megadiff"
    config = Config(model=m)
    try:
        config.training.seq_length = int(values.get("max_position_embeddings") or 2048)
        validate_model(m, config.training.seq_length)
    except (ConfigError, TypeError, ValueError) as error:
        raise InteropError(f"{source}: {error}") from None
    tensors = from_hf(tensors, m, architecture)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    check_against(m, tensors, str(folder))
    trained = tensors["embedding.weight"].dtype  # what we keep in a wider type says nothing
    config.training.bf16 = trained == torch.bfloat16
    config.training.fp16 = trained == torch.float16
    config.training.fp64 = trained == torch.float64
    report = Report(root)
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = root / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    if copy_tokenizer(folder, tokenizer):
        config.data.tokenizer_type = "HuggingFaceTokenizer"
        config.data.tokenizer_model = str(tokenizer.resolve())
        report.notes.append("with its tokenizer.json")
    else:
        tokenizer.rmdir()
        report.notes.append("no tokenizer.json beside it: give --tokenizer-type and its file")
    report.path = write_checkpoint(root, config, tensors, progress(len(tensors)))
    report.notes.append(
        f"go on with: pretrain_diff.py --config {root}/model.yaml --load {root} --finetune ..."
    )
    return report


@contextmanager
def _whole_folder(output: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is in it and is gone when that fails."""
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
