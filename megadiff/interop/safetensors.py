"""A folder of safetensors as Hugging Face lays it out, as a mapping of deferred tensors.

model.safetensors                       or, above the shard size,
model-00001-of-00002.safetensors ...
model.safetensors.index.json            which tensor is in which file
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megadiff.interop.tensors import Deferred, InteropError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_folder(folder: str | Path) -> dict[str, Deferred]:
    """All tensors of the model in `folder`. Raises InteropError when they can not be read."""
    folder = Path(folder)
    if (folder / _INDEX).is_file():
        files = _indexed_files(folder / _INDEX)
    elif (folder / _WHOLE).is_file():
        files = [folder / _WHOLE]
    else:
        other = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f" ({other[0]} would have to be unpickled; save it as safetensors)" if other else ""
        raise InteropError(f"{folder}: there is no {_WHOLE} and no {_INDEX}{hint}")
    tensors: dict[str, Deferred] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise InteropError(
                            f"{file}: {name} is of type {part.get_dtype()}; only "
                            f"{', '.join(_DTYPES)} are read"
                        )
                    shape, make = tuple(part.get_shape()), partial(_read, file, name)
                    tensors[name] = Deferred(shape, dtype, make)
        except (SafetensorError, OSError) as error:
            raise InteropError(f"{file}: not a safetensors file ({error})") from None
    return tensors


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InteropError(f"{index}: not an index of safetensors ({error})") from None
    if any(Path(name).name != name for name in names):
        raise InteropError(f"{index}: it names files outside of its folder")
    return [index.parent / name for name in sorted(names)]


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def write_folder(
    folder: str | Path,
    tensors: Mapping[str, Deferred],
    shard_bytes: int = 5 * 10**9,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write `tensors` into files of at most `shard_bytes` (or of one tensor), each made once.

    `progress` is called for each tensor.
    """
    folder = Path(folder)
    shards: list[dict[str, Deferred]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _size(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _size(tensor)
    if len(shards) == 1:
        _write_file(folder / _WHOLE, shards[0], progress)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard, progress)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(_size, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(file: Path, tensors: Mapping[str, Deferred], progress: Callable[[], None]) -> None:
    """The format: the header's length (8 bytes), the header (JSON), then the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _size(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            progress()
            opened.write(_bytes(tensor))
        opened.flush()
        os.fsync(opened.fileno())


def _bytes(tensor: Deferred) -> memoryview:
    values = tensor.make().contiguous()
    assert tuple(values.shape) == tensor.shape and values.dtype == tensor.dtype
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _size(tensor: Deferred) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
