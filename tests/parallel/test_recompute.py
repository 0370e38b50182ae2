"""Recomputation keeps less and changes nothing; its exactness on splits is in test_parity.py."""

import pytest
import torch

from megadiff.config import (
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
    load_config,
    validate,
)
from megadiff.models.decoder import Decoder
from megadiff.models.memory import estimate_memory, layer_elements, mlp_elements
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import initialize
from megadiff.parallel.recompute import Recompute

BATCH, LENGTH = 2, 64


def model_config(mixer: str) -> ModelConfig:
    return ModelConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        token_mixer=mixer,  # type: ignore[arg-type]
        vocab_size=64,
    )


def kept_bytes_and_gradients(mixer: str, recompute: Recompute) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd keeps for backward (each storage once, no parameters), and gradients."""
    model = Decoder(model_config(mixer), recompute=recompute)
    initialize(model, 1)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return t

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, positions, tokens).sum()
    size = sum(storage.nbytes() for storage in kept.values())
    kept.clear()
    loss.backward()
    return size, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
def test_more_recomputation_keeps_less_and_gives_the_same_gradients(mixer):
    order = [
        Recompute(),
        Recompute("selective"),
        Recompute("selective", modules=("core_attn", "mlp_act")),
        Recompute("selective", modules=("core_attn", "mlp_act", "layernorm")),
        Recompute("full", "block", 2),
        Recompute("full", "uniform", 1),
        Recompute("full", "uniform", 2),
    ]
    results = [kept_bytes_and_gradients(mixer, recompute) for recompute in order]
    sizes = [size for size, _ in results]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    for _, gradients in results[1:]:
        assert all(map(torch.equal, gradients, results[0][1]))


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
def test_recomputed_norms_keep_as_much_less_as_is_estimated(mixer):
    m, modules = model_config(mixer), ("layernorm",)
    before, after = (
        (r, kept_bytes_and_gradients(mixer, r)[0])
        for r in (Recompute(), Recompute("selective", modules=modules))
    )
    tokens = BATCH * LENGTH
    less = [
        layer_elements(m, mixer, ParallelMesh(), tokens, tokens * m.hidden_size, r)
        for r, _ in (before, after)
    ]
    small = 4 * m.num_layers * 64  # V1 keeps the product of its norm's weight and factor
    assert before[1] - after[1] == pytest.approx(
        4 * m.num_layers * (less[0] - less[1]), abs=small if mixer == "diff_v1" else 0
    )


def test_runs():
    layers = [0, 1, 2, 3, 4]
    assert list(Recompute().runs(layers)) == [(layers, False)]
    assert list(Recompute("full", "uniform", 2).runs(layers)) == [
        ([0, 1], True),
        ([2, 3], True),
        ([4], True),
    ]
    assert list(Recompute("full", "block", 2).runs(layers)) == [
        ([0], True),
        ([1], True),
        ([2, 3, 4], False),
    ]


def test_megatrons_flags():
    config = load_config(["--recompute-activations"])
    assert config.parallel.recompute_granularity == "selective"
    with pytest.raises(ConfigError, match="block needs --recompute-granularity full"):
        flags = ["--recompute-method", "block", "--vocab-size", "8", "--train-iters", "1"]
        validate(load_config(flags), 1)
    flags = ["--recompute-modules", "mlp_act", "--vocab-size", "8", "--train-iters", "1"]
    with pytest.raises(ConfigError, match=r"--recompute-modules mlp_act needs .* selective"):
        validate(load_config(flags), 1)


@pytest.mark.parametrize("granularity", [None, "selective", "full"])
@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
def test_estimate_is_near_what_is_kept(mixer, granularity):
    """The plain operators of a CPU keep more than fused ones: values before a norm's weight,
    silu(gate), both branches. A layer's input is the same, so full recomputation is exact."""
    m = model_config(mixer)
    parallel = ParallelConfig(recompute_granularity=granularity)
    training = TrainingConfig(seq_length=LENGTH, micro_batch_size=BATCH, train_iters=1)
    config = Config(m, parallel, training)
    validate(config, 1)
    (estimate,) = estimate_memory(config, 1)
    tokens = BATCH * LENGTH
    hidden, logits = tokens * m.hidden_size, tokens * 128  # the vocabulary is padded
    end = 2 * hidden + logits  # what is kept after the layers
    backward = 2 * hidden + mlp_elements(m, ParallelMesh(), tokens)  # of a layer, for a moment
    if granularity == "full":
        recompute = Recompute(granularity)
        backward += layer_elements(m, mixer, ParallelMesh(), tokens, hidden, recompute)
    moment = max(end, backward) - end
    weight = 2 * m.ffn_size * 64  # the largest, whose gradient stands beside its buffer
    kept, _ = kept_bytes_and_gradients(mixer, Recompute(granularity))
    share = kept / (estimate.activations - 4 * (moment + weight))
    assert 0.95 < share < (1.15 if granularity == "full" else 1.6)
