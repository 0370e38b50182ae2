"""The process groups of a run, made in one place.

Ranks are numbered with tensor parallelism innermost (its messages are the most frequent, so it
stays inside a node), then context, data and pipeline parallelism:
rank = ((pp * DP + dp) * CP + cp) * TP + tp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megadiff.parallel.copy_engine import PeerMemory

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh as this rank sees it; `group` is None where `size` is 1.

    `peers`: where copy engines carry the messages of linear layers.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    peers: PeerMemory | None = None


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place in the run. The default is a single process."""

    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)
    dp_cp: Axis = field(default_factory=Axis)  # ranks that hold the same parameters
    model: Axis = field(default_factory=Axis)  # pp x tp: ranks that together hold one model
    tp_copies: Axis = field(default_factory=Axis)  # tp ranks that hold copies of one KV group
    ends: Axis = field(default_factory=Axis)  # first and last stage, which hold tied embeddings
    rank: int = 0
    world_size: int = 1
    sequence_parallel: bool = False
    device_mesh: DeviceMesh | None = None  # axes pp, dp, cp, tp, for torch's own parallel parts


def build_mesh(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    kv_copies: int = 1,
    sequence_parallel: bool = False,
    tp_message_bytes: int = 0,
    timeout: timedelta = timedelta(minutes=10),
    device_type: str = "cpu",
) -> ParallelMesh:
    """Make all groups of the default process group's world; every rank calls it once.

    `kv_copies` is the number of neighbouring tensor-parallel ranks that share a key/value group (1
    unless there are more tensor-parallel ranks than groups). `tp_message_bytes`: copy engines carry
    the tensor-parallel messages, which have at most so many bytes. Raises ValueError when the world
    size is not a multiple of `tensor * pipeline * context`.
    """
    if not dist.is_initialized():
        if tensor * pipeline * context != 1:
            raise ValueError(
                f"tensor {tensor} x pipeline {pipeline} x context {context} parallelism needs "
                f"{tensor * pipeline * context} processes, and this is a single one"
            )
        return ParallelMesh()
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % (tensor * pipeline * context):
        raise ValueError(
            f"world size {world} is not a multiple of tensor {tensor} x pipeline {pipeline} x "
            f"context {context} = {tensor * pipeline * context}"
        )
    grid = np.arange(world).reshape(pipeline, -1, context, tensor)

    def axis(dims: Sequence[int], ranks: np.ndarray = grid) -> Axis:
        """The group of all ranks whose coordinates differ from this rank's only along `dims`."""
        found, size = Axis(), math.prod(ranks.shape[d] for d in dims)
        if size == 1:
            return found
        for members in np.moveaxis(ranks, dims, range(-len(dims), 0)).reshape(-1, size).tolist():
            group = dist.new_group(members, timeout=timeout)  # every rank makes every group
            if rank in members:
                found = Axis(group, members.index(rank), size)  # type: ignore[arg-type]
        return found

    pp, dp, cp, tp = (axis([dim]) for dim in range(4))
    if tp_message_bytes and tp.group is not None:
        tp = replace(tp, peers=PeerMemory(tp.group, tp.rank, tp.size, tp_message_bytes))
    # DeviceMesh wants a group for axes of size 1 too. This rank makes it alone, which NCCL could
    # not: it splits groups off the one of all ranks.
    backend = "gloo" if dist.get_backend() == "nccl" else None
    alone: Any = dist.new_group([rank], timeout, backend, use_local_synchronization=True)
    return ParallelMesh(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        dp_cp=axis([1, 2]),
        model=axis([0, 3]),
        tp_copies=axis([1], grid.reshape(-1, kv_copies)),
        ends=axis([0], grid[[0, -1]] if pipeline > 1 else grid[:1]),
        rank=rank,
        world_size=world,
        sequence_parallel=sequence_parallel and tensor > 1,
        device_mesh=DeviceMesh.from_group(
            [axis.group or alone for axis in (pp, dp, cp, tp)],
            device_type,
            mesh=torch.from_numpy(grid),
            mesh_dim_names=("pp", "dp", "cp", "tp"),
        ),
    )


def gather_objects(own: T, group: dist.ProcessGroup | None) -> list[T]:
    """What each rank of `group` has, by rank; without a group this process is alone."""
    if group is None:
        return [own]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every
