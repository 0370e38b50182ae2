"""Do all ranks that hold copies of a parameter hold the same bits?

Data-parallel replicas, and the copies on tensor-parallel ranks, get the same updates and must never
drift apart. When they do (a faulty device, an unsynchronised random number, a missing sum), the
loss may look healthy for a long time.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.parallel.mesh import ParallelMesh, gather_objects
from megadiff.parallel.parameter import local_view, named_sections, record_of

_BLOCK = 1 << 24  # elements hashed at a time, which bounds the memory for it
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that every bit of every element counts


class ReplicaError(RuntimeError):
    """Copies of a parameter differ."""


def bit_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of `tensor` and their places, an int64 scalar on its device."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(integers)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].long()
        places = torch.arange(start, start + part.numel(), device=part.device)
        total += ((part + 1) * ((2 * places + 1) * _MIX)).sum()
    return total


def check_replicas(
    module: nn.Module,
    mesh: ParallelMesh,
    control: dist.ProcessGroup | None,
    ties: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
) -> None:
    """Compare hashes over data-parallel, tensor-parallel and tied copies; waits for the device.

    Every rank calls it, and all raise ReplicaError with the first parameter (in module order) that
    differs on any of them. `control` is a group of all ranks; `ties` are parameters with a copy on
    another pipeline stage, and the group of ranks that hold one.
    """
    if control is None:
        return
    whole: list[tuple[str, Tensor]] = []
    replicated: list[tuple[str, Tensor]] = []
    copied: list[tuple[str, Tensor]] = []
    for parameter, section in named_sections(module):
        record = record_of(parameter)
        item = (section.name, local_view(parameter.detach(), section, record.dim))
        whole.append(item)
        if record.tie is not None:
            continue
        if mesh.tp.size > 1 and section.copies == mesh.tp.size:
            replicated.append(item)
        elif mesh.tp_copies.size > 1 and section.copies == mesh.tp_copies.size:
            copied.append(item)
    found = [
        _first_difference(whole, mesh.dp_cp.group, "data-parallel"),
        _first_difference(replicated, mesh.tp.group, "tensor-parallel"),
        _first_difference(copied, mesh.tp_copies.group, "tensor-parallel"),
        *(_first_difference([(_tie(p), p)], group, "tied") for p, group in ties),
    ]
    every = gather_objects(next((f for f in found if f is not None), None), control)
    ranks = [rank for rank, message in enumerate(every) if message is not None]
    if ranks:
        raise ReplicaError(f"{every[ranks[0]]} (seen by ranks {', '.join(map(str, ranks))})")


def _tie(parameter: nn.Parameter) -> str:
    record = record_of(parameter)
    return record.sections[0].name if record.sections else f"padding of {record.tie}"


def _first_difference(
    items: list[tuple[str, Tensor]], group: dist.ProcessGroup | None, kind: str
) -> str | None:
    if group is None or not items:
        return None
    hashes = torch.stack([bit_hash(tensor) for _, tensor in items])
    extremes = torch.stack([hashes, ~hashes])  # ~ reverses the order, so one maximum gives both
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differs = extremes[0] != ~extremes[1]
    if not differs.any():
        return None
    name = items[int(differs.int().argmax())][0]
    return (
        f"{name} differs between {kind} replicas, and so do {int(differs.sum()) - 1} more of "
        f"{len(items)} parameters"
    )
