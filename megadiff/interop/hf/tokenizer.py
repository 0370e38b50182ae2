"""The tokenizer's files beside an exported model, and back."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megadiff.config import DataConfig
from megadiff.data.indexed_dataset import DataError
from megadiff.data.tokenizers import Tokenizer, TokenizerSettings
from megadiff.libraries import LibraryError

_Form = tuple[Any, dict[str, str]]  # of `tokenizers`, and the names of its special tokens
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PROBES = (
    "The quick brown fox, 12345 times.",
    "  two  spaces\n\tand a tab ",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u2603 \U0001f600 \ufb01 \u00bd",
    "def f(x):\n    return x ** 2  # code",
)


def write_tokenizer(
    folder: Path, data: DataConfig, vocab_size: int | None
) -> tuple[dict[str, int | None], str]:
    """Write the tokenizer of `data` into `folder` as Hugging Face reads it.

    Returns its special tokens for config.json and what was done, in words: a tokenizer whose files
    are gone or that has no form there which gives the same ids (tiktoken ranks, plain ids) is left
    out. Unlike ours, Hugging Face's tokenizers take the names of special tokens in a text for the
    tokens.
    """
    kind = data.tokenizer_type
    try:
        tokenizer = TokenizerSettings.of(data, vocab_size).build()
    except (DataError, LibraryError) as error:
        return {}, f"no tokenizer files ({error})"
    tokens = {
        "bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad
    }  # fmt: skip
    if kind == "HuggingFaceTokenizer":
        assert data.tokenizer_model is not None
        copy_tokenizer(Path(data.tokenizer_model), folder)
        return tokens, "the tokenizer's files"
    for made, special in _FORMS[kind](tokenizer, data) if kind in _FORMS else ():
        if all(
            made.encode(p, add_special_tokens=False).ids == tokenizer.encode(p) for p in _PROBES
        ):
            made.add_special_tokens(sorted(set(special.values())))
            made.save(str(folder / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
            text = json.dumps(config | {"clean_up_tokenization_spaces": False}, indent=2)
            (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
            return tokens, f"the {kind} as tokenizer.json"
    return tokens, f"no tokenizer files (no tokenizer.json gives the ids of this {kind})"


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy Hugging Face's tokenizer files from the folder `source`, or from beside the file."""
    origin = source if source.is_dir() else source.parent
    for name in FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    if source.is_file() and source.name not in FILES:
        shutil.copyfile(source, folder / "tokenizer.json")
    return (folder / "tokenizer.json").is_file()


def _gpt2(tokenizer: Tokenizer, data: DataConfig) -> Iterator[_Form]:
    from tokenizers import models

    assert data.vocab_file is not None and data.merge_file is not None
    special = {"eos_token": "<|endoftext|>"} if tokenizer.eod is not None else {}
    yield _byte_level(models.BPE.from_file(data.vocab_file, data.merge_file)), special


def _bytes(tokenizer: Tokenizer, data: DataConfig) -> Iterator[_Form]:
    from tokenizers import models

    special = {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>", "pad_token": "<|pad|>"}
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    vocabulary |= {name: 256 + number for number, name in enumerate(special.values())}
    yield _byte_level(models.BPE(vocabulary, []), use_regex=False), special


def _byte_level(model: Any, use_regex: bool = True) -> Any:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, pre_tokenizers

    made = Fast(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.decoder = decoders.ByteLevel()
    return made


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level tokenizers have for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def _sentencepiece(tokenizer: Tokenizer, data: DataConfig) -> Iterator[_Form]:
    """The pieces as BPE, then as unigrams."""
    import sentencepiece
    from tokenizers import models

    file = sentencepiece.SentencePieceProcessor(model_file=data.tokenizer_model)
    pieces = [file.id_to_piece(i) for i in range(file.get_piece_size())]
    scores = [file.get_score(i) for i in range(file.get_piece_size())]
    named = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos, "pad_token": tokenizer.pad}
    special = {key: pieces[i] for key, i in named.items() if i is not None}
    prefixed = file.encode("a", out_type=str)[0].startswith("\u2581")
    by_bytes = "<0x00>" in pieces
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (-scores[index], piece[:cut], piece[cut:])
        for piece, index in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[0])
    bpe = models.BPE(
        vocabulary,
        [(first, second) for _, first, second in merges],
        unk_token=pieces[file.unk_id()],
        fuse_unk=True,
        byte_fallback=by_bytes,
    )
    yield _metaspace(bpe, prefixed), special
    scored = list(zip(pieces, scores, strict=True))
    unigram = models.Unigram(scored, unk_id=file.unk_id(), byte_fallback=by_bytes)
    yield _metaspace(unigram, prefixed), special


def _metaspace(model: Any, prefixed: bool) -> Any:
    """SentencePiece's treatment of spaces, as in Llama's tokenizer.json.

    Many models put a space before the text (add_dummy_prefix) and take it away when decoding.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, normalizers

    made = Fast(model)
    space = normalizers.Replace(" ", "\u2581")
    before, after = (
        ([normalizers.Prepend("\u2581")], [decoders.Strip(" ", 1, 0)]) if prefixed else ([], [])
    )
    made.normalizer = normalizers.Sequence([*before, space])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return made


_FORMS: dict[str, Callable[[Tokenizer, DataConfig], Iterator[_Form]]] = {
    "GPT2BPETokenizer": _gpt2,
    "ByteTokenizer": _bytes,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
}
