"""The micro-batches of a run."""

import base64
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megadiff.config import ConfigError, load_config, validate
from megadiff.data.preprocess import PreprocessSettings, preprocess
from megadiff.data.tokenizers import TokenizerSettings
from megadiff.parallel.mesh import Axis
from megadiff.training.data import build_data, set_vocabulary
from tests.training.small import EOD, flags, write_data
from tools.generate import checkpoint_tokenizer


def prepare(argv: list[str], dp: Axis) -> tuple:
    config = load_config(argv)
    validate(config, dp.size)
    eod = set_vocabulary(config)
    return config, build_data(config, dp, eod)


@pytest.mark.parametrize("samples", [1, 7, 8, 13])
def test_an_evaluation_reads_every_sample_once(samples: int, tmp_path: Path) -> None:
    """Whatever the number of ranks, and also where the last global batch is not full."""
    argv = [f for f in flags(write_data(tmp_path), "--split", "0,100,0") if f != "--eod-mask-loss"]
    argv = ["--split", "50,50,0", *argv[:-2]]
    seen: dict[int, list[list[int]]] = {}
    for size in (1, 2, 4):
        rows = []
        for rank in range(size):
            _, data = prepare(argv, Axis(rank=rank, size=size))
            for batches in data.valid["validation"][0].once(samples, 8):
                assert len(batches) == 8 // size // 2
                for batch in batches:
                    rows += batch.tokens[batch.loss_mask.bool().all(1)].tolist()
                    assert set(batch.loss_mask.sum(1).tolist()) <= {0.0, 16.0}
        seen[size] = sorted(rows)
    assert len(seen[1]) == samples
    assert seen[1] == seen[2] == seen[4]


def test_ranks_share_a_global_batch(tmp_path: Path) -> None:
    argv = flags(write_data(tmp_path))
    whole = prepare(argv, Axis())[1].train.step(8, 8)
    halves = [prepare(argv, Axis(rank=r, size=2))[1].train.step(8, 8) for r in range(2)]
    together = [batch for pair in zip(*halves, strict=True) for batch in pair]
    for a, b in zip(whole, together, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.loss_mask, b.loss_mask)


def test_the_null_tokenizer_adds_an_end_of_document(tmp_path: Path) -> None:
    config, data = prepare(flags(write_data(tmp_path)), Axis())
    assert config.model.vocab_size == EOD + 1
    batch = data.train.step(0, 8)[0]
    assert torch.equal(batch.loss_mask == 0, batch.tokens == EOD)


def test_data_of_another_tokenizer_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a smaller one, whose tokens the model can take. Megatron's do not tell theirs."""
    for name, size in (("small", 20), ("large", 40)):
        vocabulary = {"<eos>": 0} | {str(i): i for i in range(1, size)}
        Tokenizer(WordLevel(vocabulary, unk_token="1")).save(str(tmp_path / f"{name}.json"))
    (tmp_path / "text.jsonl").write_text('{"text": "7"}\n' * 400)
    made = TokenizerSettings("HuggingFaceTokenizer", str(tmp_path / "small.json"))
    preprocess(PreprocessSettings([str(tmp_path / "text.jsonl")], str(tmp_path / "a"), made))
    prefix = str(tmp_path / "a_text_document")
    argv = flags(prefix, "--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "60")
    said = f"{prefix} was made with another tokenizer than this run's"
    for name, there in [("small", True), ("large", True), ("large", False)]:
        if not there:
            Path(f"{prefix}.origin.json").unlink()
        capsys.readouterr()
        prepare([*argv, "--tokenizer-model", str(tmp_path / f"{name}.json")], Axis())
        assert (said in capsys.readouterr().err) == (name == "large" and there)


def test_a_run_cuts_words_as_its_data_were_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of a tiktoken tokenizer does not say how: with o200k a capital begins a word."""
    pytest.importorskip("tiktoken")
    ranks = [bytes([i]) for i in range(256)] + [b"oW"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (tmp_path / "ranks").write_text("".join(lines))
    (tmp_path / "text.jsonl").write_text('{"text": "noWay"}\n' * 400)
    made = TokenizerSettings("TikTokenizer", str(tmp_path / "ranks"), tiktoken_pattern="o200k")
    preprocess(PreprocessSettings([str(tmp_path / "text.jsonl")], str(tmp_path / "a"), made))
    argv = flags(str(tmp_path / "a_text_document"), "--tokenizer-type", "TikTokenizer")
    argv += ["--tokenizer-model", str(tmp_path / "ranks"), "--vocab-size", "260"]
    for pattern, ids in (("o200k", list(b"noWay")), ("cl100k", [*b"n", 256, *b"ay"])):
        config, _ = prepare([*argv, "--tiktoken-pattern", pattern], Axis())
        told = "made with another tokenizer" in capsys.readouterr().err
        assert told == (pattern == "cl100k")
        assert checkpoint_tokenizer(config, None).encode("noWay") == ids


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer"', "{}", "\udcff"])
def test_a_note_on_tokenizers_stops_no_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a damaged one, as a full disk leaves it, nor a file that no tokenizer needs."""
    prefix, model = write_data(tmp_path), tmp_path / "tokenizer.model"
    origin = Path(f"{prefix}.origin.json")
    origin.write_bytes(text.encode("utf-8", "surrogateescape"))
    argv = flags(prefix, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "259")
    argv += ["--tokenizer-model", str(model)]
    prepare(argv, Axis())
    assert not capsys.readouterr().err
    model.touch()
    prepare(argv, Axis())
    assert capsys.readouterr().err == f"{origin} is damaged and passed over\n"
    prepare(argv, Axis(rank=1, size=2))
    assert not capsys.readouterr().err


def test_a_vocabulary_far_above_the_tokenizers_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags(write_data(tmp_path), "--tokenizer-type", "ByteTokenizer")
    for size, said in ((384, ""), (100_288, "the vocabulary has 100,288 entries")):
        prepare([*argv, "--vocab-size", str(size)], Axis())
        assert capsys.readouterr().err.startswith(said)


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path: Path) -> None:
    argv = flags(write_data(tmp_path), "--tokenizer-type", "ByteTokenizer")
    with pytest.raises(ConfigError, match="60 is smaller than the tokenizer's 259"):
        prepare(argv, Axis())


def test_validation_sets_by_name(tmp_path: Path) -> None:
    """Each is used whole, and read apart from the validation part of --split."""
    prefix = write_data(tmp_path)
    argv = flags(prefix, "--valid-data-sets", f"web={prefix}", f"books=0.5,{prefix}")
    _, data = prepare(argv, Axis())
    assert list(data.valid) == ["validation", "validation/web", "validation/books"]
    batches, samples = data.valid["validation/web"]
    assert 0 < samples <= len(batches.dataset)
    assert len(list(batches.once(samples, 8))) == -(-samples // 8)


@pytest.mark.parametrize("entry", ["web", "=a", "web=", "web=a"])
def test_a_validation_set_needs_a_name_of_its_own(entry: str, tmp_path: Path) -> None:
    prefix = write_data(tmp_path)
    argv = flags(prefix, "--valid-data-sets", f"web={prefix}", entry)
    with pytest.raises(ConfigError, match="a name of its own"):
        prepare(argv, Axis())
