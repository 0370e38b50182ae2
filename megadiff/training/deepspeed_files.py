"""DeepSpeed's own checkpoints: read into megadiff's format, and written from it.

What `engine.save_checkpoint` writes are pickles, one or two for each rank. They are read here by
torch's unpickler for tensors and plain data, with empty stand-ins for the classes of `_STAND_INS`:
nothing in a file runs, and DeepSpeed need not be installed. Files are mapped, not read whole.

How DeepSpeed lays out such files depends on its stage, its version and every size of the run, so
that only DeepSpeed writes them: on as many ranks as will read them, each holding its own part.
(Its universal format knows neither ZeRO 0, nor tensor parallelism at ZeRO 3, nor SGD.)
"""

import math
import pickle
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.checkpoint.ranks import CheckpointError, describe
from megadiff.checkpoint.state import ComputedPiece, ShardedTensor, Tensors, flat_pieces
from megadiff.checkpoint.storage import read_metadata, versions
from megadiff.config import (
    NATIVE_OPTIONS,
    Config,
    ConfigError,
    ParallelConfig,
    load_config,
    to_dict,
    validate,
)
from megadiff.models.build import Model, build_model
from megadiff.optim.shards import StatePiece
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import record_of
from megadiff.training import checkpointing
from megadiff.training.data import set_vocabulary
from megadiff.training.deepspeed import DeepSpeedEngine, optimizer_groups
from megadiff.training.setup import start, world_size
from megadiff.training.zero_state import scaler_state, state_keys


class _Record:
    """Attributes, and no code."""


