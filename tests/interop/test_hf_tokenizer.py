"""Exported tokenizers give the ids of the ones we train with."""

import json

import pytest

from megadiff.config import DataConfig
from megadiff.data.tokenizers import TokenizerSettings
from megadiff.interop.hf.tokenizer import write_tokenizer

transformers = pytest.importorskip("transformers", minversion="5.0")
sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 12 times.",
    "  spaces   \n\tand tabs ",
    "naïve café 日本語 ☃ 😀",
    "",
]


def trained(folder, **options) -> str:
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(f"{text} line {n}" for n in range(60) for text in TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "model"),
        vocab_size=312,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    return str(folder / "model.model")


def check(folder, data: DataConfig) -> None:
    """`write_tokenizer` writes one whose ids, special tokens and text are those of `data`."""
    target = folder / "target"
    target.mkdir()
    special, note = write_tokenizer(target, data, None)
    assert (target / "tokenizer.json").is_file(), note
    ours = TokenizerSettings(
        data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file
    ).build()
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ids == list(ours.encode(text))
        assert theirs.decode(ids) == ours.decode(ids)
    assert (theirs.eos_token_id, special["eos_token_id"]) == (ours.eod, ours.eod)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(tmp_path, kind, prefix):
    model = trained(
        tmp_path,
        model_type=kind,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
    )
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    check(tmp_path, data)


def test_a_tokenizer_that_would_give_other_ids_is_left_out(tmp_path):
    model = trained(tmp_path, model_type="bpe")  # normalises text and drops spaces
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    special, note = write_tokenizer(tmp_path, data, None)
    assert "no tokenizer.json gives the ids" in note
    assert special["eos_token_id"] == 2 and not (tmp_path / "tokenizer.json").exists()


def test_gpt2(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
    made.save_model(str(tmp_path))
    data = DataConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    check(tmp_path, data)


def test_bytes(tmp_path):
    check(tmp_path, DataConfig(tokenizer_type="ByteTokenizer"))


def test_a_folder_is_copied(tmp_path):
    check(tmp_path, DataConfig(tokenizer_type="ByteTokenizer"))
    source, target = tmp_path / "target", tmp_path / "copy"
    target.mkdir()
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(source))
    write_tokenizer(target, data, None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((target / name).read_text()) == json.loads((source / name).read_text())


def test_missing_files_are_told(tmp_path):
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="gone")
    special, note = write_tokenizer(tmp_path, data, None)
    assert "gone: no such file" in note and not special
