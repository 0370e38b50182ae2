"""From a validated configuration to this process's place in the run: device, groups, seeds."""

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megadiff.config import Config, ConfigError, ParallelConfig, to_dict
from megadiff.config.require import flag
from megadiff.models.memory import message_bytes
from megadiff.parallel.failure import end_when_others_fail
from megadiff.parallel.mesh import ParallelMesh, build_mesh, gather_objects

_PLACES = ("_path", "_dir", "_file", "_model", "_sets", "_config", "save", "load")
"""How names of options end that are files and folders."""


@dataclass(frozen=True)
class Environment:
    """Where this process computes and whom it talks to.

    `control` is a gloo group of all ranks for small messages between hosts, which never wait for a
    device (None for a single process). Its collectives fail at once when a rank is gone.
    """

    mesh: ParallelMesh
    device: torch.device
    dtype: torch.dtype  # of the parameters
    control: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.mesh.rank == 0


def world_size() -> int:
    """The number of processes that the launcher started.

    Raises ConfigError when its variables contradict each other: such processes would wait for each
    other in vain, or each train alone and save to the same place.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if size == "1" else "not set")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"WORLD_SIZE is {size} and RANK is {rank}: a launcher such as torchrun sets both, RANK "
            "from 0 to WORLD_SIZE - 1; for a single process unset both"
        )
    local, of = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE")
    if not (local.isdecimal() and (of is None or (of.isdecimal() and int(local) < int(of)))):
        raise ConfigError(
            f"LOCAL_RANK is {local} and LOCAL_WORLD_SIZE is {of or 'not set'}: a launcher sets "
            "LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1, the number of its processes on this node"
        )
    return int(size)


def start(config: Config) -> Environment:
    """Pick the device, start the process groups and seed every generator.

    Raises ConfigError when what is asked for is not there, or not the same on all ranks.
    """
    device = pick_device(config)
    parallel = config.parallel
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    control: Any = None
    if parallel.tp_comm_overlap:
        _need_peers(device, parallel)
    if (world_size() > 1 or config.training.deepspeed) and not dist.is_initialized():
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        end_where_it_waits()
        store, rank, size = _meet(timeout)
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if backend == "nccl" else None,
        )
        end_when_others_fail()
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            control = dist.group.WORLD
        else:
            control = dist.new_group(timeout=timeout, backend="gloo")
    _need_one_configuration(config, control)
    tp, groups = parallel.tensor_model_parallel_size, config.model.query_groups
    mesh = build_mesh(
        tensor=tp,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        kv_copies=tp // groups if tp % groups == 0 else 1,
        sequence_parallel=parallel.sequence_parallel,
        tp_message_bytes=message_bytes(config) if parallel.tp_comm_overlap else 0,
        timeout=timeout,
        device_type=device.type,
    )
    _seed(config.training.seed)
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return Environment(mesh, device, getattr(torch, config.training.dtype), control)


def _need_one_configuration(config: Config, control: dist.ProcessGroup | None) -> None:
    """Raises ConfigError on all ranks where the options of one are not rank 0's.

    Machines may keep the same things in different places.
    """
    options = {
        name: bool(value) if name.endswith(_PLACES) else value
        for section in to_dict(config).values()
        for name, value in section.items()
    }
    first, *others = gather_objects(options, control)
    for rank, theirs in enumerate(others, 1):
        different = [flag(name) for name in options if theirs[name] != first[name]]
        if different:
            raise ConfigError(
                f"rank {rank} was started with other options than rank 0: {', '.join(different)}"
            )


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Where the launcher's processes find each other: a store, this one's rank, their number.

    torchrun keeps one store for all its restarts (seen in torch 2.13), and in it the addresses of
    workers that are gone; new ones would wait for those for ever. On one machine the number of the
    restart tells them apart. Machines count restarts differently; launch/environment.sh has the
    setting that gives every restart a store of its own.

    Raises ConfigError when the launcher did not say where, or nobody is there.
    """
    if "RANK" not in os.environ:  # a single process that no launcher started
        return dist.HashStore(), 0, 1
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:
        raise ConfigError(
            f"ranks meet at MASTER_ADDR and MASTER_PORT, which a launcher such as torchrun sets: "
            f"{error}"
        ) from None
    except dist.DistNetworkError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the ranks do not meet at {where}: {reason}") from None
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return store, rank, size


def end_where_it_waits() -> None:
    """A rank whose message times out ends, and does not go on with what is in its buffers.

    It goes on under torchrun's choice, 1, which aborts the message; 3 is torch's own.
    """
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"


def _need_peers(device: torch.device, parallel: ParallelConfig) -> None:
    """Raises ConfigError unless tensor-parallel ranks are GPUs that reach each other's memory."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(f"--tp-comm-overlap {message}; leave it out here")

    tp, local = parallel.tensor_model_parallel_size, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    need(device.type == "cuda", "needs GPUs")
    need(parallel.distributed_backend != "gloo", "needs --distributed-backend nccl")
    found = find_spec("cuda") and find_spec("cuda.bindings")
    need(found is not None, "needs the package cuda-bindings")
    need(
        local > 0 and local % tp == 0,
        f"works within a host, whose {local} ranks (LOCAL_WORLD_SIZE) are not a multiple of "
        f"--tensor-model-parallel-size {tp}",
    )
    first, count = device.index // tp * tp, torch.cuda.device_count()
    need(
        first + tp <= count,
        f"needs every rank to see the GPUs of all {tp} tensor-parallel ranks, and this one sees "
        f"{count}",
    )
    for peer in range(first, first + tp):
        need(
            peer == device.index or torch.cuda.can_device_access_peer(device.index, peer),
            f"needs GPU {device.index} to reach the memory of GPU {peer}, and it can not",
        )


def pick_device(config: Config) -> torch.device:
    """This process's device. Raises ConfigError when it is not there."""
    name = config.training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        if config.parallel.distributed_backend == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs, and the device is the CPU")
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"local rank {index} has no GPU: this node shows {count}; start at most {count} "
            "processes on it, or give --device cpu"
        )
    if count > 1 and world_size() > 1 and "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            f"this node shows {count} GPUs, and LOCAL_RANK, which says whose is which, is not set: "
            "a launcher such as torchrun sets it"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  libraries that draw from the global generator
    torch.manual_seed(seed)
