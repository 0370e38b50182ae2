import json
import random
from pathlib import Path

import pytest

from megadiff.data.tokenizers import TokenizerSettings
from tools.train_tokenizer import main, sample_texts


def write_corpus(path: Path, count: int = 200) -> Path:
    rng = random.Random(1)
    syllables = ["wa", "ter ", "wind ", "sto", "ne ", "fi", "re ", "河", "été ", "1234 ", "ing "]
    texts = ["".join(rng.choices(syllables, k=80)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_trains_from_json_lines(model_type: str, tmp_path: Path) -> None:
    source, prefix = write_corpus(tmp_path / "a.jsonl"), tmp_path / "tokenizer"
    words = f"--input {source} --output-prefix {prefix} --vocab-size 320 --model-type {model_type}"
    assert main(words.split()) == 0
    tokenizer = TokenizerSettings("SentencePieceTokenizer", f"{prefix}.model").build()
    assert tokenizer.vocab_size == 320
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, 3)
    assert len(tokenizer.encode("water water wind")) < 12  # pieces of several letters
    assert tokenizer.decode(tokenizer.encode("  été\n\t🙂")) == "  été\n\t🙂"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "tokenizer.model",
        "tokenizer.vocab",
    ]


def test_an_earlier_tokenizer_is_replaced_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data may have been made with it."""
    source, model = write_corpus(tmp_path / "a.jsonl"), tmp_path / "t.model"
    model.write_bytes(b"earlier")
    words = f"--input {source} --output-prefix {tmp_path / 't'} --vocab-size 320".split()
    assert main(words) == 1
    assert "t.model exists; give --overwrite to replace it" in capsys.readouterr().err
    assert model.read_bytes() == b"earlier"
    assert main([*words, "--overwrite"]) == 0
    assert model.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vocab-size 90000", "this text gives at most"),
        ("--vocab-size 320 --json-key absent", "line 1: no such key: 'absent'"),
    ],
)
def test_errors(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_corpus(tmp_path / "a.jsonl")
    assert main(f"--input {source} --output-prefix {tmp_path / 't'} {words}".split()) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_samples_of_a_large_corpus_are_fair() -> None:
    texts = [f"{i:05d}" for i in range(10_000)]
    kept = sample_texts(iter(texts), budget=5000, seed=3)
    assert 900 <= len(kept) <= 1000  # documents of 5 bytes
    assert len(set(kept)) == len(kept)
    first_half = sum(int(text) < 5000 for text in kept)
    assert 400 <= first_half <= 600  # six standard deviations
    assert kept == sample_texts(iter(texts), budget=5000, seed=3)
    assert kept != sample_texts(iter(texts), budget=5000, seed=4)
    assert sorted(sample_texts(iter(texts[:10]), budget=5000, seed=3)) == texts[:10]
