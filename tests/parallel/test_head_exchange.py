"""Delta layers under context parallelism: whole sequences of a share of the heads."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megadiff.config import ModelConfig
from megadiff.models.delta_net import DeltaNet, GatedDeltaNet
from megadiff.models.geometry import Geometry
from megadiff.parallel.context import context_shard, make_context
from megadiff.parallel.head_exchange import heads_to_sequence, sequence_to_heads
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from tests.distributed import run_distributed

CONFIG = ModelConfig(
    num_layers=1, hidden_size=24, num_attention_heads=8, delta_conv_bias=True, delta_expand_v=2.0
)


def exchange_job() -> None:
    cp = build_mesh(context=4).cp
    whole = torch.arange(2 * 16 * 8 * 3).view(2, 16, 8, 3).double()
    part = context_shard(whole, cp).requires_grad_()
    share = sequence_to_heads(part, cp)
    assert torch.equal(share, whole[:, :, 2 * cp.rank : 2 * cp.rank + 2])
    back = heads_to_sequence(share, cp)
    assert torch.equal(back, part)
    (grad,) = torch.autograd.grad(back, part, whole[:, :4])
    assert torch.equal(grad, whole[:, :4])


def test_exchange_and_back():
    run_distributed(4, exchange_job)


def output_and_gradients(mesh: ParallelMesh, gated: bool, packed: bool):
    """This rank's output and, by name, (offset, dim, gradient summed over the context ranks)."""
    kind = GatedDeltaNet if gated else DeltaNet
    config = replace(CONFIG, delta_use_gate=gated, delta_use_beta=not gated)
    mixer = kind(config, 0, mesh, "mixer", dtype=torch.float64, device="cpu")
    initialize(mixer, 4)
    generator = torch.Generator().manual_seed(2)
    x, d_y = torch.randn(2, 2, 16, 24, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5, 5, 16, 17, 32, 32], dtype=torch.int32) if packed else None
    positions = torch.arange(16).expand(2, 16)
    context = make_context(16, mesh.cp, cu_seqlens) if mesh.cp.size > 1 else None
    geometry = Geometry(context_shard(positions, mesh.cp), cu_seqlens, {}, context)
    x = context_shard(x, mesh.cp)
    y = mixer(x, geometry)
    y.backward(context_shard(d_y, mesh.cp))
    gradients = {}
    for parameter in mixer.parameters():
        if mesh.cp.size > 1:
            dist.all_reduce(parameter.grad, group=mesh.cp.group)
        record = record_of(parameter)
        for s in record.sections:
            gradients[s.name] = (s.offset, record.dim, local_view(parameter.grad, s, record.dim))
    return mesh.cp.rank, y.detach(), gradients


def split_job(tensor: int, context: int, gated: bool, packed: bool):
    return output_and_gradients(build_mesh(tensor=tensor, context=context), gated, packed)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tensor", "context", "packed"), [(1, 2, False), (2, 2, True), (1, 4, True)]
)
def test_split_equals_whole(tensor, context, packed, gated):
    _, whole, gradients = output_and_gradients(ParallelMesh(), gated, packed)
    ranks = run_distributed(tensor * context, split_job, tensor, context, gated, packed)
    chunks = whole.chunk(2 * context, 1)
    for rank, y, split in ranks:
        expected = torch.cat([chunks[rank], chunks[2 * context - 1 - rank]], 1)
        assert (y - expected).norm() < 1e-12 * expected.norm()
        assert split.keys() == gradients.keys()
        for name, (offset, dim, ours) in split.items():
            right = gradients[name][2].narrow(dim, offset, ours.shape[dim])
            assert (ours - right).norm() <= 1e-12 * gradients[name][2].norm(), name
