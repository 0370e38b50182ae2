"""Initial values depend on the seed, the global name and the global index alone."""

import pytest
import torch
from torch import nn

from megadiff.parallel.linear import ColumnParallelLinear, Output, RowParallelLinear, shard
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import (
    Init,
    Section,
    initialize,
    local_view,
    make_parameter,
    named_sections,
    record_of,
)

FACTORY = {"dtype": torch.float32, "device": "cpu"}


def whole_values(module: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    initialize(module, seed)
    return {
        s.name: local_view(p, s, record_of(p).dim).detach().clone()
        for p, s in named_sections(module)
    }


def column(rank: int = 0, size: int = 1) -> ColumnParallelLinear:
    mesh = ParallelMesh(tp=Axis(None, rank, size), tp_copies=Axis(None, rank % 2, 2))
    outputs = [Output("q", 4 * 700, 4, Init(0.5)), Output("k", 2 * 50, 2, Init(0.1, mean=1.0))]
    return ColumnParallelLinear(60, outputs, mesh, "mixer", pad_to=64, **FACTORY)


def test_column_shards_are_slices_of_the_whole():
    whole = whole_values(column())
    for rank in range(4):
        part = column(rank, 4)
        initialize(part, 3)
        q, k = record_of(part.weight).sections
        assert torch.equal(
            local_view(part.weight, q, 0), whole["mixer.q.weight"][700 * rank :][:700]
        )
        # Two groups on four ranks: ranks 0 and 1 hold copies of the first, 2 and 3 of the second.
        assert (k.copies, k.copy_index, k.offset) == (2, rank % 2, 50 * (rank // 2))
        assert torch.equal(local_view(part.weight, k, 0), whole["mixer.k.weight"][k.offset :][:50])
        assert part.weight.shape[0] % 64 == 0
        assert not part.weight[750:].any()


def test_row_shards_are_slices_of_the_whole():
    def row(rank: int, size: int) -> RowParallelLinear:
        mesh = ParallelMesh(tp=Axis(None, rank, size))
        return RowParallelLinear(30, 5000, 3, mesh, "o", init=Init(1.0), **FACTORY)

    whole = whole_values(row(0, 1))["o.weight"]
    for rank in range(3):
        part = whole_values(row(rank, 3))["o.weight"]
        assert torch.equal(part, whole[:, 10 * rank : 10 * rank + 10])


def test_values_follow_seed_name_and_distribution():
    module = nn.Module()
    uniform = Section("a", (300, 400), 0, 300, 0, "matrix", Init(2.0, uniform=True))
    normal = Section("b", (300, 400), 0, 300, 0, "matrix", Init(0.02))
    module.a = make_parameter((300, 400), [uniform], **FACTORY)
    module.b = make_parameter((300, 400), [normal], **FACTORY)
    first, again, other = (whole_values(module, seed) for seed in (1, 1, 2))
    assert torch.equal(first["b"], again["b"])
    assert not torch.equal(first["b"], other["b"])
    # 120,000 draws: the standard error of the deviation is 0.2 %.
    assert first["b"].std().item() == pytest.approx(0.02, rel=0.01)
    assert first["a"].std().item() == pytest.approx(2.0, rel=0.01)
    assert first["a"].abs().max() <= 2.0 * 3**0.5
    correlation = torch.corrcoef(torch.stack([first["a"].flatten(), first["b"].flatten()]))[0, 1]
    assert abs(correlation) < 0.015  # five standard errors


def test_shard_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match="3 parts can not be split over 2"):
        shard(30, 3, Axis(None, 0, 2))


def test_a_local_shape_must_fit_the_global_one():
    section = Section("w", (8, 4), 0, 4, 0, "matrix", Init(1.0))
    with pytest.raises(ValueError, match=r"w: local shape \(4, 5\)"):
        make_parameter((4, 5), [section], **FACTORY)
