"""The command line of tools/convert.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megadiff.interop.checkpoint import read_checkpoint
from megadiff.interop.plain import plain_name
from tests.interop.models import MODELS, decoder, save_checkpoint
from tools.convert import main

DATA = Path(__file__).parents[1] / "data"


def equal(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same tensors."""
    one, other = (read_checkpoint(root)[1] for root in (first, second))
    return one.keys() == other.keys() and all(
        torch.equal(tensor.make(), other[name].make()) for name, tensor in one.items()
    )


def test_there_and_back(tmp_path, capsys):
    save_checkpoint(tmp_path / "first", decoder(MODELS["diff_v2"]))
    folder, back = str(tmp_path / "hf"), str(tmp_path / "back")
    assert main(["to-hf", "--load", str(tmp_path / "first"), "--output", folder]) == 0
    assert main(["from-hf", "--input", folder, "--output", back]) == 0
    out = capsys.readouterr().out
    assert f"wrote {folder}: MegadiffForCausalLM" in out
    assert f"--config {back}/model.yaml --load {back} --finetune" in out
    assert equal(tmp_path / "first", tmp_path / "back")


def test_a_llama_made_differential(tmp_path, capsys):
    save_checkpoint(tmp_path / "first", decoder(MODELS["standard"]))
    folder = str(tmp_path / "hf")
    assert main(["to-hf", "--load", str(tmp_path / "first"), "--output", folder]) == 0
    words = ["llama-to-diff", "--input", folder, "--exact", "--output", str(tmp_path / "diff")]
    assert main([*words, "--variant", "v1_split"]) == 2
    assert "error: v1_split has no exact start" in capsys.readouterr().err
    assert main([*words, "--variant", "v2", "--dtype", "bfloat16"]) == 0
    config, tensors = read_checkpoint(tmp_path / "diff")
    assert config.model.token_mixer == "diff_v2" and config.training.bf16
    assert tensors["layers.0.mixer.lambda.weight"].make().abs().max() == 0


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_plain_model(tmp_path, suffix):
    golden = np.load(DATA / "plain_model.npz")
    state = {
        name.removeprefix("param/"): torch.from_numpy(golden[name])
        for name in golden.files
        if name.startswith("param/")
    }
    file = tmp_path / f"model{suffix}"
    (torch.save if suffix == ".pt" else save_file)(state, file)
    root = tmp_path / "checkpoint"
    assert main(["from-plain", "--input", str(file), "--output", str(root)]) == 0
    config, tensors = read_checkpoint(root)
    assert config.model.diff_lambda_per_head and config.model.vocab_size == 97
    for name, tensor in tensors.items():
        assert torch.equal(tensor.make(), state[plain_name(name)])


@pytest.mark.parametrize("content", [b"", b"no pickle", b"cos\nsystem\n(S'true'\ntR."])
def test_a_file_that_is_no_state_dict(tmp_path, capsys, content):
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    assert main(["from-plain", "--input", str(file), "--output", str(tmp_path / "out")]) == 2
    assert f"error: {file}: no state_dict" in capsys.readouterr().err


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3), {"token_emb.weight": 1.0}])
def test_a_file_of_something_else(tmp_path, capsys, content):
    torch.save(content, tmp_path / "model.pt")
    words = ["--input", str(tmp_path / "model.pt"), "--output", str(tmp_path / "out")]
    assert main(["from-plain", *words]) == 2
    assert "not a state_dict" in capsys.readouterr().err


def test_missing_input(tmp_path, capsys):
    output = str(tmp_path / "out")
    assert main(["to-hf", "--load", str(tmp_path / "gone"), "--output", output]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["from-hf", "--input", str(tmp_path / "gone"), "--output", output]) == 2
    assert "gone/config.json" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1", "x"])
def test_a_shard_size_that_is_none(size, tmp_path, capsys):
    words = ["to-hf", "--load", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--max-shard-size", size])
    assert "argument --max-shard-size: " in capsys.readouterr().err
