"""Checkpoints as Hugging Face models and back: values, tokens, types, refusals."""

import json
import weakref
from dataclasses import replace

import pytest
import torch

from megadiff.config import DELTA_MIXERS, DataConfig, ModelConfig
from megadiff.interop.checkpoint import read_checkpoint, write_checkpoint
from megadiff.interop.hf.convert import export_checkpoint, import_folder
from megadiff.interop.hf.names import to_hf
from megadiff.interop.safetensors import read_folder
from megadiff.interop.tensors import Deferred, InteropError
from megadiff.models.generation import Sampling, generate
from megadiff.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.interop.models import MODELS, TINY, decoder, logits, save_checkpoint, tokens

transformers = pytest.importorskip("transformers", minversion="5.0")
ARCHITECTURES = {"standard": "llama", "diff_v1": "diffllama"}


@pytest.fixture
def exported(tmp_path, module_cache):
    """Save a model, export it and read it with transformers."""

    def export(config: ModelConfig, dtype: torch.dtype = torch.float32, **options):
        model = decoder(config, dtype=dtype)
        save_checkpoint(tmp_path / "checkpoint", model)
        folder = tmp_path / "exported"
        report = export_checkpoint(tmp_path / "checkpoint", folder, **options)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code="MegadiffForCausalLM" in report.notes
        )
        return model, theirs.eval(), folder, report

    return export


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_transformers_equal_ours(exported, name):
    model, theirs, _, report = exported(MODELS[name])
    ids = tokens()
    ours = logits(model, ids)
    for implementation in ("eager", "sdpa"):
        theirs.set_attn_implementation(implementation)
        with torch.no_grad():
            error = (theirs(ids).logits - ours).abs().max()
        assert error < 1e-5 * ours.abs().max()
    assert any("folded" in note for note in report.notes) == (name == "diff_v1_weight")


@pytest.mark.parametrize(
    "name", ["standard", "diff_v1_no_weight", "diff_v2", "delta_hybrid", "delta_options"]
)
def test_bfloat16_logits_differ_by_rounding(exported, name):
    model, theirs, _, _ = exported(MODELS[name], torch.bfloat16)
    assert theirs.dtype == torch.bfloat16
    ids = tokens()
    exact = logits(decoder(MODELS[name]), ids)
    with torch.no_grad():
        errors = [x.float() - exact for x in (logits(model, ids), theirs(ids).logits)]
    assert errors[1].norm() < 2 * errors[0].norm()


@pytest.mark.parametrize(
    "name", ["standard", "diff_v1_weight", "diff_v2", "hybrid", "delta_hybrid"]
)
def test_greedy_generation_is_the_same(exported, name):
    """Prompts of unequal lengths, which theirs pads on the left, ours on the right."""
    model, theirs, _, _ = exported(MODELS[name])
    prompts = [tokens(1, 7)[0].tolist(), tokens(1, 4)[0].tolist()]
    ours = [list(step) for step in zip(*generate(model, prompts, 12, Sampling(0.0)), strict=True)]
    padded = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    mask = torch.ones_like(padded)
    mask[1, :3] = 0
    generated = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert generated[:, 7:].tolist() == ours


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_there_and_back_is_bit_exact(tmp_path, name, dtype):
    config = MODELS[name]
    save_checkpoint(tmp_path / "first", decoder(config, dtype=dtype))
    folded = name == "diff_v1_weight"
    architecture = "megadiff" if folded else None
    export_checkpoint(tmp_path / "first", tmp_path / "hf", architecture=architecture)
    import_folder(tmp_path / "hf", tmp_path / "second")
    before, tensors = read_checkpoint(tmp_path / "first")
    after, back = read_checkpoint(tmp_path / "second")
    assert tensors.keys() == back.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype
        assert torch.equal(back[key].make(), tensor.make()), key
    assert after.training.dtype == before.training.dtype
    assert after.training.seq_length == before.training.seq_length
    for layer in range(config.num_layers):
        mixer = config.mixer_of_layer(layer)
        assert after.model.mixer_of_layer(layer) == mixer
        if mixer in DELTA_MIXERS:
            assert after.model.delta_widths == config.delta_widths
            assert after.model.delta_gate(mixer) == config.delta_gate(mixer)
        else:
            assert after.model.head_width(mixer) == config.head_width(mixer)
    assert after.model.rotary_interleaved == config.rotary_interleaved


def split_job(root, config):
    world = torch.distributed.get_world_size()
    save_checkpoint(root, decoder(config, build_mesh(tensor=world)))


def test_a_split_checkpoint_is_exported_by_one_process(tmp_path):
    save_checkpoint(tmp_path / "whole", decoder(MODELS["diff_v2"]))
    run_distributed(2, split_job, tmp_path / "split", MODELS["diff_v2"])
    for name in ("whole", "split"):
        export_checkpoint(tmp_path / name, tmp_path / f"hf_{name}")
    whole, split = (
        (tmp_path / f"hf_{name}" / "model.safetensors").read_bytes() for name in ("whole", "split")
    )
    assert whole == split


def watched(tensors: dict[str, Deferred]):
    """The same tensors, and the most of their elements that were ever alive together."""
    alive: dict[int, int] = {}
    most = [0]

    def watch(tensor: Deferred) -> Deferred:
        def make() -> torch.Tensor:
            made = tensor.make().clone()
            key = id(made)
            alive[key] = made.numel()
            weakref.finalize(made, alive.pop, key)
            most[0] = max(most[0], sum(alive.values()))
            return made

        return Deferred(tensor.shape, tensor.dtype, make)

    return {name: watch(tensor) for name, tensor in tensors.items()}, most


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "first", decoder(MODELS["diff_v2"]))
    config, tensors = read_checkpoint(tmp_path / "first")
    largest = max(torch.Size(t.shape).numel() for t in tensors.values())
    tensors, most = watched(tensors)
    write_checkpoint(tmp_path / "second", config, tensors)
    assert 0 < most[0] <= largest
    most[0] = 0
    monkeypatch.setattr("megadiff.interop.hf.convert.read_checkpoint", lambda *_: (config, tensors))
    export_checkpoint(tmp_path / "first", tmp_path / "hf")
    assert 0 < most[0] <= largest


