"""Parameter counts of published sizes, and what the decoder promises."""

from itertools import pairwise
from typing import get_args

import pytest
import torch

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import initialize, named_sections


def parameter_count(config: ModelConfig) -> int:
    model = Decoder(config, device="meta")
    return sum(torch.Size(s.shape).numel() for _, s in named_sections(model))


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "heads", "billions"),
    [  # DIFF Transformer, appendix E; counted with one 100,288-row embedding table
        ("830M", 1536, 24, 8, 0.834),
        ("1.4B", 2048, 24, 8, 1.413),
        ("2.8B", 2560, 32, 10, 2.773),
        ("6.8B", 4096, 32, 16, 6.853),
        ("13.1B", 5120, 40, 20, 13.096),
    ],
)
def test_published_sizes(name, hidden, layers, heads, billions):
    config = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        token_mixer="diff_v1",
        vocab_size=100_288,
        ffn_hidden_size=round(hidden * 8 / 3),
    )
    assert parameter_count(config) / 1e9 == pytest.approx(billions, abs=0.001)


def test_diff_v2_has_the_parameters_of_a_transformer_with_half_as_many_heads_more():
    shape = {"num_layers": 2, "hidden_size": 512, "kv_channels": 64, "vocab_size": 100}
    v2 = ModelConfig(token_mixer="diff_v2", num_attention_heads=8, num_query_groups=4, **shape)
    wide = ModelConfig(token_mixer="standard", num_attention_heads=12, num_query_groups=4, **shape)
    lambda_rows = 2 * 8 * 512
    assert parameter_count(v2) - lambda_rows == parameter_count(wide)


MIXERS = get_args(TokenMixer)


def small_decoder(**options) -> Decoder:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 50}
    model = Decoder(ModelConfig(**shape | options), dtype=torch.float64)
    initialize(model, 1)
    return model


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_sees_no_later_token(mixer):
    model = small_decoder(token_mixer=mixer)
    tokens = torch.randint(0, 50, (1, 12))
    positions = torch.arange(12).unsqueeze(0)
    before = model(tokens, positions)
    tokens[0, 7] = (tokens[0, 7] + 1) % 50
    after = model(tokens, positions)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_equal_documents_alone(mixer):
    model = small_decoder(token_mixer=mixer)
    tokens = torch.randint(0, 50, (2, 6))
    cuts = [0, 4, 6, 12]  # two documents in the first row, one in the second
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
    cu_seqlens = torch.tensor([*cuts, 12, 12], dtype=torch.int32)
    packed = model(tokens, positions, cu_seqlens=cu_seqlens).flatten(0, 1)
    flat = tokens.flatten()
    for begin, end in pairwise(cuts):
        alone = model(flat[begin:end].unsqueeze(0), torch.arange(end - begin).unsqueeze(0))
        torch.testing.assert_close(packed[begin:end], alone[0, :, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixer", MIXERS)
def test_cached_logits_equal_uncached_ones(mixer):
    """Prompts of unequal length, padded on the right; a chunk of tokens, then single ones."""
    model = small_decoder(token_mixer=mixer)
    tokens = torch.randint(0, 50, (2, 12))
    lengths = torch.tensor([7, 4])
    whole = model(tokens, torch.arange(12).expand(2, 12))
    cache = model.new_cache(12)
    first = model(tokens[:, :7], torch.arange(7).expand(2, 7), cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(first[row, :length], whole[row, :length])
    for step in range(5):
        at = (lengths + step).unsqueeze(1)
        logits = model(tokens.gather(1, at), at, cache=cache)
        expected = whole[torch.arange(2), at.squeeze(1)]
        torch.testing.assert_close(logits[:, 0], expected, rtol=1e-12, atol=1e-12)


def test_initial_lambda_of_v1_is_near_lambda_init():
    """lambda_init of layer 0 is 0.2, and the vectors' products start near exp(0) - exp(0)."""
    model = small_decoder(token_mixer="diff_v1")
    model(torch.zeros(1, 2, dtype=torch.long), torch.arange(2).unsqueeze(0))
    lambdas = model.mean_lambdas()
    assert lambdas[0].item() == pytest.approx(0.2, abs=0.15)
    assert lambdas[1].item() == pytest.approx(0.8 - 0.6 * 0.740818, abs=0.15)
