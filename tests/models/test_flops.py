"""Sizes and FLOPs against counts by hand."""

from dataclasses import replace

import pytest

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.flops import mixing_flops, model_size

BASE = ModelConfig(
    num_layers=2,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=100,
)
MLP = 3 * 48 * 64
ATTENTION_WEIGHTS = {
    "standard": 48 * 48 + 2 * 24 * 48 + 48 * 48,  # q; k and v of half the heads; o
    "diff_v1": 48 * 48 + 2 * 24 * 48 + 48 * 48,  # heads of half the width: the same
    "diff_v2": 2 * 48 * 48 + 2 * 24 * 48 + 4 * 48 + 48 * 48,  # twice the queries, lambda
}
MIXING = {  # per token of 8: 4.5 keys on average, scores and values
    "standard": 2 * 4.5 * 4 * (12 + 12),
    "diff_v1": 2 * 4.5 * 8 * (6 + 12),
    "diff_v2": 2 * 4.5 * 8 * (12 + 12),
}


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
def test_an_attention_model(mixer: TokenMixer) -> None:
    size = model_size(replace(BASE, token_mixer=mixer), seq_length=8)
    vectors = 5 * 48 + (2 * (4 * 6 + 12) if mixer == "diff_v1" else 0)
    assert size.parameters == 100 * 48 + 2 * (ATTENTION_WEIGHTS[mixer] + MLP) + vectors
    products = 100 * 48 + 2 * (ATTENTION_WEIGHTS[mixer] + MLP)
    assert size.training_flops_per_token == 3 * (2 * products + 2 * MIXING[mixer])


def test_an_output_matrix_of_its_own_adds_parameters_but_no_flops() -> None:
    tied = model_size(BASE, 8)
    untied = model_size(replace(BASE, untie_embeddings_and_output_weights=True), 8)
    assert untied.parameters == tied.parameters + 100 * 48
    assert untied.training_flops_per_token == tied.training_flops_per_token


def test_a_delta_layer_costs_the_same_at_any_length() -> None:
    config = replace(BASE, token_mixer="delta_net")
    # a state of 12 x 12 passed three times, 4 taps on 3 x 48 channels
    assert mixing_flops(config, "delta_net", 8) == 4 * 6 * 12 * 12 + 2 * 4 * 3 * 48
    assert mixing_flops(config, "delta_net", 8192) == mixing_flops(config, "delta_net", 8)
    short, long = model_size(config, 8), model_size(config, 8192)
    assert short.training_flops_per_token == long.training_flops_per_token
