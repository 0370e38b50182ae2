"""Gathers and sums along the sequence, whole and in the parts that overlap with products."""

import pytest
import torch
import torch.distributed as dist

from megadiff.parallel import collectives
from megadiff.parallel.collectives import PendingGather, PendingReduceScatter
from megadiff.parallel.mesh import build_mesh
from tests.distributed import run_distributed


def job(batch: int) -> None:
    axis = build_mesh(tensor=dist.get_world_size()).tp
    x = torch.arange(batch * 12 * 3, dtype=torch.float64).view(batch, 12, 3)
    mine = x.chunk(axis.size, dim=1)[axis.rank]

    gather = PendingGather(mine, axis, whole=False)
    assert len(gather.parts) == min(batch, 2)
    for part in gather.parts:
        assert torch.equal(gather.wait(part), x[part])
    assert torch.equal(gather.wait(), x)
    assert torch.equal(PendingGather(mine, axis, whole=True).wait(), x)

    scatter = PendingReduceScatter(x.shape, x, axis)
    for part in scatter.parts:
        scatter.start(part, (axis.rank + 1) * x[part])
    ranks = axis.size * (axis.size + 1) // 2
    assert torch.equal(scatter.wait(), ranks * mine)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_parts_arrive_in_their_places(batch):
    run_distributed(3, job, batch)


def test_gloo_gathers_one_by_one_whatever_the_device(monkeypatch):
    """Its coalesced gather corrupts the heap, and knows no GPUs."""
    gathered = []
    monkeypatch.setattr(collectives, "all_gather_single", lambda *args, **_: gathered.append(args))
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    parts = list(torch.empty(3, 2, device="meta"))
    collectives._start_gathers(parts, parts, group=None)
    assert [a is b for a, b in gathered] == [True] * 3
