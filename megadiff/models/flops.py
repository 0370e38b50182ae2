"""How large a model is and how much arithmetic it does, counted from its configuration.

Model FLOPs are those of the mathematics, two per multiply-add, whatever a kernel recomputes:

    forward, per token = 2 N + sum over attention layers of 2 (s + 1) / 2 * heads * (d + d_v)
                             + sum over delta layers of heads * 6 d_k d_v + 2 w * channels
    training           = 3 x forward

N counts the weights of all matrix products (the output matrix too, also when it is tied; the
embedding's look-up costs nothing). s is the sequence length, halved because attention is causal;
`heads` are query heads, of which a differential layer has two a pair, each with a product of width
d for its scores and one of width d_v for its values. A delta layer multiplies its d_k x d_v state
three times a token (what it holds at the key, what is written, what the query reads), and its
convolution of width w runs over the channels of q, k and v.
"""

import math
from dataclasses import dataclass

from megadiff.config import DELTA_MIXERS, ModelConfig, TokenMixer
from megadiff.models.attention import head_shape
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import Section, named_sections


@dataclass(frozen=True)
class ModelSize:
    """Of the whole model, without padding, whatever its split."""

    parameters: int
    training_flops_per_token: float


def whole_model(m: ModelConfig, seq_length: int) -> Decoder:
    """The model of all ranks together, without values, to count what is in it."""
    return Decoder(m, max_positions=seq_length, device="meta")


def model_size(m: ModelConfig, seq_length: int) -> ModelSize:
    """Size of the model that `m`, with its vocabulary set, describes."""
    assert m.vocab_size is not None
    whole = whole_model(m, seq_length)
    sections: dict[str, Section] = {s.name: s for _, s in named_sections(whole)}
    parameters = sum(math.prod(s.shape) for s in sections.values())
    products = m.vocab_size * m.hidden_size + sum(
        math.prod(s.shape) for s in sections.values() if s.group == "matrix"
    )
    mixers: list[TokenMixer] = [m.mixer_of_layer(layer) for layer in range(m.num_layers)]
    forward = 2.0 * products + sum(mixing_flops(m, mixer, seq_length) for mixer in mixers)
    return ModelSize(parameters, 3.0 * forward)


def mixing_flops(m: ModelConfig, mixer: TokenMixer, seq_length: int) -> float:
    """Forward FLOPs per token of a layer's mixer beside its projections."""
    if mixer in DELTA_MIXERS:
        d_k, d_v = m.delta_widths
        return m.delta_heads * (6.0 * d_k * d_v + 2.0 * m.delta_conv_size * (2 * d_k + d_v))
    branches, _, d, d_v = head_shape(m, mixer)
    return 2.0 * (seq_length + 1) / 2 * branches * m.num_attention_heads * (d + d_v)
