"""Very long texts in pieces, so that the memory of a tokenizer does not grow with its text.

Tokenizers hold 30 to 200 bytes for each byte of a text. A cut is made between two words, where the
tokenizer shows on the text around it that no token lies across. The ids are those of the whole
text. Only where a unigram model of SentencePiece finds segmentations that are equally good, the
choice can be another: it adds scores up in float32, and the rounding grows with the text.
"""

import re
from collections.abc import Sequence
from itertools import islice

import numpy as np

from megadiff.data.tokenizers import Tokenizer

PIECE = 1 << 18  # characters
_AFTER = 256  # characters after a cut that are looked at
_BEFORE = (256, 255)  # and before it: runs of a fixed length may end at the cut in one, not in both
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
        end, last = match.start(), match.end() + _AFTER
        for following in match.span():
            right = tokenizer.encode(text[following:last])
            if all(
                tokenizer.encode(text[end - before : end]) + right
                == tokenizer.encode(text[end - before : last])
                for before in _BEFORE
            ):
                return end, following
    return None
