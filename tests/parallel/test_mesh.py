"""Topologies of 512 ranks, on torch's fake backend in one process."""

from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megadiff.parallel.mesh import Axis, ParallelMesh, build_mesh
from tests.distributed import run_distributed

WORLD = 512


@pytest.fixture
def as_rank() -> Iterator:
    """A function that makes this process a given rank of 512 and builds its mesh."""

    def build(rank: int, **split: int) -> ParallelMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        return build_mesh(**split)

    yield build
    dist.destroy_process_group()


def members(axis: Axis) -> list[int]:
    return [] if axis.group is None else dist.get_process_group_ranks(axis.group)


@pytest.mark.parametrize("rank", [0, 37, 300, 511])
def test_coordinates_and_groups(as_rank, rank):
    """rank = ((pp * DP + dp) * CP + cp) * TP + tp, here 4 x 8 x 2 x 8."""
    mesh = as_rank(rank, tensor=8, context=2, pipeline=4)
    tp, cp, dp, pp = rank % 8, rank // 8 % 2, rank // 16 % 8, rank // 128
    assert (mesh.tp.rank, mesh.cp.rank, mesh.dp.rank, mesh.pp.rank) == (tp, cp, dp, pp)
    assert (mesh.tp.size, mesh.cp.size, mesh.dp.size, mesh.pp.size) == (8, 2, 8, 4)
    node = rank - tp  # tensor-parallel ranks are neighbours, inside one node of eight
    assert members(mesh.tp) == list(range(node, node + 8))
    assert members(mesh.cp) == [rank - 8 * cp + 8 * i for i in range(2)]
    assert members(mesh.dp) == [rank - 16 * dp + 16 * i for i in range(8)]
    assert members(mesh.pp) == [rank - 128 * pp + 128 * i for i in range(4)]
    same_parameters = range(128 * pp + tp, 128 * (pp + 1), 8)
    assert members(mesh.dp_cp) == list(same_parameters)
    one_model = [128 * p + 16 * dp + 8 * cp + t for p in range(4) for t in range(8)]
    assert members(mesh.model) == one_model


@pytest.mark.parametrize("rank", [5, 200, 389])
def test_first_and_last_stage_hold_the_tied_embeddings(as_rank, rank):
    mesh = as_rank(rank, tensor=8, pipeline=4)
    place = rank % 128
    at_an_end = rank // 128 in (0, 3)
    assert members(mesh.ends) == ([place, place + 384] if at_an_end else [])


def test_ranks_that_share_a_key_value_group_are_neighbours(as_rank):
    """Eight tensor-parallel ranks on two groups: four neighbours hold copies of each."""
    mesh = as_rank(13, tensor=8, kv_copies=4)
    assert members(mesh.tp_copies) == [12, 13, 14, 15]
    assert (mesh.tp_copies.rank, mesh.tp_copies.size) == (1, 4)


def timeouts() -> list[timedelta]:
    """Of all groups of a mesh."""
    mesh = build_mesh(tensor=2, kv_copies=2, pipeline=2, timeout=timedelta(seconds=77))
    groups = [getattr(mesh, f.name) for f in fields(mesh)]
    groups = [axis.group for axis in groups if isinstance(axis, Axis) and axis.group is not None]
    assert mesh.device_mesh is not None
    groups += mesh.device_mesh.get_all_groups()
    return [g._get_backend(torch.device("cpu")).options._timeout for g in groups]


def test_every_group_has_the_given_timeout():
    for found in run_distributed(4, timeouts):
        assert len(found) == 9 and set(found) == {timedelta(seconds=77)}


def test_named_axes_for_torch_parts(as_rank):
    mesh = as_rank(37, tensor=8, pipeline=4)
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert tuple(mesh.device_mesh.shape) == (4, 16, 1, 8)
    assert mesh.device_mesh["tp"].get_local_rank() == mesh.tp.rank


def test_impossible_split_is_refused_with_its_arithmetic(as_rank):
    with pytest.raises(ValueError, match=r"512 is not .* tensor 3 x pipeline 5 x .* = 15"):
        as_rank(0, tensor=3, pipeline=5)


def test_a_single_process_has_no_groups():
    assert build_mesh() == ParallelMesh()
    with pytest.raises(ValueError, match="needs 4 processes"):
        build_mesh(tensor=2, context=2)
