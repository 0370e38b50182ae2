from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megadiff.config import Config
from megadiff.models.build import build_model
from megadiff.models.decoder import Decoder
from megadiff.optim.replicas import ReplicaError, bit_hash, check_replicas
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, record_of
from tests.distributed import run_distributed
from tests.optim.test_model_splits import MODEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_hash_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    seen = {bit_hash(x).item(), bit_hash(x.flip(0)).item(), bit_hash(x[:-1]).item()}
    for bit in range(8 * x.element_size() - 1):
        flipped = x.clone()
        flipped.view(integers)[7] ^= 1 << bit
        seen.add(bit_hash(flipped).item())
    assert len(seen) == 3 + 8 * x.element_size() - 1
    assert bit_hash(x) == bit_hash(x.clone())


def check(tensor: int, faults: dict[int, str]) -> str | None:
    """Start equal models, change what `faults` names on single ranks, and compare."""
    mesh = build_mesh(tensor=tensor, kv_copies=max(1, tensor // MODEL.query_groups))
    model = Decoder(MODEL, mesh)
    initialize(model, 1)
    fault = faults.get(dist.get_rank())
    for name, parameter in model.named_parameters():
        if name == fault:
            with torch.no_grad():
                parameter[-1] += 1e-6
        elif fault == f"{name} k":  # its key rows alone
            section = next(s for s in record_of(parameter).sections if s.name.endswith("k.weight"))
            with torch.no_grad():
                parameter[section.start] += 1e-6
    try:
        check_replicas(model, mesh, dist.group.WORLD)
    except ReplicaError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("tensor", "faults", "message"),
    [
        (2, {}, None),
        (
            2,
            {3: "layers.1.mlp_norm.weight"},
            "layers.1.mlp_norm.weight differs between data-parallel replicas, and so do 0 more",
        ),
        (
            4,
            {1: "layers.0.mixer_norm.weight"},
            "layers.0.mixer_norm.weight differs between tensor-parallel replicas",
        ),
        (
            4,
            {2: "layers.1.mixer.qkv.weight k"},
            "layers.1.mixer.k.weight differs between tensor-parallel replicas",
        ),
    ],
)
def test_first_difference_is_named_on_every_rank(tensor, faults, message) -> None:
    for found in run_distributed(4, check, tensor, faults):
        if message is None:
            assert found is None
        else:
            assert found is not None and message in found


def check_ties(fault: bool) -> str | None:
    config = Config(model=replace(MODEL, num_layers=2))
    config.parallel.pipeline_model_parallel_size = 2
    mesh = build_mesh(pipeline=2, tensor=2, kv_copies=1)
    model = build_model(config, mesh, dtype=torch.float32, device="cpu")
    initialize(model, 1)
    if fault and dist.get_rank() == 3:
        with torch.no_grad():
            model.chunks[-1].output[0, 0] += 1
    try:
        check_replicas(model, mesh, dist.group.WORLD, model.tied_parameters())
    except ReplicaError as error:
        return str(error)
    return None


def test_tied_embeddings_of_two_stages_are_compared() -> None:
    assert run_distributed(4, check_ties, False) == [None] * 4
    for found in run_distributed(4, check_ties, True):
        assert found is not None
        assert found.startswith("embedding.weight differs between tied replicas")
        assert found.endswith("(seen by ranks 1, 3)")


def test_one_process_has_nothing_to_compare() -> None:
    model = Decoder(MODEL)
    check_replicas(model, ParallelMesh(), None)
