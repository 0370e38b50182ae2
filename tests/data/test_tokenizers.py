"""Every tokenizer gives text back, takes names of special tokens as text, and names its ids."""

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megadiff.data import long_text
from megadiff.data.errors import DataError
from megadiff.data.tokenizers import Tokenizer, TokenizerSettings
from megadiff.libraries import LibraryError

SYLLABLES = [
    "ta",
    "ke",
    "ro",
    "ning",
    "s",
    "the ",
    "quick",
    "über ",
    "数",
    "Ελ",
    "x = 1",
    "()\n",
    "\t",
]
TEXT = "".join(random.Random(5).choices(SYLLABLES, k=8000))
HARD = [
    "",
    " ",
    "  two  spaces  ",
    "tabs\tand\r\nlines\n\n\n",
    "</s><s><|endoftext|><unk><pad><eos>",
    "e\u0301 é \u200d 👩‍👩‍👧‍👦 \U000e0001",
    "שלום مرحبا 12٣",
    "\ufeff\u0000\u0001\uffff",
    "x" * 3000,
]


def sentencepiece_model(folder: Path, model_type: str) -> Tokenizer:
    from tools.train_tokenizer import main

    source = folder / "text.txt"
    source.write_text(TEXT)
    words = ["--input", str(source), "--output-prefix", str(folder / model_type)]
    words += ["--vocab-size", "350", "--model-type", model_type]
    assert main(words) == 0
    return TokenizerSettings("SentencePieceTokenizer", str(folder / f"{model_type}.model")).build()


def trained_bpe():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    model.train_from_iterator([TEXT], trainer)
    return model


def huggingface(folder: Path) -> Tokenizer:
    trained_bpe().save(str(folder / "tokenizer.json"))
    return TokenizerSettings("HuggingFaceTokenizer", str(folder)).build()


def gpt2(folder: Path) -> Tokenizer:
    trained_bpe().model.save(str(folder))
    return TokenizerSettings(
        "GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    ).build()


def tiktoken(folder: Path) -> Tokenizer:
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" t", b" the", b"ab"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "ranks.tiktoken").write_text("".join(lines))
    return TokenizerSettings("TikTokenizer", str(folder / "ranks.tiktoken")).build()


MAKERS = {
    "unigram": lambda folder: sentencepiece_model(folder, "unigram"),
    "bpe": lambda folder: sentencepiece_model(folder, "bpe"),
    "huggingface": huggingface,
    "gpt2": gpt2,
    "tiktoken": tiktoken,
    "byte": lambda folder: TokenizerSettings("ByteTokenizer").build(),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_hard_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_batch_is_its_texts_one_by_one(tokenizer: Tokenizer) -> None:
    texts = [*HARD, TEXT]
    batch = [list(map(int, ids)) for ids in tokenizer.encode_batch(texts)]
    assert batch == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("text", [TEXT, "x" * 9000, "¡ no  words ! " * 900, " a b" * 3000])
def test_a_long_text_in_pieces_has_the_same_ids(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0

    def encode_batch(texts: list[str]):
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return whole(texts)

    expected, whole = tokenizer.encode(text), tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr(long_text, "PIECE", 700)
    ids = long_text.encode_all(tokenizer, ["before", text])
    assert [list(map(int, one)) for one in ids] == [tokenizer.encode("before"), expected]
    assert (longest < 2000) == ("a" in text)  # between letters on both sides it can be cut


@pytest.mark.parametrize("length", [4, 8])
def test_runs_of_a_fixed_length_are_not_cut(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = tokenizers.Regex(f".{{1,{length}}}")
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    text = TEXT.replace("\n", " ")
    model.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=400))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerSettings("HuggingFaceTokenizer", str(tmp_path)).build()
    monkeypatch.setattr(long_text, "PIECE", 701)
    ids = long_text.encode_all(tokenizer, [text])[0]
    assert list(map(int, ids)) == tokenizer.encode(text)


def test_tokens_of_several_repetitions_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    merges = [("a", "b"), ("ab", "c"), ("abc", "d"), ("abcd", "e"), (" ", "abcde")]
    merges.append((" abcde", " abcde"))
    vocabulary = [*" abcdex", *("".join(pair) for pair in merges)]
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(vocabulary)}, merges)
    )
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerSettings("HuggingFaceTokenizer", str(tmp_path)).build()
    for piece in range(700, 712):
        monkeypatch.setattr(long_text, "PIECE", piece)
        text = "x" + " abcde" * 700
        ids = long_text.encode_all(tokenizer, [text])[0]
        assert list(map(int, ids)) == tokenizer.encode(text)