def test_shards_and_types(exported, tmp_path):
    _, _, folder, _ = exported(MODELS["diff_v2"], shard_bytes=20_000, dtype=torch.float32)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert read_folder(folder).keys() == index["weight_map"].keys()
    halves = export_checkpoint(tmp_path / "checkpoint", tmp_path / "half", dtype=torch.bfloat16)
    assert {t.dtype for t in read_folder(halves.path).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "architecture", "named"),
    [
        ({"normalization": "LayerNorm"}, None, "--normalization LayerNorm"),
        ({"swiglu": False}, None, "--no-swiglu"),
        ({"position_embedding_type": "learned_absolute"}, None, "learned_absolute"),
        ({"token_mixer": "delta_net"}, "llama", "layers of delta_net"),
        ({"token_mixer": "diff_v2"}, "diffllama", "layers of diff_v2"),
        ({"token_mixer": "diff_v1", "diff_lambda_init": 0.5}, None, "--diff-lambda-init 0.5"),
        ({"token_mixer": "diff_v1", "diff_head_norm": "none"}, None, "--diff-head-norm none"),
        ({"token_mixer": "diff_v1", "diff_value_width": "d"}, None, "--diff-value-width d"),
        ({"token_mixer": "diff_v1", "mlp_bias": True}, None, "--mlp-bias"),
        ({"token_mixer": "diff_v1", "diff_lambda_per_head": True}, None, "per-head"),
    ],
)
def test_what_can_not_be_represented_is_refused_by_name(tmp_path, change, architecture, named):
    save_checkpoint(tmp_path / "checkpoint", decoder(replace(TINY, **change)))
    with pytest.raises(InteropError, match="can not represent") as error:
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf", architecture=architecture)
    assert named in str(error.value)
    assert not (tmp_path / "hf").exists()


def test_nothing_is_overwritten(tmp_path):
    save_checkpoint(tmp_path / "checkpoint", decoder(MODELS["standard"]))
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf")
    with pytest.raises(InteropError, match="exists already"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf")
    for folder, text in (("hf", "another's"), ("checkpoint/tokenizer", "its own")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "tokenizer.json").write_text(text)
    with pytest.raises(InteropError, match="holds a checkpoint already"):
        import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint/tokenizer/tokenizer.json").read_text() == "its own"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            "not a model's configuration (integer division",
        ),
        ({"head_dim": "wide"}, "not a model's configuration (invalid literal"),
        ({"rms_norm_eps": None}, "not a model's configuration (float()"),
        ({"rope_scaling": 3}, "not a model's configuration ('int'"),
        ({"max_position_embeddings": "long"}, "config.json: invalid literal"),
        ({"model_type": "megadiff", "layer_mixers": ["delta_net"] * 3}, "no 'delta_num_heads'"),
        ({"num_hidden_layers": 4}, "missing: layers.3.mixer.k.weight"),
        ({"num_hidden_layers": 2}, "unknown: model.layers.2."),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and the weights are"),
        ({"intermediate_size": 40}, "layers.0.mlp.gate.weight is (48, 32) instead of (40, 32)"),
    ],
)
def test_folders_that_can_not_be_read_are_refused(tmp_path, change, named):
    save_checkpoint(tmp_path / "checkpoint", decoder(MODELS["standard"]))
    folder = export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf").path
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InteropError) as error:
        import_folder(folder, tmp_path / "new")
    assert named in str(error.value)
    assert not list((tmp_path / "new").glob("*iter*"))


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(InteropError, match="outside of its folder"):
        read_folder(tmp_path)
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InteropError, match="would have to be unpickled"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InteropError, match="not a safetensors file"):
        read_folder(tmp_path)


def test_the_tokenizer_goes_along(tmp_path):
    tokenizer = {"tokenizer_type": "ByteTokenizer"}
    save_checkpoint(tmp_path / "checkpoint", decoder(replace(MODELS["standard"], vocab_size=259)))
    report = export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf", tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(report.path)
    text = "Ça va? 日本\n\t x"
    assert theirs(text, add_special_tokens=False).input_ids == list(text.encode())
    assert theirs.decode(list(text.encode())) == text
    assert (
        theirs.eos_token_id == json.loads((report.path / "config.json").read_text())["eos_token_id"]
    )
    back = import_folder(report.path, tmp_path / "back")
    assert (back.path.parent / "tokenizer" / "tokenizer.json").is_file()
    assert read_checkpoint(tmp_path / "back")[0].data.tokenizer_type == "HuggingFaceTokenizer"


def test_folding_the_norm_is_exact_arithmetic():
    config = replace(MODELS["diff_v1_weight"], num_layers=1)
    output = torch.randn(32, 32, dtype=torch.float64)
    scale = torch.rand(8, dtype=torch.float64)
    names = {"layers.0.mixer.o.weight": output, "layers.0.mixer.subln.weight": scale}
    ours = {n: Deferred(tuple(t.shape), t.dtype, lambda t=t: t) for n, t in names.items()}
    folded = to_hf(ours, config, "diffllama")["model.layers.0.self_attn.o_proj.weight"].make()
    heads = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(folded @ heads.flatten(), output @ (heads * scale).flatten())
    assert DataConfig().tokenizer_type
