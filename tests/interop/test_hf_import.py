"""Models that transformers made, read into our decoder; configurations as they are found."""

import pytest
import torch

from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import load
from megadiff.interop.checkpoint import read_checkpoint
from megadiff.interop.hf.architecture import from_hf_config
from megadiff.interop.hf.convert import import_folder
from megadiff.interop.tensors import InteropError
from megadiff.models.decoder import Decoder
from tests.interop.models import logits, tokens

transformers = pytest.importorskip("transformers", minversion="5.0")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
LLAMA32 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def decoder_of(root) -> Decoder:
    model = Decoder(read_checkpoint(root)[0].model)
    for parameter in model.parameters():
        parameter.data.zero_()
    path = find_checkpoint(root)
    assert path is not None
    load(path, module_tensors(model))
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"head_dim": 12, "mlp_bias": True, "rope_parameters": LLAMA32}),
        ("DiffLlama", {"rope_parameters": LLAMA32}),
        ("DiffLlama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-4}),
    ],
)
def test_models_made_by_transformers(tmp_path, name, options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **options)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    ids = tokens()
    with torch.no_grad():
        expected = theirs(ids).logits
    error = (logits(decoder_of(tmp_path / "ours"), ids) - expected).abs().max()
    assert error < 1e-5 * expected.abs().max()


def test_configurations_in_the_spelling_of_older_versions():
    """Llama 3.2's own config.json, as published for transformers 4."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {key: v for key, v in LLAMA32.items() if key != "rope_theta"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    architecture, m = from_hf_config(values, "config.json")
    assert architecture == "llama" and m.token_mixer == "standard"
    assert m.use_rope_scaling and m.rope_scaling_factor == 32 and m.rotary_base == 5e5
    assert not m.untie_embeddings_and_output_weights and not m.rotary_interleaved
    assert (m.num_attention_heads, m.query_groups, m.head_width("standard")) == (32, 8, 64)
    _, plain = from_hf_config(values | {"rope_scaling": None}, "config.json")
    assert not plain.use_rope_scaling
    stretched = values["rope_scaling"] | {"original_max_position_embeddings": 4096}
    with pytest.raises(InteropError, match=r"original_max_position_embeddings 4096 \(only 8192\)"):
        from_hf_config(values | {"rope_scaling": stretched}, "config.json")
    with pytest.raises(InteropError, match="rope_type 'linear'"):
        from_hf_config(values | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "x")