_STAND_INS: list[Any] = [
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read_deepspeed(path: Path, config: Config) -> tuple[Tensors, dict[str, dict]]:
    """All tensors and the metadata of a checkpoint that DeepSpeed wrote, of any stage and split.

    `path` is what `save_checkpoint` was given, or a tag in it; `config` describes the model and its
    precision, and gets split and batch. Raises CheckpointError when they do not fit together, or
    when a file names anything but tensors and plain data, or is of another step or rank than the
    others; ConfigError and DataError for flags that are wrong by themselves.
    """
    set_vocabulary(config)
    folder = path
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    try:
        if (path / "latest").is_file():
            folder = path / (path / "latest").read_text(encoding="utf-8").strip()
        first = _load(_model_file(folder, 0))
        tp, dp = int(first["mp_world_size"]), int(first["dp_world_size"])
        steps, skipped = int(first["global_steps"]), int(first["skipped_steps"])
        samples = int(first["global_samples"])
        if min(tp, dp) < 1 or not 0 <= skipped <= steps:
            raise ValueError(f"{tp} x {dp} ranks, {steps} steps, {skipped} of them skipped")
        t, batch = config.training, first["ds_config"]  # which may leave one of the three open
        ranks = dp * int(batch.get("gradient_accumulation_steps", 1))
        micro = batch.get("train_micro_batch_size_per_gpu") or batch["train_batch_size"] // ranks
        t.micro_batch_size = int(micro)
        t.global_batch_size = int(batch.get("train_batch_size", micro * ranks))
        if t.train_samples is None:
            t.train_iters = t.train_iters or max(steps, 1)
        config.parallel = ParallelConfig(tensor_model_parallel_size=tp)
        validate(config, tp * dp)
        tensors: Tensors = {}
        scalars = {"steps": float(steps), "updates": float(steps - skipped)}
        for rank in range(tp):
            mesh = ParallelMesh(tp=Axis(rank=rank, size=tp))
            dtype = getattr(torch, config.training.dtype)
            model = build_model(config, mesh, dtype=dtype, device="meta")
            scalars |= _read_rank(folder, rank, dp, first, model, config, tensors)
    except (CheckpointError, ConfigError):
        raise
    except (
        LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError, ArithmeticError
    ) as error:  # fmt: skip
        reason = str(error) if isinstance(error, ValueError) else describe(error)
        if isinstance(error, KeyError):
            reason = f"there is no {error}"
        raise CheckpointError(f"cannot read {folder} as DeepSpeed's: {reason}") from error
    metadata = {
        "progress": {"iteration": steps, "consumed_samples": samples},
        "optimizer": scalars,
        "config": to_dict(config),
        "versions": versions() | {"deepspeed": str(first["ds_version"])},
    }
    return tensors, metadata


def _load(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            saved_as = archive.namelist()[0].split("/")[0]
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("GLOBAL ")[-1].split(" was not")[0].split("\n")[0]
        raise CheckpointError(f"{path} holds more than tensors and plain data: {reason}") from None
    except FileNotFoundError:
        raise
    except zipfile.BadZipFile:
        raise CheckpointError(f"{path} is cut off, or no file of torch.save") from None
    except (EOFError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {describe(error).split('. ')[0]}") from None
    if "mp_rank_" in saved_as and saved_as != path.stem:
        raise CheckpointError(f"{path} was saved as {saved_as}{path.suffix}: of another rank")
    return content


def _model_file(folder: Path, rank: int) -> Path:
    """The model's states of a tensor-parallel rank; at ZeRO 3 all data ranks tell the same."""
    names = (
        f"mp_rank_{rank:02d}_model_states.pt",
        f"zero_pp_rank_0_mp_rank_{rank:02d}_model_states.pt",
    )
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has neither {names[0]} nor {names[1]}")


def _read_rank(
    folder: Path,
    rank: int,
    dp: int,
    first: dict[str, Any],
    model: Model,
    config: Config,
    tensors: Tensors,
) -> dict[str, float]:
    """Add what one tensor-parallel rank holds to `tensors`; returns its loss scale, if any.

    `first` is the first rank's model file.
    """
    files = [_model_file(folder, rank)]
    state, steps = _load(files[0]), first["global_steps"]
    if state["global_steps"] != steps:
        raise ValueError(f"{files[0].name} is of step {state['global_steps']}, others of {steps}")
    parameters = dict(model.chunks[0].named_parameters())
    odd = state["module"].keys() ^ model.chunks[0].state_dict().keys()
    if odd:
        raise ValueError(f"it is of another model, which differs in {', '.join(sorted(odd)[:4])}")
    stage0 = state["optimizer"] is not None
    optimizers = [state["optimizer"]]
    if not stage0:
        pattern = f"zero_pp_rank_{{}}_mp_rank_{rank:02d}_optim_states.pt"
        files = [folder / pattern.format(d) for d in range(dp)]
        if (folder / f"bf16_{files[0].name}").is_file() and not files[0].is_file():
            files = [folder / f"bf16_{file.name}" for file in files]
        optimizers = [_load(file)["optimizer_state_dict"] for file in files]
    updates = steps - int(state["skipped_steps"])
    for file, optimizer in zip(files, optimizers, strict=True):
        inner = _inner(optimizer)
        for values in inner["state"].values():
            if int(values.get("step", updates)) != updates:  # SGD counts none
                raise ValueError(
                    f"{file.name} is of update {int(values['step'])}, the model of {updates}"
                )
        rates = [float(group["lr"]) for group in inner["param_groups"]]
        if rates != first.setdefault("rates", rates):
            told = ", ".join(map(str, rates))
            raise ValueError(f"{file.name} is of another step: its learning rates are {told}")
    sharded = "fp32_flat_groups" in optimizers[0]  # ZeRO 3: the files hold no weights but these
    if stage0:
        fragments = _whole(optimizers[0], model, config)
    elif sharded:
        fragments = _parts_of_parameters(optimizers, state["param_shapes"])
    else:
        fragments = _parts_of_groups(optimizers)
    dtype = getattr(torch, config.training.dtype)
    wide = {name for name, p in parameters.items() if p.dtype != dtype}
    moments = state_keys(config.optimizer)
    needed = list(moments) if updates else []
    if not stage0 or dtype != torch.float32:
        needed.append("main_weight")
    covered: Counter[tuple[str, str]] = Counter()
    for name, key, begin, values in fragments:
        parameter, end = parameters[name], begin + values.numel()
        main = key == "main_weight"
        if not main and key not in moments:
            raise ValueError(f"it holds {key}, which the optimizer as configured does not keep")
        covered[name, key] += values.numel()
        if main and not sharded:
            _compare(name, values, state["module"][name].view(-1)[begin:end])
        part = StatePiece(parameter, parameter.shape, key, begin, values.detach(), True)
        if not main or (dtype != torch.float32 and name not in wide):
            checkpointing.add_flat(tensors, part, f"{checkpointing.OPTIMIZER}{key}.")
        if main and (sharded or name in wide):
            _add_rounded(tensors, part)
    for name, parameter in parameters.items():
        for key in needed:
            if covered[name, key] != parameter.numel():
                raise ValueError(
                    f"{covered[name, key]} of {parameter.numel()} elements of {name}'s {key} are "
                    "there"
                )
        weight = state["module"][name].detach()  # at ZeRO 3 it has a type and no values
        if weight.dtype != dtype or (weight.shape != parameter.shape and not sharded):
            raise ValueError(
                f"{name} is {weight.dtype} {list(weight.shape)} in it, and {dtype} "
                f"{list(parameter.shape)} as configured"
            )
        if not sharded and name not in wide:
            whole = StatePiece(parameter, weight.shape, "weight", 0, weight.reshape(-1), True)
            checkpointing.add_flat(tensors, whole)
    scaler = optimizers[0].get("loss_scaler")
    if "cur_scale" in optimizers[0]:  # ZeRO 0
        scaler = SimpleNamespace(**optimizers[0])
    return scaler_state(scaler)


def _add_rounded(tensors: Tensors, main: StatePiece) -> None:
    """Add the weight that is the rounding of its main weight `main`, computed when written."""
    record, dtype = record_of(main.parameter), main.parameter.dtype
    for section, piece in flat_pieces(record, main.shape, main.start, main.values):
        if piece.write:
            weight = ComputedPiece(piece.offset, piece.sizes, lambda p=piece: p.data.to(dtype))
            whole = ShardedTensor(section.shape, dtype)
            tensors.setdefault(section.name, whole).pieces.append(weight)


Fragment = tuple[str, str, int, Tensor]
"""A parameter's name, what it is (main_weight, exp_avg, ...), its first element, the values."""


def _compare(name: str, main: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless `weight` is the rounded main weight, as every step leaves it."""
    for a, b in zip(main.detach().split(2**20), weight.detach().split(2**20), strict=True):
        if not torch.equal(a.to(b.dtype).nan_to_num(), b.nan_to_num()):
            raise ValueError(f"{name}'s main weights are of another step than the model")


def _inner(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's optimizer: of tensors by their number, and their groups."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        optimizer = optimizer.get(key, optimizer)
    return optimizer


def _states(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The moments of one tensor in a torch optimizer's state: all but its step."""
    for key, values in state.items():
        if isinstance(values, Tensor) and values.dim() > 0:
            yield key, values


def _whole(optimizer: dict[str, Any], model: Model, config: Config) -> Iterator[Fragment]:
    """ZeRO 0: every rank has everything, in the order of the optimizer's groups."""
    names = {parameter: name for name, parameter in model.chunks[0].named_parameters()}
    groups = optimizer_groups(model, config.optimizer)
    order = [names[parameter] for members in groups.values() for parameter in members]
    mains = [main for group in optimizer.get("fp32_groups", []) for main in group]
    states = _inner(optimizer)["state"]
    for index, name in enumerate(order):
        if mains:
            yield name, "main_weight", 0, mains[index].view(-1)
        for key, values in _states(states.get(index, {})):
            yield name, key, 0, values.view(-1)


def _parts_of_groups(optimizers: list[dict[str, Any]]) -> Iterator[Fragment]:
    """ZeRO 1 and 2: each data rank has an even part of every group, one parameter after another."""
    begin: Counter[str] = Counter()
    for optimizer in optimizers:
        mains = optimizer["single_partition_of_fp32_groups"]
        states = _inner(optimizer)["state"]
        for group, addresses in enumerate(optimizer["param_slice_mappings"]):
            flat = {"main_weight": mains[group], **dict(_states(states.get(group, {})))}
            for name, address in addresses.items():
                for key, values in flat.items():
                    yield name, key, begin[name], values.narrow(0, address.start, address.numel)
                begin[name] += address.numel


def _parts_of_parameters(
    optimizers: list[dict[str, Any]], shapes: list[dict[str, torch.Size]]
) -> Iterator[Fragment]:
    """ZeRO 3: each data rank has an even part of every parameter, the last one with padding."""
    for rank, optimizer in enumerate(optimizers):
        states = _inner(optimizer)["state"]
        mains = optimizer["fp32_flat_groups"]
        for group, members in enumerate(shapes):
            flat = {"main_weight": mains[group], **dict(_states(states.get(group, {})))}
            offset = 0
            for name, shape in members.items():
                size = -(-math.prod(shape) // len(optimizers))
                begin = min(rank * size, math.prod(shape))
                count = min(size, math.prod(shape) - begin)
                for key, values in flat.items():
                    yield name, key, begin, values.narrow(0, offset, count)
                offset += size


def write_deepspeed(source: Path, output: Path, flags: list[str]) -> None:
    """Let DeepSpeed write the checkpoint `source` as its own folder `output`.

    Every rank of the run that is to `load_checkpoint` it calls this. `flags` name DeepSpeed's
    configuration and the split; all else is the configuration that the checkpoint was saved with.
    Raises CheckpointError and ConfigError.
    """
    if output.exists():
        raise CheckpointError(f"{output} exists already")
    metadata = read_metadata(source)
    if "optimizer" not in metadata:
        raise CheckpointError(f"{source} holds weights alone")
    config, new = checkpointing.saved_config(source, metadata), Config()
    # What is of the run that saved it, or of the native engine; `train_iters` is filled.
    config.parallel, config.checkpoint, config.logging = new.parallel, new.checkpoint, new.logging
    for name in NATIVE_OPTIONS:
        setattr(config.optimizer, name, getattr(new.optimizer, name))
    for name in (
        "fp8", "rampup_batch_size", "train_samples", "loss_spike_skip_iters",
        "check_weight_hash_across_dp_replicas_interval",
    ):  # fmt: skip
        setattr(config.training, name, getattr(new.training, name))
    config = load_config(["--deepspeed", *flags], config)
    validate(config, world_size())
    env = start(config)
    engine = DeepSpeedEngine(config, env)
    saved = checkpointing.Saved(source, metadata)
    checkpointing.restore(saved, engine, env, weights_only=False)
    progress, theirs = saved.progress, engine.engine
    theirs.global_steps, theirs.global_samples = progress.iteration, progress.consumed_samples
    theirs.skipped_steps = engine.optimizer.steps - engine.optimizer.updates
    unfinished = output.with_name(f".saving_{output.name}")
    if env.is_main and unfinished.exists():  # of a try that failed, maybe with other ranks
        shutil.rmtree(unfinished)
    dist.barrier(group=env.control)
    try:
        theirs.save_checkpoint(str(unfinished), tag=f"global_step{progress.iteration}")
    except (OSError, RuntimeError) as error:  # torch tells nothing of a full disk
        free = shutil.disk_usage(output.parent).free / 1e9
        raise CheckpointError(
            f"DeepSpeed can not write {unfinished}, where {free:.3f} GB are free: {describe(error)}"
        ) from error
    dist.barrier(group=env.control)
    if env.is_main:
        unfinished.rename(output)
        print(f"wrote {output}")
