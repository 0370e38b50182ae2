"""Messages that copy engines carry arrive whole, and training with them is exact.

Their order is checked on simulated streams; with `-m gpu` on GPUs too.
"""

import os
import random
import socket
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config import Config, ConfigError, load_config, validate
from megadiff.models.memory import estimate_memory
from megadiff.parallel import collectives, copy_engine
from megadiff.parallel.copy_engine import PIECES, PeerMemory
from megadiff.parallel.mesh import Axis
from megadiff.training import setup
from tests.distributed import run_distributed
from tests.parallel.parity import Cell, Outcome, differences, run_cell
from tests.parallel.simulated_gpus import Event, OnStream, Stream, connect, run, use_shared_memory

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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "cpu"}, "needs GPUs"),
        ({"backend": "gloo"}, "needs --distributed-backend nccl"),
        ({"local": 3}, "whose 3 ranks"),
        ({"seen": 1}, "this one sees 1"),
        ({"reach": False}, "needs GPU 1 to reach the memory of GPU 0"),
        ({}, None),
    ],
)
def test_what_it_needs_is_told(monkeypatch, changes, told):
    given = {"device": "cuda:1", "backend": None, "local": 4, "seen": 4, "reach": True} | changes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(given["local"]))
    monkeypatch.setattr(setup, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: given["seen"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: given["reach"])
    parallel = config_with(FAST).parallel
    parallel.distributed_backend = given["backend"]
    check = partial(setup._need_peers, torch.device(given["device"]), parallel)
    if told is None:
        check()
        return
    with pytest.raises(ConfigError, match=told):
        check()


def test_it_does_not_go_with_float8():
    """Its pieces would be more variants of the compiled products than the compiler takes."""
    with pytest.raises(ConfigError, match="does not go with --tp-comm-overlap"):
        validate(config_with(f"{FAST} --bf16 --fp8"), 2)


def test_its_buffers_are_in_the_estimate():
    """Four messages of 2 x 64 tokens of 64 float32 numbers."""
    with_them, without = (
        estimate_memory(config_with(flags), 2)[0].total for flags in (FAST, SPLIT)
    )
    assert with_them - without == 4 * 2 * 64 * 64 * 4


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 19])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_parts_are_everything_once(no_gpu, ranks, batch):
    """A rank's own comes first where it is read, and last where it is made."""
    for peers in connect(ranks, batch * 2 * ranks * 8):
        axis = Axis(rank=peers.rank, size=ranks, peers=peers)
        x = torch.zeros(batch, 2 * ranks, 2)
        gather = collectives.start_gather(x[:, :2], axis)
        scatter = collectives.start_reduce_scatter(x.shape, x, axis)
        for message, own in ((gather, 0), (scatter, -1)):
            assert message.parts[own].tokens == slice(2 * peers.rank, 2 * peers.rank + 2)
            assert len(message.parts) <= 1 + 2 * PIECES
            x.zero_()
            for part in message.parts:
                assert x[part].numel()
                x[part] += 1
            assert x.eq(1).all()


# What the linear layers do: a row layer's sum, a column layer's gather, and in backward the row
# layer's gather and the column layer's gather and sum at once.
FORWARD, BACKWARD = ["gather", "sum"] * 2, ["gather", "both"] * 2
ORDERS = {
    "forward and backward": (FORWARD + BACKWARD) * 4,
    "backward only": BACKWARD * 8,
    "recomputed": (FORWARD + FORWARD + BACKWARD) * 3,
    "any": [],
}


def messages_of(axis: Axis, order: list[str], seed: int, errors: list[str]) -> list[Tensor]:
    """Puts the messages of one rank on its streams; returns what has to stay alive meanwhile."""
    n, rank, kept = axis.size, axis.rank, []
    for i, kind in enumerate(order):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        batch = (1, 2, 4, 8, 9)[int(torch.randint(5, (), generator=generator))]
        every = torch.randint(-60, 60, (n, batch, 2 * n, 3), generator=generator).float()
        y = every[rank]
        x = y.chunk(n, 1)[rank].clone()
        made = [x]

        def read(found: Tensor, wanted: Tensor, what: str) -> None:
            def compare() -> None:
                if not torch.equal(found, wanted):
                    errors.append(what)

            Stream.current.run(compare)

        whole = torch.cat([every[r].chunk(n, 1)[r] for r in range(n)], 1)
        name = f"rank {rank}, message {i}, {kind}"
        gather = scatter = None
        if kind != "sum":
            gather = collectives.start_gather(x, axis, whole=kind == "both")
        if kind == "gather":
            for part in gather.parts:
                read(gather.wait(part), whole[part], f"{name}: {part}")
        if kind != "gather":
            scatter = collectives.start_reduce_scatter(y.shape, y, axis)
            for part in scatter.parts:
                made.append(y[part].clone(memory_format=torch.contiguous_format))
                scatter.start(part, made[-1])
        if gather is not None:
            read(gather.wait(), whole, f"{name}: whole")
        if scatter is not None:
            kept.append(scatter.wait())
            read(kept[-1], every.sum(0).chunk(n, 1)[rank], f"{name}: sum")
        for tensor in made:  # freed, and used for something else
            Stream.current.run(partial(tensor.fill_, 99))
        kept += made
        del gather, scatter
    return kept


