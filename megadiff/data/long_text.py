"""Very long texts in pieces, so that the memory of a tokenizer does not grow with its text.

Tokenizers hold 30 to 200 bytes for each byte of a text. A cut is made between two words, where the
tokenizer shows on the text around it that no token lies across. The ids are those of the whole
text. Only where a unigram model finds segmentations that are equally good, the choice can be
another: SentencePiece adds scores up in float32, and the rounding grows with the text.
"""

import re
from collections.abc import Sequence
from itertools import islice

import numpy as np

from megadiff.data.tokenizers import Tokenizer

PIECE = 1 << 18  # characters
_AROUND = 256  # characters on both sides of a cut that are looked at
_PHASES = 16  # repetitions that a token may hold in text that repeats itself
_ATTEMPTS = 32  # places that are tried before a text is taken as one that cannot be cut
_BETWEEN = re.compile(r"(?<=\w)\s(?=\w)")

Ids = Sequence[int] | np.ndarray


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> Sequence[Ids]:
    """`tokenizer.encode_batch(texts)`, long texts in pieces."""
    if all(len(text) <= 2 * PIECE for text in texts):
        return tokenizer.encode_batch(texts)
    return [_encode(tokenizer, text) for text in texts]


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    parts = []
    begin = 0
    while len(text) - begin > 2 * PIECE:
        cut = _cut(tokenizer, text, begin + PIECE)
        if cut is None:
            break
        end, following = cut
        parts.append(np.asarray(*tokenizer.encode_batch([text[begin:end]]), dtype=np.int32))
        begin = following
    rest = np.asarray(*tokenizer.encode_batch([text[begin:]]), dtype=np.int32)
    return np.concatenate([*parts, rest])


def _cut(tokenizer: Tokenizer, text: str, near: int) -> tuple[int, int] | None:
    """Where a piece may end and the next one begin: before the space between two words, or after
    it where the tokenizer puts a space before every text."""
    for match in islice(_BETWEEN.finditer(text, near), _ATTEMPTS):
        end, last = match.start(), match.end() + _AROUND
        begins = _begins(text, end)
        for following in match.span():
            right = tokenizer.encode(text[following:last])
            if all(
                tokenizer.encode(text[begin:end]) + right == tokenizer.encode(text[begin:last])
                for begin in begins
            ):
                return end, following
    return None


def _begins(text: str, end: int) -> list[int]:
    """Where to begin looking at the text before a cut at `end`.

    Runs of a fixed length may end at the cut from one place, not from two. Where the text repeats
    itself, tokens of several repetitions may end at the cut counted from one of them, not from all.
    """
    first = end - _AROUND
    period = text[first:end].find(text[first : end - _AROUND // 2], 1)
    repetitions = range(first, end, period)[:_PHASES] if period > 0 else [first]
    return [*repetitions, first + 1]
