"""How much arithmetic a model does, counted from its configuration.

Model FLOPs are those of the mathematics, two per multiply-add, whatever a kernel recomputes:

    forward, per token = 2 N + sum over attention layers of 2 (s + 1) / 2 * heads * (d + d_v)
                             + sum over delta layers of heads * 6 d d_v + 2 w * channels
    training           = 3 x forward

N counts the weights of all matrix products (the output matrix too, also when it is tied; the
embedding's look-up costs nothing); s is the sequence length, halved because attention is causal;
`heads` are query heads, of which a differential layer has two a pair, each with a product of width
d for its scores and one of width d_v for its values. A delta layer multiplies its d x d_v state
three times a token (what it holds at the key, what is written, what the query reads), and its
convolution of width w runs over the channels of q, k and v.
"""

from megadiff.config import DELTA_MIXERS, ModelConfig, TokenMixer


def attention_widths(m: ModelConfig, mixer: TokenMixer) -> tuple[int, int, int, int]:
    """(query heads, key heads, width d, value width d_v) of a layer."""
    d, heads, groups = m.head_width(mixer), m.num_attention_heads, m.query_groups
    if mixer == "standard":
        return heads, groups, d, d
    if mixer == "diff_v1":
        return 2 * heads, 2 * groups, d, 2 * d if m.diff_value_width == "2d" else d
    return 2 * heads, groups, d, d


def mixer_weights(m: ModelConfig, mixer: TokenMixer) -> int:
    """Weights of a mixer's matrix products."""
    if mixer in DELTA_MIXERS:
        d, d_v = m.delta_widths
        features = 2 * d + d_v * (2 if m.delta_gate(mixer) else 1)
        features += m.delta_use_beta + (mixer == "gated_delta_net")
        return m.hidden_size * m.delta_heads * (features + d_v)
    query_heads, key_heads, d, d_v = attention_widths(m, mixer)
    projected = query_heads * d + key_heads * d + m.query_groups * d_v
    projected += m.num_attention_heads * d_v  # output projection
    projected += m.num_attention_heads if mixer == "diff_v2" else 0  # lambda
    return m.hidden_size * projected


def matrix_weights(m: ModelConfig) -> int:
    """Weights that take part in matrix products; `m.vocab_size` is set."""
    assert m.vocab_size is not None
    mlp = m.hidden_size * (3 if m.swiglu else 2) * m.ffn_size
    total = m.vocab_size * m.hidden_size
    for layer in range(m.num_layers):
        total += mixer_weights(m, m.mixer_of_layer(layer)) + mlp
    return total


def mixing_flops_per_token(m: ModelConfig, mixer: TokenMixer, seq_length: int) -> float:
    """Forward FLOPs of a mixer besides its products with weights."""
    if mixer in DELTA_MIXERS:
        d, d_v = m.delta_widths
        return m.delta_heads * (6 * d * d_v + 2 * m.delta_conv_size * (2 * d + d_v))
    query_heads, _, d, d_v = attention_widths(m, mixer)
    return 2.0 * (seq_length + 1) / 2 * query_heads * (d + d_v)


def training_flops_per_token(m: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of forward and backward per token."""
    forward = 2.0 * matrix_weights(m)
    for layer in range(m.num_layers):
        forward += mixing_flops_per_token(m, m.mixer_of_layer(layer), seq_length)
    return 3.0 * forward