def simulate(ranks: int, order: list[str], seed: int) -> list[str]:
    """What was read and is not what was sent."""
    choose, errors, streams, kept = random.Random(seed), [], [], []
    order = order or [choose.choice(["gather", "sum", "both"]) for _ in range(30)]
    host = connect(ranks, 9 * 2 * ranks * 3 * 4)
    for peers in host:
        Stream.current = Stream()
        axis = Axis(rank=peers.rank, size=ranks, peers=peers)
        with OnStream():
            kept += messages_of(axis, order, seed, errors)
        streams += [Stream.current, peers.to_peers]
    run(streams, seed)
    return errors


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    Stream.current = Stream()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_messages_arrive_whole_in_any_order_of_events(no_gpu, order, ranks):
    for seed in range(8):
        assert not simulate(ranks, ORDERS[order], seed), f"seed {seed}"


def test_a_buffer_less_is_too_few(no_gpu, monkeypatch):
    monkeypatch.setattr(copy_engine, "SLOTS", 3)
    assert any(simulate(2, ORDERS["any"], seed) for seed in range(20))


def test_a_message_is_read_before_the_second_one_after_it_starts(no_gpu):
    axis = Axis(size=2, peers=connect(2, 48)[0])
    x = torch.ones(1, 2, 3)
    first = collectives.start_gather(x, axis)
    first.wait()
    collectives.start_gather(x, axis)
    with pytest.raises(RuntimeError, match="still held"):
        collectives.start_gather(x, axis)
    del first
    with pytest.raises(RuntimeError, match="for buffers of 512"):
        collectives.start_gather(torch.ones(40, 2, 3), axis)
    collectives.start_gather(x, axis)
    with pytest.raises(RuntimeError, match="not waited for"):
        collectives.start_gather(x, axis)


CELLS = [
    Cell("diff_v2", tensor=2, sequence=True, micro_batches=1, recompute="uniform1"),
    Cell("diff_v1", "layer", groups=1, tensor=2, sequence=True, micro_batches=2, packed=True),
    Cell("2DG1", tensor=2, sequence=True, micro_batches=4, recompute="modules"),
]


def train_in_shared_memory(cell: Cell, folder: str) -> Outcome:
    use_shared_memory(folder)
    setup._need_peers = lambda *_: None
    return run_cell(cell)


@pytest.mark.parametrize(
    "cell", [*CELLS, Cell("standard", groups=2, tensor=4, sequence=True, micro_batches=2)], ids=str
)
def test_layers_read_every_message_in_time(tmp_path, cell):
    whole = run_cell(replace(cell, tensor=1, sequence=False))
    split = replace(cell, overlap=True)
    for outcome in run_distributed(cell.world, train_in_shared_memory, split, str(tmp_path)):
        found = differences(outcome, whole)
        assert max(found.values()) < 1e-9, {k: v for k, v in found.items() if v > 1e-9}


@pytest.mark.parametrize(("given", "used"), [("1", "3"), ("0", "0"), (None, None)])
def test_a_message_that_times_out_is_not_aborted(monkeypatch, given, used):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    setup.end_where_it_waits()
    assert os.environ.get(name) == used


def exchange() -> None:
    """The same orders on GPUs, of which each may have several ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.group.WORLD
    assert group is not None
    axis = Axis(group, rank, size, PeerMemory(group, rank, size, 9 * 8 * size * 520 * 4))
    late = random.Random(rank)

    def be_late() -> None:
        torch.cuda._sleep(late.choice([0, 0, 10**5, 3 * 10**6]))  # up to two milliseconds

    for i in range(160):
        generator = torch.Generator().manual_seed(i)
        kind = ["gather", "sum", "both"][int(torch.randint(3, (), generator=generator))]
        batch, width = (1, 2, 3, 4, 8, 9)[i % 6], (64, 256, 520)[i % 3]
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        # whole numbers, whose sums are exact
        shape = (size, batch, 8 * size, width)
        every = torch.randint(-60, 60, shape, generator=generator).to(dtype)
        y = every[rank].cuda()
        x = y.chunk(size, 1)[rank]  # not contiguous
        whole = torch.cat([every[r].chunk(size, 1)[r] for r in range(size)], 1)
        gather = scatter = None
        be_late()
        if kind != "sum":
            gather = collectives.start_gather(x, axis, whole=kind == "both")
        if kind == "gather":
            found = torch.empty_like(whole)
            for part in gather.parts:
                found[part] = gather.wait(part).cpu()
            assert torch.equal(found, whole), f"gathered in parts, message {i}"
        be_late()
        if kind != "gather":
            scatter = collectives.start_reduce_scatter(y.shape, y, axis)
            for part in scatter.parts:
                scatter.start(part, y[part])
        if gather is not None:
            found = gather.wait().clone()
            be_late()
            assert torch.equal(found.cpu(), whole), f"gathered, message {i}"
        if scatter is not None:
            total = scatter.wait()
            assert torch.equal(total.cpu(), every.sum(0).chunk(size, 1)[rank]), f"sum, message {i}"
        del gather, scatter
    dist.barrier()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_whole_however_late_a_rank_is(ranks):
    run_distributed(ranks, exchange)


def train_on_gpus(cell: Cell, port: int) -> Outcome:
    if torch.cuda.device_count() < 2:
        share_one_gpu()
    else:
        dist.destroy_process_group()  # it was gloo's
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    outcome = run_cell(cell)
    for tensors in (outcome.gradients, outcome.weights):
        tensors |= {name: (offset, dim, t.cpu()) for name, (offset, dim, t) in tensors.items()}
    return outcome


def share_one_gpu() -> None:
    """All ranks of a run; what copy engines do not carry goes by gloo, which allows it."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    setup._need_peers = lambda *_: None
    setup.pick_device = lambda _: torch.device("cuda", 0)


@pytest.mark.gpu
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
