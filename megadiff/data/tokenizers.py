"""Tokenizers under Megatron's type names, with one face for all.

Text is text: strings such as `<|endoftext|>` inside a document are encoded as ordinary characters,
never as the token of that name. Libraries are imported where they are used.
"""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.data.errors import DataError
from megadiff.libraries import need_library

EOD_NAMES = (
    "<EOD>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>", "[SEP]",
)  # fmt: skip
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>", "[CLS]")
PAD_NAMES = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "[PAD]")

CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


class Tokenizer(ABC):
    """Ids of text and back. `eod`, `bos` and `pad` are ids, None where there is no such token."""

    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    pad: int | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone, no token added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Ids of each text; faster than one by one where the library can."""
        return [self.encode(text) for text in texts]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file, as Llama and Mistral have."""

    def __init__(self, model: str) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=model)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{model}: not a SentencePiece model ({error})") from None
        self.vocab_size = self._model.get_piece_size()
        self.eod = _first(self._model.eos_id(), *map(self._id, EOD_NAMES))
        self.bos = _first(self._model.bos_id())
        self.pad = _first(self._model.pad_id())

    def _id(self, piece: str) -> int:
        index = self._model.piece_to_id(piece)
        return index if index != self._model.unk_id() else -1

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


def _first(*ids: int) -> int | None:
    return next((i for i in ids if i >= 0), None)


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, or a folder that holds one."""

    def __init__(self, model: str) -> None:
        tokenizers = need_library("tokenizers", "this tokenizer", "tokenizers")
        path = Path(model)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise DataError(f"{file}: not a tokenizer.json ({error})") from None
        self._model.no_padding()
        self._model.no_truncation()
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        beside = file.parent / "tokenizer_config.json"
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        self.eod = _special(vocabulary, config.get("eos_token"), EOD_NAMES)
        self.bos = _special(vocabulary, config.get("bos_token"), BOS_NAMES)
        self.pad = _special(vocabulary, config.get("pad_token"), PAD_NAMES)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


def _special(vocabulary: dict[str, int], named: Any, usual: Sequence[str]) -> int | None:
    """The id of a token that tokenizer_config.json has as `named`, else of a usual name."""
    if isinstance(named, dict):
        named = named.get("content")
    names = [named, *usual] if isinstance(named, str) else usual
    return next((vocabulary[name] for name in names if name in vocabulary), None)


_BETWEEN_TEXTS = "\0<|between texts|>"  # begins as it never goes on: two cannot overlap


class TikTokenizer(Tokenizer):
    """A file of tiktoken ranks: a line per token, its bytes in base64 and its id.

    `pattern` is "cl100k" or "o200k", how text is cut into words before merging; the file does not
    say. Ids of special tokens follow the ranks: end of document first, then beginning and padding.
    """

    def __init__(self, ranks: str, pattern: str = "cl100k") -> None:
        tiktoken = need_library("tiktoken", "this tokenizer", "tokenizers")
        table = _read_ranks(ranks)
        count = max(table.values()) + 1
        special = {"<|endoftext|>": count, "<|begin_of_text|>": count + 1, "<|pad|>": count + 2}
        special[_BETWEEN_TEXTS] = self._between = count + 3  # never leaves this class
        patterns = {"cl100k": CL100K_PATTERN, "o200k": O200K_PATTERN}
        self._model = tiktoken.Encoding(
            Path(ranks).stem,
            pat_str=patterns[pattern],
            mergeable_ranks=table,
            special_tokens=special,
        )
        self.eod, self.bos, self.pad = count, count + 1, count + 2
        self.vocab_size = count + 3

    def encode(self, text: str) -> list[int]:
        return self._model.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """In one call: between texts stands a mark, at which tiktoken cuts as at their ends."""
        joined = self._model.encode_to_numpy(
            _BETWEEN_TEXTS.join(texts), allowed_special={_BETWEEN_TEXTS}, disallowed_special=()
        )
        marks = np.flatnonzero(joined == self._between).tolist()
        if len(marks) != len(texts) - 1:  # there are none, or one holds the mark itself
            return [self.encode(text) for text in texts]
        return [joined[a + 1 : b] for a, b in pairwise([-1, *marks, len(joined)])]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


def _read_ranks(path: str) -> dict[bytes, int]:
    table: dict[bytes, int] = {}
    number = 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                number += 1
                if line.strip():
                    token, rank = line.split()
                    table[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise DataError(f"{path}, line {number}: not `base64 rank`, not a tiktoken file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    bytes_without = sum(bytes([byte]) not in table for byte in range(256))
    if bytes_without:
        raise DataError(f"{path}: {bytes_without} of the 256 single bytes have no token in it")
    ranks = set(table.values())
    if len(ranks) < len(table) or min(ranks) < 0 or max(ranks) >= 2**31:
        raise DataError(f"{path}: ranks must be from 0 on, each once")
    return table


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """GPT-2's byte-level BPE from its `vocab.json` and `merges.txt`."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        tokenizers = need_library("tokenizers", "this tokenizer", "tokenizers")
        try:
            model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:
            raise DataError(f"{vocab_file}, {merge_file}: not a BPE vocabulary ({error})") from None
        self._model = tokenizers.Tokenizer(model)
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size = max(self._model.get_vocab().values()) + 1
        self.eod = self.bos = self.pad = self._model.token_to_id("<|endoftext|>")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255, then end of document, beginning and padding."""

    vocab_size, eod, bos, pad = 259, 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text that is ids already, decimal with spaces between; the end of document follows them."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = vocab_size
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads ids: {error}") from None
        for i in ids:
            if not 0 <= i < self._ids:
                raise DataError(f"id {i} is not below --vocab-size {self._ids}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


TYPES = (
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
    "HuggingFaceTokenizer", "TikTokenizer", "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerSettings:
    """Which tokenizer, under the names of its flags; files as far as the type needs them."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "cl100k"

    @classmethod
    def of(cls, options: object, vocab_size: int | None) -> "TokenizerSettings":
        """From what has them as attributes: parsed flags, or a configuration's `data`."""
        names = {field.name for field in fields(cls)} - {"vocab_size"}
        return cls(vocab_size=vocab_size, **{name: getattr(options, name) for name in names})

    def build(self) -> Tokenizer:
        """The tokenizer; raises DataError that names the flag that is missing or wrong."""

        def need(name: str) -> str:
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if value is None:
                raise DataError(f"--tokenizer-type {self.tokenizer_type} needs {flag}")
            try:
                there = Path(value).exists()
            except OSError as error:  # as in a folder that is closed to this user
                raise DataError(f"{flag} {value}: {error.strerror}") from None
            if not there:
                raise DataError(f"{flag} {value}: no such file")
            return value

        match self.tokenizer_type:
            case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
                return SentencePieceTokenizer(need("tokenizer_model"))
            case "HuggingFaceTokenizer":
                return HuggingFaceTokenizer(need("tokenizer_model"))
            case "TikTokenizer":
                return TikTokenizer(need("tokenizer_model"), self.tiktoken_pattern)
            case "GPT2BPETokenizer":
                return GPT2BPETokenizer(need("vocab_file"), need("merge_file"))
            case "ByteTokenizer":
                return ByteTokenizer()
            case "NullTokenizer":
                if self.vocab_size is None or self.vocab_size < 1:
                    raise DataError("--tokenizer-type NullTokenizer needs --vocab-size")
                return NullTokenizer(self.vocab_size)
        raise DataError(f"--tokenizer-type {self.tokenizer_type}: one of {', '.join(TYPES)}")

    def fingerprint(self) -> dict[str, object]:
        """The settings with the files' content in place of their paths."""
        return {**asdict(self), **self.contents()}

    def contents(self) -> dict[str, str | None]:
        """What tells tokenizers apart: hashes of their files, wherever these lie, and a pattern."""
        values: dict[str, str | None] = {}
        if self.tokenizer_type == "TikTokenizer":
            values["tiktoken_pattern"] = self.tiktoken_pattern
        for name in ("tokenizer_model", "vocab_file", "merge_file"):
            path = Path(getattr(self, name) or "")
            file = path / "tokenizer.json" if path.is_dir() else path
            given = getattr(self, name) is not None
            values[name] = hashlib.sha256(file.read_bytes()).hexdigest() if given else None
        return values
