"""Every split trains as one process does: losses, gradients, gradient norm, weights, evaluation.

Cells cover all pairs of values of the dimensions in `parity.VALUES`; pairs that need eight
processes are in slow cells. Further cells stand where one case matters alone.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from tests.distributed import run_distributed
from tests.parallel.parity import (
    VALUES,
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

GPT2 = 50257  # the vocabulary, which nothing divides
FURTHER = [
    Cell("diff_v2", tensor=2, sequence=True, data=2, vocab=GPT2),
    Cell("diff_v1", "layer", groups=1, tensor=2, pipeline="2x2", packed=True, vocab=GPT2),
    Cell("diff_v2", tied=False, tensor=2, context=2, packed=True, micro_batches=2, vocab=GPT2),
    Cell("standard", groups=2, pipeline="2", data=2, sharded=True, vocab=GPT2),
    Cell("diff_v2", groups=2, tensor=2, sequence=True, context=2, packed=True, micro_batches=2),
    Cell("DDG1", tensor=2, sequence=True, pipeline="2balanced", packed=True, recompute="uniform1"),
    Cell("D2G*", groups=2, tensor=2, sequence=True, context=2, packed=True, micro_batches=2),
    Cell("GD21", "layer", data=2, context=2, sharded=True, micro_batches=1),
]

FLOAT32 = [
    Cell("diff_v1", groups=1, tensor=2, sequence=True, pipeline="2", packed=True),
    Cell("2DG1", "layer", groups=2, context=2, data=2, sharded=True),
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
    model = ("mixer", "style", "groups", "tied", "packed", "precision", "vocab", "layers")
    return single_process(Cell(**{name: getattr(cell, name) for name in model}))


def test_every_possible_pair_is_in_some_cell(capsys):
    with capsys.disabled():
        print(f"\n{report()}")
    assert possible_pairs()[0] <= set().union(*map(pairs_of, matrix()))
    slow = set().union(*map(pairs_of, matrix(8, beyond=4)))
    assert possible_pairs(8)[0] - possible_pairs()[0] <= slow


def test_no_other_pair_is_excluded():
    """A split that is refused by mistake would take its cells away, and no test would fail."""
    too_few = {
        (("pipeline", pipeline), ("micro_batches", n))
        for pipeline, n in product(VALUES["pipeline"], VALUES["micro_batches"])
        if n < int(pipeline[0]) and pipeline != "2gpipe"
    }
    sixteen_processes = {(("tensor", 4), ("pipeline", p)) for p in ("4", "4x2")}
    nothing = {(("tensor", 1), ("sequence", True))}
    assert set(possible_pairs(8)[1]) == nothing | sixteen_processes | too_few


def test_what_is_not_a_number_differs():
    """NaN compares with nothing: a maximum passes over it."""
    whole = Outcome([2.0, 1.0], 1.0, [3.0], {"g": (0, 0, torch.ones(2))}, {})
    assert max(differences(whole, whole).values()) == 0
    for change in (
        {"losses": [2.0, math.nan]},
        {"evaluation": math.nan},
        {"gradients": {"g": (0, 0, torch.tensor([1.0, math.nan]))}},
    ):
        assert max(differences(replace(whole, **change), whole).values()) == math.inf


@pytest.mark.parametrize("cell", [*matrix(), *FURTHER], ids=str)
def test_split_equals_one_process(cell):
    check(cell)


@pytest.mark.parametrize("cell", FLOAT32, ids=str)
def test_split_in_float32_rounds_as_one_process_does(cell):
    """Both against float64, where losses and gradients may not be further off than by rounding."""
    exact, narrow = outcome_of_one_process(cell), replace(cell, precision="fp32")
    bounds = differences(outcome_of_one_process(narrow), exact)
    for outcome in run_distributed(cell.world, run_cell, narrow):
        found = differences(outcome, exact)
        for kind in ("losses", "norms", "evaluation", "gradients"):
            ours, bound = (
                max(e for n, e in d.items() if n.startswith(kind)) for d in (found, bounds)
            )
            assert ours <= 8 * max(bound, 2**-23), kind


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*EIGHT, *matrix(8, beyond=4)], ids=str)
def test_split_over_eight_processes_equals_one(cell):
    check(cell)


def check(cell: Cell) -> None:
    whole = outcome_of_one_process(cell)
    for rank, outcome in enumerate(run_distributed(cell.world, run_cell, cell)):
        worst = max(differences(outcome, whole).items(), key=lambda item: item[1])
        assert worst[1] <= TOLERANCE, f"rank {rank}: {worst[0]} differ by {worst[1]:.1e}"
