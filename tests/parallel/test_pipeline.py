"""Which stage holds which layers, and how many micro-batches are in flight."""

from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megadiff.config import Config, ModelConfig, ParallelConfig, TrainingConfig, validate
from megadiff.models.build import layer_costs, stage_layers
from megadiff.models.memory import estimate_memory, in_flight
from megadiff.parallel.mesh import Axis
from megadiff.parallel.pipeline import balanced_sizes
from tests.distributed import run_distributed
from tests.parallel import parity
from tests.parallel.parity import Cell, config_of, run_cell


def config(pipeline: int, layers: int = 8, **options) -> Config:
    model = ModelConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=4, vocab_size=options.pop("vocab", 8)
    )
    parallel = ParallelConfig(pipeline_model_parallel_size=pipeline, **options)
    return Config(model, parallel, TrainingConfig(seq_length=64, train_iters=1))


def test_even_stages_are_equal_runs():
    assert stage_layers(config(4)) == [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_virtual_stages_go_round_the_ranks():
    stages = stage_layers(config(2, num_virtual_stages_per_pipeline_rank=2))
    assert [list(stages[i]) for i in (0, 2)] == [[0, 1], [4, 5]]  # rank 0
    assert [list(stages[i]) for i in (1, 3)] == [[2, 3], [6, 7]]  # rank 1


def test_given_layers():
    stages = stage_layers(config(3, pipeline_model_parallel_layout="2,4,2"))
    assert stages == [range(2), range(2, 6), range(6, 8)]


def test_balanced_stages_make_room_for_the_output():
    """A vocabulary that costs as much as three layers takes the place of three layers."""
    wide = config(2, layers=9, pipeline_model_parallel_layout="balanced")
    cost = layer_costs(wide.model, 64)[0]
    wide.model.vocab_size = round(3 * cost / (2 * 64))
    assert [len(stage) for stage in stage_layers(wide)] == [6, 3]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_balanced_sizes_are_the_best_of_all(stages):
    """Against every way to cut nine layers of different cost."""
    costs, first, last = [3.0, 1, 1, 4, 1, 2, 2, 1, 5], 1.5, 4.0

    def dearest(sizes: list[int]) -> float:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        runs = [sum(costs[e - n : e]) for n, e in zip(sizes, ends, strict=True)]
        runs[0] += first
        runs[-1] += last
        return max(runs)

    cuts = (([0, *inner, 9]) for inner in combinations(range(1, 9), stages - 1))
    best = min(dearest([b - a for a, b in pairwise(cut)]) for cut in cuts)
    sizes = balanced_sizes(costs, stages, first, last)
    assert sum(sizes) == 9 and min(sizes) > 0
    assert dearest(sizes) == best


def test_longer_sequences_make_attention_dearer_than_delta_layers():
    model = ModelConfig(num_layers=2, hybrid_layer_pattern="2D", vocab_size=8)
    short, long = layer_costs(model, 128), layer_costs(model, 65536)
    assert long[0] > 2 * short[0] and long[1] == short[1]


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        ({"pipeline": 3}, 3, "--num-layers 8 do not divide evenly among 3 pipeline stages"),
        ({"pipeline": 16}, 16, "--num-layers 8 are fewer than the 16 stages"),
        (
            {"pipeline": 2, "pipeline_model_parallel_layout": "3,4"},
            2,
            "3,4 has 2 stages with 7 layers in all, and the model has 2 stages with 8",
        ),
        ({"pipeline": 2, "pipeline_model_parallel_layout": "evn"}, 2, "'evn' is neither even"),
        (
            {"pipeline": 1, "num_virtual_stages_per_pipeline_rank": 2},
            1,
            "--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size",
        ),
        (
            {"pipeline": 2, "num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "1f1b"},
            2,
            "--pipeline-schedule 1f1b runs one stage on each rank",
        ),
        ({"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}, 2, "virtual-stages"),
        ({"pipeline": 2}, 3, "the world size 3 is not a multiple of .* = 2"),
        ({"pipeline": 4}, 4, "a step has 1 micro-batches, fewer than .* 4"),
    ],
)
def test_impossible_pipelines_are_refused_with_their_numbers(options, world, message):
    with pytest.raises(ValueError, match=message):
        validate(config(**options), world)


def test_the_interleaved_schedule_needs_whole_rounds_of_micro_batches():
    uneven = config(2, num_virtual_stages_per_pipeline_rank=2)
    uneven.training.global_batch_size = 3
    with pytest.raises(ValueError, match=r"in multiples of .* 2, and a step has 3"):
        validate(uneven, 2)


def most_in_flight(cell: Cell, layout: str) -> int:
    """The most layers of this rank at a time whose backward is still to come."""
    live, most = 0, 0
    config = config_of(cell)
    config.parallel.pipeline_model_parallel_layout = layout
    parity.config_of = lambda _: config
    forward, backward = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk

    def counted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal live, most
        live += len(self.submod.chunk.blocks)
        most = max(most, live)
        return forward(self, *args, **kwargs)

    def counted_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal live
        live -= len(self.submod.chunk.blocks)
        return backward(self, *args, **kwargs)

    PipelineStage.forward_one_chunk = counted_forward  # type: ignore[method-assign]
    PipelineStage.backward_one_chunk = counted_backward  # type: ignore[method-assign]
    run_cell(cell)
    return most


@pytest.mark.parametrize(
    ("pipeline", "layout"),
    [
        ("2gpipe", "even"),
        ("2", "3,5"),
        ("2x2", "even"),
        ("2x2", "5,1,1,1"),
        ("2x2", "1,1,1,5"),
        ("4", "even"),
        ("4x2", "even"),
    ],
)
def test_schedules_hold_as_many_layers_as_the_memory_estimate_says(pipeline, layout):
    cell = Cell(pipeline=pipeline, micro_batches=8, layers=8)
    config = config_of(cell)
    config.parallel.pipeline_model_parallel_layout = layout
    sizes = [len(layers) for layers in stage_layers(config)]
    expected = [
        in_flight(
            config.parallel.schedule,
            Axis(rank=rank, size=cell.world),
            sizes[rank :: cell.world],
            cell.micro_batches,
        )
        for rank in range(cell.world)
    ]
    assert run_distributed(cell.world, most_in_flight, cell, layout) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"), [("gpipe", 8 * 10**15), ("1f1b", 16), ("interleaved_1f1b", 23)]
)
def test_micro_batches_beyond_any_machine_are_not_counted_one_by_one(schedule, expected):
    """So that a batch of such a size is refused and not waited for."""
    runs = [8] if schedule != "interleaved_1f1b" else [5, 3]
    assert in_flight(schedule, Axis(rank=0, size=2), runs, 10**15) == expected


def most_kept(cell: Cell) -> int:
    """The most bytes that autograd keeps for backward at a time, beside parameters."""
    now, most, uses = 0, 0, Counter[int]()

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.place, self.size = storage.data_ptr(), storage.nbytes()
            now += 0 if uses[self.place] else self.size
            uses[self.place] += 1
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            uses[self.place] -= 1
            now -= 0 if uses[self.place] else self.size

    def pack(tensor: Tensor) -> Any:
        of_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor if of_parameter else Kept(tensor)

    unpack = lambda kept: kept.tensor if isinstance(kept, Kept) else kept  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run_cell(cell)
    return most


@pytest.mark.parametrize("pipeline", ["2", "2gpipe"])
def test_the_estimate_counts_the_logits_of_all_micro_batches_that_wait(pipeline):
    """Of the last stage, where they are nearly all there is; plain operators keep a bit more."""
    cell = Cell("standard", pipeline=pipeline, vocab=4096, precision="fp32")
    estimate = estimate_memory(config_of(cell), 2)[1].activations
    largest = 4 * 4096 * 32  # the gradient of the embedding, beside its buffer
    kept = run_distributed(2, most_kept, cell)[1]
    assert 0.9 < kept / (estimate - largest) < 1.1
