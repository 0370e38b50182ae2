"""FLOPs are counted from the configuration, and the weights that they count are the model's."""

from dataclasses import replace
from typing import get_args

import pytest

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import named_sections
from megadiff.training.flops import matrix_weights, training_flops_per_token

BASE = ModelConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=100
)
CASES = [replace(BASE, token_mixer=mixer) for mixer in get_args(TokenMixer)] + [
    replace(BASE, hybrid_layer_pattern="GD", delta_expand_v=2.0, delta_use_beta=False),
    replace(BASE, token_mixer="delta_net", delta_use_gate=True, delta_num_heads=2),
    replace(BASE, token_mixer="diff_v1", diff_value_width="d", swiglu=False),
]


@pytest.mark.parametrize("config", CASES)
def test_matrix_weights_are_those_of_the_model(config: ModelConfig) -> None:
    sections = [s for _, s in named_sections(Decoder(config, device="meta"))]
    matrices = sum(s.shape[0] * s.shape[1] for s in sections if s.group == "matrix")
    assert matrix_weights(config) == matrices + 100 * 48


def test_a_delta_layer_costs_the_same_at_any_length() -> None:
    config = replace(BASE, token_mixer="delta_net")
    assert training_flops_per_token(config, 8) == training_flops_per_token(config, 8192)
    # forward and backward; a state of 12 x 12 passed three times, 4 taps on 3 x 48 channels
    mixing = 4 * 6 * 12 * 12 + 2 * 4 * 3 * 48
    expected = 3 * (2 * matrix_weights(config) + 2 * mixing)
    assert training_flops_per_token(config, 8) == expected
