"""Context parallelism: which tokens a rank holds, and what its queries see."""

import pytest
import torch

from megadiff.config import Config, ModelConfig, ParallelConfig, TrainingConfig, validate
from megadiff.kernels.geometry import Geometry, visibility
from megadiff.parallel.context import context_shard, make_context, natural_order
from megadiff.parallel.mesh import Axis


def axes(size: int) -> list[Axis]:
    return [Axis(rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_put_together_are_the_sequence(size):
    x = torch.arange(2 * 24).view(2, 24)
    shards = [context_shard(x, cp) for cp in axes(size)]
    assert shards[0][0].tolist()[:2] == [0, 1] and shards[0][0, -1] == 23  # head and tail
    assert torch.equal(natural_order(torch.cat(shards, 1), axes(size)[0]), x)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_sees_as_much(size):
    chunks = [make_context(64, cp).chunks for cp in axes(size)]
    work = [sum(chunk.length * chunk.keys for chunk in pair) for pair in chunks]
    assert len(set(work)) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_queries_see_what_they_see_in_the_whole(size):
    """Row by row of the mask; documents lie across the cuts, end at them and are empty."""
    batch, length = 2, 16
    cu_seqlens = torch.tensor([0, 3, 3, 12, 16, 20, 24, 31, 32, 32, 32], dtype=torch.int32)
    geometry = Geometry(right=0, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    n = batch * length
    whole = visibility(geometry, n, n, torch.device("cpu"))[0]
    tokens = torch.arange(n).view(batch, length)
    for cp in axes(size):
        mine = context_shard(tokens, cp)
        for chunk in make_context(length, cp, cu_seqlens).chunks:
            queries = mine[:, chunk.start : chunk.start + chunk.length].flatten()
            keys = tokens[:, : chunk.keys].flatten()
            part = Geometry(
                right=0, cu_seqlens_q=chunk.cu_seqlens_q, cu_seqlens_k=chunk.cu_seqlens_k
            )
            seen = visibility(part, len(queries), len(keys), torch.device("cpu"))[0]
            assert torch.equal(seen, whole[queries][:, keys])
            unseen = torch.ones(n, dtype=torch.bool)
            unseen[keys] = False
            assert not whole[queries][:, unseen].any()


@pytest.mark.parametrize(
    ("sequence", "options", "message"),
    [
        (30, {"context_parallel_size": 4}, "30 is not a multiple of 2 x --context-parallel-size 4"),
        (
            12,
            {
                "context_parallel_size": 2,
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
            },
            "12 is not a multiple of --context-parallel-size 2 x .* 4 = 8",
        ),
        (32, {"context_parallel_size": 8}, "delta layers' 4 heads are not a multiple of .* 8 = 8"),
    ],
)
def test_impossible_context_splits_are_refused(sequence, options, message):
    mixer = "delta_net" if "delta" in message else "diff_v2"
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, token_mixer=mixer, vocab_size=8
    )
    config = Config(
        model, ParallelConfig(**options), TrainingConfig(seq_length=sequence, train_iters=1)
    )
    with pytest.raises(ValueError, match=message):
        validate(config, 8)
