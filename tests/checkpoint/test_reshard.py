"""Any split goes on from what any other saved: weights, main weights and moments.

Three legs of two steps in float64, each in new processes: one process, another split, one process.
The last checkpoint is compared tensor by tensor with that of one process that never stopped.
"""

import shlex

import pytest

from tests.checkpoint.training_runs import Training, arguments, losses, write_text
from tools.checkpoint import main as checkpoint_tool

# Tied embeddings over a vocabulary that no number of ranks divides, every mixer, shared keys.
MODEL = shlex.split(
    "--fp64 --num-layers 6 --hybrid-layer-pattern *12DG2 --num-query-groups 1 --vocab-size 61 "
    "--make-vocab-size-divisible-by 1 --global-batch-size 8 --lr-warmup-iters 1"
)
STEPS = 6
SPLITS = {
    "data 2": (2, ""),
    "sharded optimizer 2": (2, "--use-distributed-optimizer"),
    "tensor 2, sequence": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline 2": (2, "--pipeline-model-parallel-size 2"),
    "tensor 2, sharded optimizer 2": (
        4,
        "--tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "sharded optimizer 4": (4, "--use-distributed-optimizer"),
    "pipeline 2, tensor 2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    "pipeline 2 of 3 stages each, data 2": (
        4,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
        "--micro-batch-size 1",
    ),
    "context 2, sharded optimizer": (2, "--context-parallel-size 2 --use-distributed-optimizer"),
}
QUICK = ("pipeline 2", "tensor 2, sharded optimizer 2")


def run(folder, text, world, until, *flags):
    """Go on from the checkpoints in `folder` until step `until`, and save there."""
    saved = ["--save", str(folder), "--load", str(folder), "--exit-interval", str(until)]
    output = folder.with_suffix(".output")
    argv = arguments(text, folder.with_suffix(".log"), STEPS, *MODEL, *saved, *flags)
    assert Training(world, argv, output).join(300) == [0] * world, output.read_text()[-4000:]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("text") / "text"
    write_text(prefix)
    return prefix


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def one_process(request, text, tmp_path_factory):
    """A run that never stops, and its flags."""
    folder = tmp_path_factory.mktemp("one_process") / request.param
    flags = ["--untie-embeddings-and-output-weights"] * (request.param == "untied")
    run(folder, text, 1, STEPS, *flags)
    return folder, flags


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SPLITS],
)
def test_a_run_goes_on_on_another_split_and_back(name, text, one_process, tmp_path, capsys):
    reference, flags = one_process
    world, split = SPLITS[name]
    folder = tmp_path / "run"
    run(folder, text, 1, 2, *flags)
    run(folder, text, world, 4, *flags, *split.split())
    run(folder, text, 1, STEPS, *flags)
    assert checkpoint_tool(["compare", str(folder), str(reference), "--tolerance", "1e-9"]) == 0, (
        capsys.readouterr().out
    )
    expected = losses(reference.with_suffix(".log"))
    for step, values in losses(folder.with_suffix(".log")).items():
        assert values and [*values] == pytest.approx([*expected[step]] * len(values), rel=1e-9)
