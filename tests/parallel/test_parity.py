"""Every split trains as one process does: losses, gradients, gradient norm, weights, evaluation.

Cells cover all pairs of values of the dimensions in `parity.VALUES`. Further cells stand where one
case matters alone.
"""

from functools import cache

import pytest

from tests.distributed import run_distributed
from tests.parallel.parity import (
    Cell,
    Outcome,
    differences,
    matrix,
    pairs_of,
    possible_pairs,
    report,
    run_cell,
)

TOLERANCE = 1e-9  # float64; only the order of sums differs

FURTHER = [
    Cell("diff_v2", tensor=2, sequence=True, data=2, vocab=50257),
    Cell("diff_v1", "layer", groups=1, tensor=2, pipeline="2x2", packed=True, micro_batches=4),
    Cell("diff_v2", groups=2, tensor=2, sequence=True, context=2, packed=True, micro_batches=2),
    Cell("DDG1", tensor=2, sequence=True, pipeline="2balanced", packed=True, recompute="uniform1"),
    Cell("D2G*", groups=2, tensor=2, sequence=True, context=2, packed=True, micro_batches=2),
    Cell("GD21", "layer", data=2, context=2, sharded=True, micro_batches=1),
]

EIGHT = [  # processes
    Cell("diff_v1", tensor=2, sequence=True, pipeline="2", context=2, packed=True),
    Cell("diff_v2", "layer", tensor=2, pipeline="2x2", data=2, sharded=True, recompute="uniform1"),
    Cell("standard", groups=2, tensor=4, sequence=True, context=2, packed=True, tied=False),
    Cell("diff_v2", groups=1, pipeline="4", context=2, sharded=True, recompute="selective"),
    Cell("2DG1", tensor=2, pipeline="4x2", micro_batches=4, packed=True, layers=8),
]


@cache
def single_process(model: Cell) -> Outcome:
    return run_cell(model)


def outcome_of_one_process(cell: Cell) -> Outcome:
    """Of the same model and batches; computed once for all cells with the same model."""
    model = ("mixer", "style", "groups", "tied", "packed", "vocab", "layers")
    return single_process(Cell(**{name: getattr(cell, name) for name in model}))


def test_every_possible_pair_is_in_some_cell(capsys):
    with capsys.disabled():
        print(f"\n{report()}")
    possible, _ = possible_pairs()
    assert possible <= set().union(*map(pairs_of, matrix()))


@pytest.mark.parametrize("cell", [*matrix(), *FURTHER], ids=str)
def test_split_equals_one_process(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", EIGHT, ids=str)
def test_split_over_eight_processes_equals_one(cell):
    check(cell)


def check(cell: Cell) -> None:
    whole = outcome_of_one_process(cell)
    for rank, outcome in enumerate(run_distributed(cell.world, run_cell, cell)):
        worst = max(differences(outcome, whole).items(), key=lambda item: item[1])
        assert worst[1] <= TOLERANCE, f"rank {rank}: {worst[0]} differ by {worst[1]:.1e}"
