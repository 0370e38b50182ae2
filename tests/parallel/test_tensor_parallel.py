"""A model split over tensor-parallel ranks has the losses and gradients of the whole one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megadiff.config import ModelConfig
from megadiff.models.decoder import Decoder
from megadiff.parallel import collectives
from megadiff.parallel.copy_engine import Part
from megadiff.parallel.linear import Products
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from tests.distributed import run_distributed

TOLERANCE = 1e-9  # float64, where only the order of sums differs

CASES = {
    "standard": ModelConfig(token_mixer="standard"),
    "standard_layernorm_gelu_bias": ModelConfig(
        token_mixer="standard", normalization="LayerNorm", swiglu=False, mlp_bias=True
    ),
    "diff_v1": ModelConfig(token_mixer="diff_v1"),
    "diff_v1_per_head_learned_positions": ModelConfig(
        token_mixer="diff_v1", diff_lambda_per_head=True, position_embedding_type="learned_absolute"
    ),
    "diff_v1_no_norm": ModelConfig(
        token_mixer="diff_v1", diff_head_norm="none", diff_value_width="d", diff_lambda_init=0.5
    ),
    "diff_v2": ModelConfig(token_mixer="diff_v2"),
    "delta_net": ModelConfig(token_mixer="delta_net", delta_conv_bias=True, delta_expand_v=2.0),
    "gated_delta_net": ModelConfig(token_mixer="gated_delta_net", delta_expand_k=0.5),
    "hybrid": ModelConfig(hybrid_layer_pattern="D2", delta_use_gate=True, delta_use_beta=False),
    "diff_v2_rope_scaling": ModelConfig(
        token_mixer="diff_v2", rotary_interleaved=False, use_rope_scaling=True, rotary_base=5e5
    ),
    "pattern_untied": ModelConfig(
        hybrid_layer_pattern="12", untie_embeddings_and_output_weights=True
    ),
}


def small(config: ModelConfig, groups: int) -> ModelConfig:
    return replace(
        config,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=groups,
        ffn_hidden_size=48,
        vocab_size=37,
        make_vocab_size_divisible_by=4,
    )


def loss_and_gradients(config: ModelConfig, mesh: ParallelMesh, packed: bool):
    """The mean loss and, by global name, this rank's (offset, dim, gradient) of each section."""
    model = Decoder(config, mesh, max_positions=8, dtype=torch.float64)
    initialize(model, seed=7)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=generator)
    positions = torch.arange(8).expand(2, 8)
    cu_seqlens = None
    if packed:
        cu_seqlens = torch.tensor([0, 3, 3, 8, 13, 16, 16], dtype=torch.int32)
    losses = model(tokens[:, :-1], positions, tokens[:, 1:], cu_seqlens)
    mask = torch.rand(2, 8, generator=generator) < 0.7
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    gradients = {}
    for parameter in model.parameters():
        record = record_of(parameter)
        assert parameter.grad is not None
        for s in record.sections:
            gradient = local_view(parameter.grad, s, record.dim)
            gradients[s.name] = (s.offset, record.dim, gradient)
    return loss.item(), gradients


def split_job(config: ModelConfig, kv_copies: int, sequence_parallel: bool, packed: bool):
    world = torch.distributed.get_world_size()
    mesh = build_mesh(tensor=world, kv_copies=kv_copies, sequence_parallel=sequence_parallel)
    return loss_and_gradients(config, mesh, packed)


def gathers(mixer: str) -> list[int]:
    """How often the sequence is gathered, in forward and in backward."""
    begin, count = collectives.PendingGather.__init__, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        begin(self, *args, **kwargs)

    collectives.PendingGather.__init__ = counted  # type: ignore[method-assign]
    mesh = build_mesh(tensor=2, sequence_parallel=True)
    config = small(ModelConfig(token_mixer=mixer), 2)  # type: ignore[arg-type]
    model = Decoder(config, mesh, dtype=torch.float64)
    initialize(model, seed=7)
    tokens, positions = torch.zeros(1, 8, dtype=torch.long), torch.arange(8).unsqueeze(0)
    loss = model(tokens, positions, tokens).sum()
    forward = count
    loss.backward()
    return [forward, count - forward]


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2", "gated_delta_net"])
def test_the_sequence_is_gathered_once_for_a_mixer_and_once_for_an_mlp(mixer):
    """And before the logits. Backward gathers both inputs again, two gradients, the embedding's."""
    for counts in run_distributed(2, gathers, mixer):
        assert counts == [2 * 2 + 1, 2 * 4 + 1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("world", "groups", "sequence_parallel", "packed"),
    [(2, 4, False, False), (4, 2, True, True)],
    ids=["tp2", "tp4_kv2_sp_packed"],
)
def test_split_equals_whole(case, world, groups, sequence_parallel, packed):
    config = small(CASES[case], groups)
    loss, gradients = loss_and_gradients(config, ParallelMesh(), packed)
    copies = max(1, world // groups)
    ranks = run_distributed(world, split_job, config, copies, sequence_parallel, packed)
    for rank_loss, rank_gradients in ranks:
        assert rank_loss == pytest.approx(loss, rel=TOLERANCE)
        for name, (offset, dim, ours) in rank_gradients.items():
            whole = gradients[name][2]
            expected = whole.narrow(dim, offset, ours.shape[dim])
            assert (ours - expected).norm() <= TOLERANCE * whole.norm(), name


class Watch(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_part_of_a_sequence_is_multiplied_where_it_lies():
    """To copy it first would cost what its message saves."""
    weight = nn.Parameter(torch.randn(6, 4))
    x, y = torch.randn(3, 8, 4), torch.randn(3, 8, 6)
    products, part = Products(), Part(slice(0, 2), slice(4, 8))
    with torch.no_grad(), Watch() as watch:
        products.output(x[part], weight, None)
        products.output(x[part], weight, None, out=y[part])
        products.grad_input(y[part], weight)
        products.grad_input(y[part], weight, out=x[part])
    assert "bmm" in watch.seen and not watch.seen & {"clone", "copy_", "mm"}
