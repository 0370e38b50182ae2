"""fla-org's checkpoints, by their names; recorded from flash-linear-attention 0.6.0."""

import json
from dataclasses import replace

import pytest
import torch

from megadiff.config import Config, ModelConfig, validate
from megadiff.interop.fla import config_from_fla, export_weights, fla_config, import_weights
from megadiff.interop.tensors import InteropError
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import initialize, local_view, record_of

BASE = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=256,
    vocab_size=100,
    untie_embeddings_and_output_weights=True,
)
CASES = {
    "delta_net": replace(BASE, token_mixer="delta_net"),
    "options": replace(
        BASE,
        token_mixer="delta_net",
        delta_num_heads=2,
        delta_expand_k=0.5,
        delta_expand_v=2.0,
        delta_use_gate=True,
        delta_use_beta=False,
        delta_allow_neg_eigval=True,
        delta_qk_activation="elu",
        delta_qk_norm="sum",
        untie_embeddings_and_output_weights=False,
    ),
    "no convolution": replace(BASE, token_mixer="delta_net", delta_conv_size=0),
    "gated": replace(BASE, token_mixer="gated_delta_net", delta_expand_k=0.75),
    "gated without a gate": replace(
        BASE, token_mixer="gated_delta_net", delta_use_gate=False, delta_expand_v=1.5
    ),
    "hybrid": replace(
        BASE, hybrid_layer_pattern="DD*D", num_query_groups=2, delta_num_heads=2, rotary_base=5e5
    ),
    "gated hybrid": replace(BASE, hybrid_layer_pattern="G*", delta_expand_k=0.5),
}


def whole_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Our tensors by global name; a single process holds them whole."""
    return {
        section.name: local_view(parameter.data, section, record_of(parameter).dim)
        for parameter in model.parameters()
        for section in record_of(parameter).sections
    }


def make_model(config: ModelConfig, seed: int = 5) -> Decoder:
    model = Decoder(config, dtype=torch.float64)
    initialize(model, seed)
    return model


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_logits(case):
    ours = make_model(CASES[case])
    theirs = dict(export_weights(ours.config, whole_tensors(ours).__getitem__))
    values = json.loads(json.dumps(fla_config(ours.config)))  # as config.json carries it

    config = Config(model=config_from_fla(values))
    config.training.train_iters = 1
    validate(config, world_size=1)
    assert config.model.mixers == ours.config.mixers
    again = make_model(config.model, seed=6)
    targets = whole_tensors(again)
    for name, tensor in import_weights(config.model, theirs.__getitem__):
        targets.pop(name).copy_(tensor)
    assert not targets

    tokens = torch.randint(0, 100, (2, 9))
    positions = torch.arange(9).expand(2, 9)
    expected = ours(tokens, positions)
    torch.testing.assert_close(again(tokens, positions), expected, rtol=1e-12, atol=1e-12)


ATTENTION = {f"attn.{x}_proj.weight" for x in ("q", "k", "v", "o")}
MLP = {"attn_norm.weight", "mlp_norm.weight"} | {
    f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
}
DELTA = ATTENTION | {"attn.b_proj.weight", "attn.o_norm.weight"}
DELTA |= {f"attn.{x}_conv1d.weight" for x in ("q", "k", "v")}
GATED = DELTA | {"attn.A_log", "attn.dt_bias", "attn.a_proj.weight", "attn.g_proj.weight"}


@pytest.mark.parametrize(
    ("case", "layer", "names"),
    [
        ("delta_net", 0, DELTA | MLP),
        ("gated", 3, GATED | MLP),
        ("gated hybrid", 0, GATED | MLP),
        ("gated hybrid", 1, ATTENTION | MLP),
    ],
)
def test_names_are_those_of_fla(case, layer, names):
    model = make_model(CASES[case])
    theirs = [name for name, _ in export_weights(model.config, whole_tensors(model).__getitem__)]
    prefix = f"model.layers.{layer}."
    assert {n.removeprefix(prefix) for n in theirs if n.startswith(prefix)} == names
    top = {n for n in theirs if not n.startswith("model.layers.")}
    assert top == {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}


def test_defaults_of_fla_are_read_as_they_are_there():
    plain = config_from_fla(
        {"model_type": "delta_net", "hidden_size": 1024, "num_heads": 8, "num_hidden_layers": 24}
    )
    assert plain.ffn_size == 2816  # 4 x 2/3 x 1024, up to a multiple of 256
    assert plain.norm_epsilon == 1e-6 and plain.delta_widths == (128, 128)
    gated = config_from_fla(
        {
            "model_type": "gated_deltanet",
            "hidden_size": 2048,
            "num_heads": 6,
            "num_hidden_layers": 21,
        }
    )
    assert gated.delta_widths == (256, 512) and gated.delta_gate("gated_delta_net")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (replace(BASE, hybrid_layer_pattern="DDD2"), "this one has delta_net, diff_v2"),
        (replace(BASE, hybrid_layer_pattern="DG"), "this one has delta_net, gated_delta_net"),
        (replace(BASE, token_mixer="delta_net", delta_conv_bias=True), "--delta-conv-bias"),
        (replace(BASE, token_mixer="delta_net", swiglu=False), "an MLP without SwiGLU"),
        (
            replace(BASE, token_mixer="gated_delta_net", delta_use_beta=False),
            "without --delta-use-beta",
        ),
        (replace(BASE, hybrid_layer_pattern="D*", kv_channels=32), "--kv-channels 32"),
    ],
)
def test_what_fla_has_not_is_refused(config, complaint):
    with pytest.raises(InteropError, match=complaint):
        fla_config(config)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_v_heads": 8}, "num_v_heads 8"),
        ({"output_gate_activation": "sigmoid"}, "output_gate_activation 'sigmoid'"),
        ({"attnres_block_size": 4}, "attnres_block_size 4"),
        ({"attn": {"layers": [1], "num_heads": 4, "window_size": 64}}, "window_size 64"),
        ({"model_type": "gla"}, "'gla' is none of delta_net, gated_deltanet"),
    ],
)
def test_what_we_have_not_is_refused(values, complaint):
    base = {"model_type": "gated_deltanet", "hidden_size": 64, "num_heads": 4}
    with pytest.raises(InteropError, match=complaint):
        config_from_fla(base | {"num_hidden_layers": 2} | values)


def test_a_tensor_of_another_shape_is_named():
    model = make_model(CASES["delta_net"])
    theirs = dict(export_weights(model.config, whole_tensors(model).__getitem__))
    theirs["model.layers.0.attn.o_norm.weight"] = torch.ones(7)
    with pytest.raises(InteropError, match=r"o_norm.weight is \(7,\), and .* says \(16,\)"):
        list(import_weights(model.config, theirs.__getitem__))
