"""The pictures and numbers of tools/analyze.py for a small model."""

import json
from dataclasses import replace

import pytest
import torch

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import save
from megadiff.config import Config, ConfigError, ModelConfig, to_dict
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import initialize
from tools.analyze import main

MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=32, vocab_size=259
)


@pytest.fixture
def checkpoint(tmp_path):
    def make(**options) -> str:
        config = Config(model=replace(MODEL, **options))
        config.data.tokenizer_type = "ByteTokenizer"
        config.training.device = "cpu"
        model = Decoder(config.model)
        initialize(model, seed=1)
        root = tmp_path / "checkpoints"
        save(layout.saving_path(root, 1), module_tensors(model), {"config": to_dict(config)})
        layout.publish(root, 1)
        layout.write_tracker(root, 1)
        return str(root)

    return make


def analyze(tmp_path, *words: str) -> dict:
    main([*words, "--output", str(tmp_path / "out" / "picture")])
    assert (tmp_path / "out" / "picture.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / "out" / "picture.json").read_text())


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
def test_maps(tmp_path, checkpoint, mixer):
    root = checkpoint(token_mixer=mixer)
    values = analyze(tmp_path, "maps", "--load", root, "--prompt", "abcd", "--layer", "-1")
    assert values["layer"] == 1 and values["tokens"] == list("abcd")
    first = torch.tensor(values["branch 1"])
    torch.testing.assert_close(first.sum(-1), torch.ones(4))
    assert torch.equal(first.triu(1), torch.zeros(4, 4))
    if mixer == "standard":
        return
    values = analyze(tmp_path, "maps", "--load", root, "--prompt", "abcd", "--head", "1")
    first, second, difference = (
        torch.tensor(values[key])
        for key in ("branch 1", "branch 2", "branch 1 - lambda x branch 2")
    )
    lam = torch.tensor(values["lambda"]).unsqueeze(-1)
    torch.testing.assert_close(difference, first - lam * second)


def test_spans(tmp_path, checkpoint):
    root = checkpoint(token_mixer="standard")
    prompts = ["--prompt", "ab[[cd]]efgh", "--prompt", "[[a]]b"]
    values = analyze(tmp_path, "spans", "--load", root, *prompts)
    assert values["prompts"] == 2 and set(values["layers"]) == {"0", "1"}
    assert values["mean"]["span"] + values["mean"]["rest"] == pytest.approx(1)
    # a model at its start attends about equally to 2 of 8 and to 1 of 2 tokens
    assert values["mean"]["span"] == pytest.approx((2 / 8 + 1 / 2) / 2, abs=0.02)


def test_outliers(tmp_path, checkpoint):
    text = tmp_path / "text.txt"
    text.write_text("some text to look at " * 5)
    words = ("--text-file", str(text), "--seq-length", "32", "--sequences", "2")
    values = analyze(tmp_path, "outliers", "--load", checkpoint(), *words)
    assert values["tokens"] == 64
    for title in ("attention scores", "hidden states"):
        whole, layers = values[title]["all"], values[title]["layers"]
        assert whole["top-1"] == max(layer["top-1"] for layer in layers.values())
        assert whole["top-1"] >= whole["top-2"] >= whole["top-100"] >= whole["median"] > 0


def test_lambda(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    entries = [
        {"kind": "train", "iteration": i, "lambda": {"0": 0.2 + i / 10, "1": 0.3}} for i in (1, 2)
    ]
    metrics.write_text("".join(json.dumps(e) + "\n" for e in entries))
    values = analyze(tmp_path, "lambda", "--metrics", str(metrics))
    assert values["iterations"] == [1, 2]
    assert values["lambda"]["0"] == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["maps", "--prompt", "ab", "--layer", "2"], "--layer 2: the model has 2"),
        (["maps", "--prompt", "ab", "--head", "5"], "--head 5: layer 0 has 2 heads"),
        (["spans", "--prompt", "no span"], "exactly one span"),
        (["spans", "--prompt", "a [[span]]"], "ends with its span"),
        (["spans"], "no prompts"),
        (["outliers", "--text-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_requests(tmp_path, checkpoint, words, message):
    with pytest.raises(ConfigError) as error:
        analyze(tmp_path, words[0], "--load", checkpoint(), *words[1:])
    assert message in str(error.value)
