"""Messages that copy engines carry are those that NCCL would, and training with them is exact."""

import os
import random
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megadiff.config import Config, ConfigError, load_config, validate
from megadiff.models.memory import estimate_memory
from megadiff.parallel import collectives
from megadiff.parallel.copy_engine import PeerMemory
from megadiff.parallel.mesh import Axis
from megadiff.training.setup import start
from tests.distributed import run_distributed
from tests.parallel.parity import Cell, Outcome, differences, run_cell

SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
FAST = f"{SPLIT} --tp-comm-overlap"


def config_with(flags: str) -> Config:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    steps = "--vocab-size 512 --micro-batch-size 2 --global-batch-size 2 --train-iters 1"
    return load_config(f"{model} {steps} --lr 1e-3 {flags}".split())


def test_it_needs_sequence_parallelism():
    config = config_with("--tensor-model-parallel-size 2 --tp-comm-overlap")
    with pytest.raises(ConfigError, match="add that, with"):
        validate(config, 2)


def start_on_cpu() -> str:
    with pytest.raises(ConfigError) as refused:
        start(config_with(f"{FAST} --device cpu"))
    return str(refused.value)


def test_it_needs_gpus():
    assert "needs GPUs and NCCL" in run_distributed(2, start_on_cpu)[0]


def test_its_buffers_are_in_the_estimate():
    """Four messages of 2 x 64 tokens of 64 float32 numbers."""
    with_them, without = (
        estimate_memory(config_with(flags), 2)[0].total for flags in (FAST, SPLIT)
    )
    assert with_them - without == 4 * 2 * 64 * 64 * 4


def exchange() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # more ranks than GPUs
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.group.WORLD
    assert group is not None
    axis = Axis(group, rank, size, PeerMemory(group, rank, size))
    late = random.Random(rank)

    def be_late() -> None:
        torch.cuda._sleep(late.choice([0, 0, 10**5, 3 * 10**6]))  # up to two milliseconds

    for i in range(120):
        generator = torch.Generator().manual_seed(i)
        batch, width = (1, 2, 3, 4, 8, 9)[i % 6], (64, 256, 520)[i % 3]  # buffers grow
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        # whole numbers, whose sums are exact
        shape = (size, batch, 8 * size, width)
        every = torch.randint(-60, 60, shape, generator=generator).to(dtype)
        y = every[rank].cuda()
        x = y.chunk(size, 1)[rank]  # not contiguous
        pieces = collectives.pieces(batch, axis)
        be_late()
        gather = collectives.start_gather(x, axis, pieces)
        parts = torch.cat([gather.wait(rows).clone() for rows in pieces])
        be_late()
        scatter = collectives.start_reduce_scatter(y.shape, y, axis)
        for rows in pieces:
            scatter.start(rows, y[rows])
        whole = gather.wait().clone()
        total = scatter.wait()
        del gather, scatter
        expected = torch.cat([every[r].chunk(size, 1)[r] for r in range(size)], 1)
        assert torch.equal(parts.cpu(), expected), f"gathered in pieces, message {i}"
        assert torch.equal(whole.cpu(), expected), f"gathered, message {i}"
        assert torch.equal(total.cpu(), every.sum(0).chunk(size, 1)[rank]), f"sum, message {i}"

    first, second = (collectives.start_gather(x, axis) for _ in range(2))
    with pytest.raises(RuntimeError, match="still held"):
        collectives.start_gather(x, axis)
    del first, second
    dist.barrier()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_whole_however_late_a_rank_is(ranks):
    run_distributed(ranks, exchange)


CELLS = [
    Cell("diff_v2", tensor=2, sequence=True, micro_batches=1, recompute="uniform1"),
    Cell("diff_v1", "layer", groups=1, tensor=2, sequence=True, micro_batches=2, packed=True),
    Cell("2DG1", tensor=2, sequence=True, micro_batches=4, recompute="modules"),
]


def train_on_gpus(cell: Cell, port: int) -> Outcome:
    dist.destroy_process_group()  # it was gloo's
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    outcome = run_cell(cell)
    for tensors in (outcome.gradients, outcome.weights):
        tensors |= {name: (offset, dim, t.cpu()) for name, (offset, dim, t) in tensors.items()}
    return outcome


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_split_trains_as_one_process_does(cell):
    """In float64, as the cells of test_parity.py."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    whole = run_cell(replace(cell, tensor=1, sequence=False))
    fast = replace(cell, device="cuda", overlap=True)
    for outcome in run_distributed(2, train_on_gpus, fast, port):
        found = differences(outcome, whole)
        assert max(found.values()) < 1e-9, {k: v for k, v in found.items() if v > 1e-9}
