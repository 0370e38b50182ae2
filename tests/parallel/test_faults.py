"""Tests of the parity tests: a fault makes the comparison fail, and by far."""

import pytest

from tests.distributed import run_distributed
from tests.parallel.parity import Cell, differences, run_cell

CASES = {  # fault: the cell that must show it, and what must differ
    "lambda_gradients_are_not_summed": (Cell("diff_v1", tensor=2), "gradients of layers.0.mixer.l"),
    "delta_norm_gradients_are_not_summed": (
        Cell("delta_net", tensor=2),
        "gradients of layers.0.mixer.o_norm",
    ),
    "norm_gradients_are_not_summed": (Cell(tensor=2, sequence=True), "gradients of layers.0.mlp_n"),
    "copied_key_gradients_are_not_summed": (Cell(tensor=2, groups=1), "gradients of layers.0.mixe"),
    "replicated_weights_count_twice": (Cell(tensor=2), "norms"),
    "pairs_are_halves": (Cell(tensor=2), "losses"),
    "loss_is_scaled_by_local_tokens": (Cell(data=2), "losses"),
    "a_stage_drops_the_documents": (Cell(pipeline="2", packed=True), "losses"),
    "stages_count_layers_from_zero": (Cell("diff_v1", pipeline="2"), "losses"),
    "tied_gradients_are_not_summed": (Cell(pipeline="2"), "gradients of embedding.weight"),
    "tied_copies_count_twice": (Cell(pipeline="2"), "norms"),
    "context_chunks_in_rank_order": (Cell(context=2), "losses"),
    "exchanged_sequences_in_rank_order": (Cell("gated_delta_net", context=2), "losses"),
    "context_positions_are_local": (Cell(context=2), "losses"),
}


@pytest.mark.parametrize("fault", CASES)
def test_fault_is_seen(fault):
    cell, place = CASES[fault]
    # The same fault in one process: a wrong pairing there is another model, not another split.
    alone = Cell(cell.mixer, groups=cell.groups, packed=cell.packed)
    both = fault in ("pairs_are_halves",)
    (whole,) = run_distributed(1, run_cell, alone, fault if both else None)
    found: dict[str, float] = {}
    for outcome in run_distributed(cell.world, run_cell, cell, fault):
        for name, error in differences(outcome, whole).items():
            found[name] = max(error, found.get(name, 0.0))
    assert max(error for name, error in found.items() if name.startswith(place)) > 1e-4
