"""Maps that are drawn are the maps that the model attends with."""

import pytest
import torch

from megadiff.config import ModelConfig
from megadiff.models.analysis import Maps, Outliers, attention_maps, observe, span_attention
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import initialize

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def model_of(mixer: str, **options) -> Decoder:
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=11,
        token_mixer=mixer,
        init_method_std=0.3,
        **options,
    )
    model = Decoder(config, dtype=torch.float64)
    initialize(model, seed=1)
    return model


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("standard", {}),
        ("diff_v1", {"diff_head_norm": "none"}),
        ("diff_v1", {"diff_head_norm": "none", "diff_lambda_per_head": True}),
        ("diff_v2", {"position_embedding_type": "none"}),
    ],
)
def test_maps_times_values_are_what_the_mixer_gives(mixer, options):
    model = model_of(mixer, **options)
    seen = {}

    def hook(layer, arguments, output):
        x, geometry = arguments[:2]
        maps = attention_maps(layer, x, geometry)
        v = layer.heads(x, geometry)[2][0]
        v = v.repeat_interleave(2, dim=1)  # four heads on two groups
        y = torch.einsum("hij,jhd->ihd", maps.difference, v).flatten(1)
        seen["maps"], seen["output"] = layer.out(y.unsqueeze(0)), output

    model.blocks[1].mixer.register_forward_hook(hook)
    observe(model, TOKENS, lambda *_: None)
    torch.testing.assert_close(seen["maps"], seen["output"])


def test_observing_changes_nothing_and_sees_every_layer():
    model = model_of("diff_v2")
    expected = model(torch.tensor([TOKENS]), torch.arange(8).unsqueeze(0))[0, :, :11]
    seen = []
    logits = observe(model, TOKENS, lambda *what: seen.append(what))
    assert torch.equal(logits, expected)
    assert [layer for layer, _, _ in seen] == [0, 1]
    assert all(hidden.shape == (8, 32) for _, _, hidden in seen)
    assert not model.blocks[0]._forward_hooks and not model.blocks[0].mixer._forward_pre_hooks


def test_layers_without_attention_have_no_maps():
    seen = []
    observe(model_of("delta_net"), TOKENS, lambda *what: seen.append(what))
    assert [maps for _, maps, _ in seen] == [None, None]


def test_span_attention_is_a_share():
    first = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.5, 0.3]]])
    scores = first.log()
    assert span_attention(Maps(scores, first), range(1, 2)) == pytest.approx((0.5, 0.5))
    second = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.4, 0.2, 0.4]]])
    lam = torch.full((1, 3), 0.5)
    # the last row is (0, 0.4, 0.1)
    inside, outside = span_attention(Maps(scores, first, second, lam), range(1, 2))
    assert (inside, outside) == pytest.approx((0.8, 0.2))


def test_outliers_over_several_tensors():
    values = Outliers()
    values.add(torch.tensor([1.0, -7.0, 2.0, -torch.inf]))
    values.add(torch.tensor([[5.0, 3.0], [-4.0, 0.0]]))
    summary = values.summary()
    assert summary == {"top-1": 7.0, "top-2": 5.0, "top-3": 4.0, "median": (2.0 + 3.0) / 2}