def test_unigram_pieces_are_as_good_as_the_whole(tmp_path: Path) -> None:
    """Where float32 decides between segmentations that are equally good, ids may differ."""
    tokenizer = sentencepiece_model(tmp_path, "unigram")
    text = "".join(random.Random(6).choices([*SYLLABLES, "    ", "ss"], k=400_000))
    assert len(text) > 4 * long_text.PIECE
    whole = np.array(tokenizer.encode(text))
    pieces = np.asarray(long_text.encode_all(tokenizer, [text])[0])
    assert tokenizer.decode(pieces.tolist()) == text
    model = tokenizer._model  # type: ignore[attr-defined]
    ids = range(tokenizer.vocab_size)
    scores = np.array([model.get_score(i) for i in ids])
    names = [model.id_to_piece(i).replace("▁", " ").encode() for i in ids]
    sizes = np.array([1 if model.is_byte(i) else len(names[i]) for i in ids])
    places = len(np.setxor1d(sizes[whole].cumsum(), sizes[pieces].cumsum()))
    # the tokens of both on the way from one common place to the next, each rounded by half an ulp
    rounding = 1.5 * places * np.spacing(np.float32(scores[whole].sum()))
    assert abs(scores[whole].sum() - scores[pieces].sum()) <= abs(rounding)


def test_end_of_document_is_an_id_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.eod is not None and 0 <= tokenizer.eod < tokenizer.vocab_size
    ids = [*tokenizer.encode("one"), tokenizer.eod, *tokenizer.encode("two")]
    assert ids.count(tokenizer.eod) == 1
    assert isinstance(tokenizer.decode(np.array(ids)), str)


def test_the_mark_of_tiktoken_inside_a_text_is_text(tmp_path: Path) -> None:
    from megadiff.data.tokenizers import _BETWEEN_TEXTS

    tokenizer = tiktoken(tmp_path)
    ends = [_BETWEEN_TEXTS[:n] for n in range(len(_BETWEEN_TEXTS))]  # no text joins its mark
    for inside in (f"a{_BETWEEN_TEXTS}b", *ends):
        texts = ["the", inside, "", "the the"]
        batch = [list(map(int, ids)) for ids in tokenizer.encode_batch(texts)]
        assert batch == [tokenizer.encode(text) for text in texts]
        assert tokenizer.decode(batch[1]) == inside
        assert max(batch[1], default=0) < tokenizer.vocab_size
    assert tokenizer.encode_batch([]) == []


def test_tiktoken_merges(tmp_path: Path) -> None:
    tokenizer = tiktoken(tmp_path)
    assert tokenizer.encode("the the") == [257, 259]
    assert (tokenizer.eod, tokenizer.bos, tokenizer.vocab_size) == (261, 262, 264)


def test_huggingface_names_its_tokens_in_its_config(tmp_path: Path) -> None:
    model = trained_bpe()
    count = model.get_vocab_size()
    model.add_special_tokens(["<|done|>", "<s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|done|>"}, "bos_token": "<s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TokenizerSettings("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json")).build()
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (count, count + 1, None)


def test_null() -> None:
    tokenizer = TokenizerSettings("NullTokenizer", vocab_size=100).build()
    assert tokenizer.encode("5 0 99") == [5, 0, 99]
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    with pytest.raises(DataError, match="id 100 is not below"):
        tokenizer.encode("100")
    with pytest.raises(DataError, match="reads ids"):
        tokenizer.encode("5 x")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_text("not a model at all\n")
    for kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"):
        with pytest.raises(DataError, match="junk"):
            TokenizerSettings(kind, str(junk)).build()
        with pytest.raises(DataError, match=f"{kind} needs --tokenizer-model"):
            TokenizerSettings(kind).build()
    ranks = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    for lines, message in (
        (ranks[:200], "56 of the 256 single bytes have no token"),
        ([*ranks, "YWI= 255\n"], "each once"),
        ([*ranks, "YWI= -1\n"], "each once"),
        ([*ranks, f"YWI= {2**40}\n"], "each once"),
    ):
        junk.write_text("".join(lines))
        with pytest.raises(DataError, match=message):
            TokenizerSettings("TikTokenizer", str(junk)).build()
    with pytest.raises(DataError, match="no such file"):
        TokenizerSettings("SentencePieceTokenizer", str(tmp_path / "absent")).build()
    with pytest.raises(DataError, match=r"--tokenizer-model /x+: File name too long"):
        TokenizerSettings("TikTokenizer", "/" + "x" * 300).build()  # as of a closed folder
    with pytest.raises(DataError, match="one of SentencePieceTokenizer"):
        TokenizerSettings("BertTokenizer").build()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "ranks").write_text("QQ== 0\n")
    with pytest.raises(LibraryError, match=r"pip install 'megadiff\[tokenizers\]'"):
        TokenizerSettings("TikTokenizer", str(tmp_path / "ranks")).build()
