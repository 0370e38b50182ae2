"""Training a whole model on any split gives the gradient norms and weights of one process."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megadiff.config import ModelConfig, OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from tests.distributed import run_distributed

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=21,
    make_vocab_size_divisible_by=4,
    hybrid_layer_pattern="12",
)
OPTIMIZER = OptimizerConfig(clip_grad=0.5, lambda_lr_multiplier=3.0)
SAMPLES, LENGTH, STEPS = 8, 8, 3


@dataclass(frozen=True)
class Split:
    tensor: int = 1
    sequence_parallel: bool = False
    alignment: int = 1
    bucket_size: int = 1000


def train(split: Split, optimizer_config: OptimizerConfig, dtype: torch.dtype) -> tuple:
    """Gradient norms, and this rank's part of the weights as `(name, dim, offset, values)`."""
    mesh = ParallelMesh()
    if dist.is_initialized():
        mesh = build_mesh(
            tensor=split.tensor,
            kv_copies=max(1, split.tensor // MODEL.query_groups),
            sequence_parallel=split.sequence_parallel,
        )
    model = Decoder(MODEL, mesh, dtype=dtype)
    initialize(model, seed=3)
    optimizer = Optimizer(
        model,
        optimizer_config,
        data_parallel_group=mesh.dp_cp.group,
        model_parallel_group=mesh.model.group,
        tensor_parallel_group=mesh.tp.group,
        alignment=split.alignment,
        bucket_size=split.bucket_size,
    )
    generator = torch.Generator().manual_seed(11)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    norms = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 21, (SAMPLES, LENGTH + 1), generator=generator)
        micro_batches = tokens.split(2)[mesh.dp.rank :: mesh.dp.size]
        optimizer.zero_grad(len(micro_batches))
        for micro_batch in micro_batches:
            losses = model(micro_batch[:, :-1], positions, micro_batch[:, 1:])
            (losses.sum() / (SAMPLES * LENGTH)).backward()
        norms.append(optimizer.step(0.01).grad_norm.item())
    optimizer.wait_for_parameters()
    parts = []
    for parameter in model.parameters():
        record = record_of(parameter)
        for section in record.sections:
            values = local_view(parameter.detach(), section, record.dim).clone()
            parts.append((section.name, record.dim, section.offset, values))
    return norms, parts


def assert_equal_training(results: list, alone: tuple, rtol: float) -> None:
    norms, weights = alone
    whole = {name: values for name, _, _, values in weights}
    for got, parts in results:
        assert got == pytest.approx(norms, rel=rtol)
        for name, dim, offset, values in parts:
            expected = whole[name].narrow(dim, offset, values.shape[dim])
            torch.testing.assert_close(values, expected, rtol=rtol, atol=rtol, msg=name)


@pytest.mark.parametrize(
    ("world", "split", "changes"),
    [
        (4, Split(tensor=2), {"use_distributed_optimizer": True}),
        (4, Split(tensor=4), {}),  # key/value groups have two copies each
        (
            4,
            Split(tensor=2, sequence_parallel=True, alignment=64),
            {"use_distributed_optimizer": True, "overlap_param_gather": True},
        ),
        (2, Split(), {"use_distributed_optimizer": True, "overlap_param_gather": True}),
        (2, Split(tensor=2, sequence_parallel=True), {"overlap_grad_reduce": False}),
    ],
)
def test_any_split_equals_one_process(world: int, split: Split, changes: dict) -> None:
    config = replace(OPTIMIZER, **changes)
    alone = train(Split(), OPTIMIZER, torch.float64)
    results = run_distributed(world, train, split, config, torch.float64)
    assert_equal_training(results, alone, 1e-9)


def forward_after_an_overlapped_step() -> list[bool]:
    """Which buckets are still being gathered: after the step, and after a chunk's forward."""
    model = Decoder(MODEL, build_mesh())
    initialize(model, seed=3)
    config = replace(OPTIMIZER, use_distributed_optimizer=True, overlap_param_gather=True)
    world = dist.group.WORLD
    optimizer = Optimizer(
        nn.ModuleList([model]), config, data_parallel_group=world, bucket_size=1000
    )
    optimizer.step(0.01)
    running = [bucket.gathering is not None for bucket in optimizer.buckets.buckets]
    model(torch.zeros(1, LENGTH, dtype=torch.long), torch.arange(LENGTH).unsqueeze(0))
    return [all(running), *(bucket.gathering is None for bucket in optimizer.buckets.buckets)]


def test_forward_waits_for_gathered_parameters() -> None:
    for results in run_distributed(2, forward_after_an_overlapped_step):
        assert len(results) > 3 and all(results)


def test_padding_of_the_vocabulary_stays_zero() -> None:
    model = Decoder(MODEL, dtype=torch.float32)
    initialize(model, seed=3)
    optimizer = Optimizer(model, OPTIMIZER)
    assert model.embedding is not None and model.embedding.shape[0] == 24
    optimizer.zero_grad()
    model.embedding.sum().backward()  # a gradient that would also move the padding
    assert optimizer.step(0.1).grad_norm.item() == pytest.approx((21 * 16) ** 0.5)
    assert not model.embedding[21:].any()
