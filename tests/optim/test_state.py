"""Optimizer state moves between splits through the global tensors that parameter records name."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.checkpoint.state import Piece, flat_pieces, module_tensors
from megadiff.config import ModelConfig, OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, record_of
from tests.distributed import run_distributed

MODEL = ModelConfig(  # with vectors, fused and copied sections, and a convolution
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=21,
    make_vocab_size_divisible_by=4,
    hybrid_layer_pattern="1G",
    delta_conv_bias=True,
)
SHARDED = OptimizerConfig(use_distributed_optimizer=True, clip_grad=0.5)


def build(config: OptimizerConfig, dtype: torch.dtype, tensor: int) -> tuple:
    mesh = build_mesh(tensor=tensor) if dist.is_initialized() else ParallelMesh()
    model = Decoder(MODEL, mesh, dtype=dtype)
    initialize(model, seed=3)
    optimizer = Optimizer(
        model,
        config,
        data_parallel_group=mesh.dp.group,
        model_parallel_group=mesh.model.group,
        tensor_parallel_group=mesh.tp.group,
        alignment=1,
        bucket_size=500,
    )
    return model, optimizer, mesh


def steps(model: Decoder, optimizer: Optimizer, mesh: ParallelMesh, numbers: range) -> list[float]:
    norms = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 21, (4, 9), generator=generator)
        optimizer.zero_grad()
        mine = tokens[mesh.dp.rank :: mesh.dp.size]
        losses = model(mine[:, :-1], torch.arange(8).expand(len(mine), 8), mine[:, 1:])
        (losses.sum() / 32).backward()
        norms.append(optimizer.step(0.01).grad_norm.item())
    return norms


def state_pieces(optimizer: Optimizer) -> list[tuple[str, tuple[int, ...], Piece]]:
    """This rank's state as `(global name, global shape, piece)`."""
    found = []
    for s in optimizer.state_pieces():
        record = record_of(s.parameter)
        cut = flat_pieces(record, s.parameter.shape, s.start, s.values, s.write)
        found += [(f"{s.key}/{section.name}", section.shape, piece) for section, piece in cut]
    return found


def region(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.sizes, strict=True))


def train_and_save(config: OptimizerConfig, dtype: torch.dtype, tensor: int) -> tuple:
    model, optimizer, mesh = build(config, dtype, tensor)
    steps(model, optimizer, mesh, range(2))
    pieces = [(n, s, p) for n, s, p in state_pieces(optimizer) if p.write]
    for name, held in module_tensors(model, mesh.dp.rank, mesh.dp.size).items():
        pieces += [(name, held.shape, p) for p in held.pieces if p.write]
    saved = [(name, shape, region(p), p.data.clone()) for name, shape, p in pieces]
    return saved, optimizer.state_scalars(), steps(model, optimizer, mesh, range(2, 4))


def load_and_train(config: OptimizerConfig, dtype: torch.dtype, tensor: int, saved: tuple) -> list:
    tensors, scalars = saved
    model, optimizer, mesh = build(config, dtype, tensor)
    with torch.no_grad():
        for name, _, piece in state_pieces(optimizer):
            piece.data.copy_(tensors[name][region(piece)])
        for name, held in module_tensors(model).items():
            for piece in held.pieces:
                piece.data.copy_(tensors[name][region(piece)])
    optimizer.load_scalars(scalars)
    optimizer.parameters_from_main_weights()
    return steps(model, optimizer, mesh, range(2, 4))


def assemble(results: list) -> tuple[dict[str, Tensor], dict, list[float]]:
    """The global tensors, each element of which exactly one rank has written."""
    tensors: dict[str, Tensor] = {}
    for saved, _, _ in results:
        for name, shape, where, values in saved:
            whole = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            assert whole[where].isnan().all(), name
            whole[where] = values
    assert not any(t.isnan().any() for t in tensors.values())
    return tensors, results[0][1], results[0][2]


@pytest.mark.parametrize(("optimizer", "sharded"), [("adam", True), ("sgd", False), ("muon", True)])
def test_resume_on_another_split_equals_the_uninterrupted_run(optimizer, sharded) -> None:
    config = replace(SHARDED, optimizer=optimizer, use_distributed_optimizer=sharded)
    results = run_distributed(4, train_and_save, config, torch.float64, 2)
    tensors, scalars, norms = assemble(results)
    alone = load_and_train(config, torch.float64, 1, (tensors, scalars))
    assert alone == pytest.approx(norms, rel=1e-9)
    other = replace(config, use_distributed_optimizer=not sharded)
    state = (tensors, scalars)
    for resumed in run_distributed(3, load_and_train, other, torch.float64, 1, state):
        assert resumed == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "main_weights", "keys"),
    [
        (torch.bfloat16, "float32", {"main_weight"}),
        (torch.float16, "float32", {"main_weight"}),
        (torch.bfloat16, "kahan", {"compensation"}),
        (torch.bfloat16, "stochastic", set()),
    ],
)
def test_resume_on_the_same_split_is_bitwise_equal(dtype, main_weights, keys) -> None:
    config = replace(
        SHARDED,
        initial_loss_scale=2.0**20,
        hysteresis=1,
        loss_scale_window=3,
        main_weights=main_weights,
    )
    results = run_distributed(2, train_and_save, config, dtype, 1)
    tensors, scalars, norms = assemble(results)
    names = {name.split("/")[0] for name in tensors if "/" in name}
    assert names == {*keys, "exp_avg", "exp_avg_sq"}
    for resumed in run_distributed(2, load_and_train, config, dtype, 1, (tensors, scalars)):
        assert resumed == norms


def test_weights_alone_start_the_main_weights() -> None:
    model, optimizer, _ = build(SHARDED, torch.bfloat16, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer.main_weights_from_parameters()
    for shard in optimizer.shards:
        for main in shard.main.state().values():
            assert torch.equal(main, shard.bucket.own_parameters.float())
