"""fla-org's DeltaNet models, by their names; recorded from flash-linear-attention 0.6.0."""

import json
from dataclasses import replace

import pytest
import torch

from megadiff.config import ModelConfig
from megadiff.interop.checkpoint import read_checkpoint
from megadiff.interop.hf.architecture import from_hf_config, to_hf_config
from megadiff.interop.hf.convert import export_checkpoint, import_folder
from megadiff.interop.safetensors import read_folder
from megadiff.interop.tensors import InteropError
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import local_view, record_of
from tests.interop.models import TINY, decoder, logits, save_checkpoint, tokens

BASE = replace(TINY, num_layers=4, num_query_groups=None, untie_embeddings_and_output_weights=True)
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


def loaded(root) -> Decoder:
    """The model of the checkpoint in `root`."""
    config, tensors = read_checkpoint(root)
    model = decoder(config.model)
    for parameter in model.parameters():
        record = record_of(parameter)
        for section in record.sections:
            target = local_view(parameter.data, section, record.dim)
            target.copy_(tensors[section.name].make())
    return model


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path, case):
    """The same tensors bit for bit; in the layout of fla in between, the same logits."""
    ours = decoder(CASES[case])
    save_checkpoint(tmp_path / "first", ours)
    export_checkpoint(tmp_path / "first", tmp_path / "fla")
    import_folder(tmp_path / "fla", tmp_path / "second")
    _, tensors = read_checkpoint(tmp_path / "first")
    _, back = read_checkpoint(tmp_path / "second")
    assert tensors.keys() == back.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name].make(), tensor.make()), name

    source = tmp_path / "fla" / "config.json"
    values = json.loads(source.read_text())
    assert values.pop("trained_rotary_interleaved")  # fla's own models do not say it
    source.write_text(json.dumps(values))
    import_folder(tmp_path / "fla", tmp_path / "third")
    ids = tokens()
    expected = logits(ours, ids)
    assert (logits(loaded(tmp_path / "third"), ids) - expected).abs().max() < 1e-5


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
def test_names_are_those_of_fla(tmp_path, case, layer, names):
    save_checkpoint(tmp_path / "ours", decoder(CASES[case]))
    export_checkpoint(tmp_path / "ours", tmp_path / "fla")
    theirs = read_folder(tmp_path / "fla")
    prefix = f"model.layers.{layer}."
    assert {n.removeprefix(prefix) for n in theirs if n.startswith(prefix)} == names
    top = {n for n in theirs if not n.startswith("model.layers.")}
    assert top == {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}


def read(**values) -> ModelConfig:
    base = {"hidden_size": 1024, "num_heads": 8, "num_hidden_layers": 2}
    return from_hf_config(base | values, "config.json")[1]


def test_defaults_of_fla_are_read_as_they_are_there():
    plain = read(model_type="delta_net")
    assert plain.ffn_size == 2816  # 4 x 2/3 x 1024, up to a multiple of 256
    assert plain.norm_epsilon == 1e-6 and plain.delta_widths == (128, 128)
    gated = read(model_type="gated_deltanet", hidden_size=2048, num_heads=6)
    assert gated.delta_widths == (256, 512) and gated.delta_gate("gated_delta_net")


@pytest.mark.parametrize(
    ("architecture", "options", "complaint"),
    [
        ("delta_net", {"hybrid_layer_pattern": "DDD2"}, "layers of diff_v2"),
        ("delta_net", {"token_mixer": "standard"}, "no layer of delta_net"),
        ("gated_deltanet", {"hybrid_layer_pattern": "DG"}, "layers of delta_net"),
        ("delta_net", {"token_mixer": "delta_net", "delta_conv_bias": True}, "--delta-conv-bias"),
        ("delta_net", {"token_mixer": "delta_net", "swiglu": False}, "--no-swiglu"),
        (
            "gated_deltanet",
            {"token_mixer": "gated_delta_net", "delta_use_beta": False},
            "--no-delta-use-beta",
        ),
        (
            "delta_net",
            {"hybrid_layer_pattern": "D*", "kv_channels": 32},
            "attention heads of 128 columns",
        ),
    ],
)
def test_what_fla_has_not_is_refused(architecture, options, complaint):
    with pytest.raises(InteropError, match=f"can not represent .*{complaint}"):
        to_hf_config(replace(BASE, **options), architecture, 64, "float32")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_v_heads": 16}, "num_v_heads 16"),
        ({"output_gate_activation": "sigmoid"}, "output_gate_activation sigmoid"),
        ({"attnres_block_size": 4}, "attnres_block_size 4"),
        ({"attn": {"layers": [1], "num_heads": 4, "window_size": 64}}, "window_size 64"),
        ({"num_heads": None}, "not a model's configuration .*NoneType"),
        ({"attn": 3}, "not a model's configuration"),
        ({"norm_eps": None}, "not a model's configuration"),
        ({"attn": {"layers": [2], "num_heads": 4}}, r"attn .*\[2\].* can not be represented"),
        ({"attn": {"num_heads": 4}}, "attn .* can not be represented"),
        ({"model_type": "delta_net", "qk_norm": "none"}, "qk_norm none"),
        ({"model_type": "delta_net", "qk_activation": "gelu"}, "qk_activation gelu"),
    ],
)
def test_what_we_have_not_is_refused(values, complaint):
    with pytest.raises(InteropError, match=f"config.json: .*{complaint}"):
        read(**{"model_type": "gated_deltanet"} | values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"expand_k": 0.7}, "--delta-expand-k 0.7 x --hidden-size 32"),
        ({"qk_norm": "sum"}, "must not be negative"),
    ],
)
def test_a_model_that_can_not_be_is_not_imported(tmp_path, values, complaint):
    save_checkpoint(tmp_path / "ours", decoder(CASES["delta_net"]))
    export_checkpoint(tmp_path / "ours", tmp_path / "fla")
    source = tmp_path / "fla" / "config.json"
    source.write_text(json.dumps(json.loads(source.read_text()) | values))
    with pytest.raises(InteropError, match=f"config.json: .*{complaint}"):
        import_folder(tmp_path / "fla", tmp_path / "again")
    assert not (tmp_path / "again").exists()
