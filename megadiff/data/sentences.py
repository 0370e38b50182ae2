"""A small splitter of text into sentences, for `--split-sentences`."""

import re

# A terminator with what closes after it, then blank space; or a full stop of East Asian scripts.
_END = re.compile(r"[.!?…]+[\"'”’)\]»]*\s+|[。！？]+[」』”’）]*\s*|\n\s*\n\s*")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[A-Z]|[A-Za-z](?:\.[A-Za-z])+|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|cf|al|No|"
    r"Fig|Eq|Vol|pp|Inc|Ltd|Co|Corp|Gen|Col|Capt|Lt|Rev|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Oct|Nov|Dec)"
    r"\.\s+$"
)


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, each with the blank space after it, so that they join back to `text`."""
    sentences = []
    begin = 0
    for match in _END.finditer(text):
        end = match.end()
        if end == len(text):
            break
        mark = text[match.start()]
        if mark in ".!?…" and text[end].islower():
            continue
        if mark == "." and _ABBREVIATION.search(text[max(begin, end - 24) : end]):
            continue
        sentences.append(text[begin:end])
        begin = end
    if begin < len(text):
        sentences.append(text[begin:])
    return sentences
