"""What is in an indexed dataset: statistics, damage, the difference between two."""

from collections.abc import Iterator

import numpy as np

from megadiff.data.indexed_dataset import IndexedDataset

_CHUNK = 1 << 22  # sequences or tokens looked at in one step


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document, int64 `[documents]`."""
    before = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
    return np.diff(before[dataset.documents])


def statistics(dataset: IndexedDataset) -> dict[str, int | float | str]:
    """Counts of a dataset by name; lengths are of documents, in tokens."""
    lengths = document_lengths(dataset)
    filled = lengths if len(lengths) else np.zeros(1, dtype=np.int64)
    return {
        "documents": len(lengths),
        "empty_documents": int((lengths == 0).sum()),
        "sequences": len(dataset),
        "tokens": int(lengths.sum()),
        "dtype": dataset.dtype.name,
        "shortest": int(filled.min()),
        "median": float(np.median(filled)),
        "mean": float(filled.mean()),
        "percentile_99": float(np.percentile(filled, 99)),
        "longest": int(filled.max()),
    }


def problems(
    dataset: IndexedDataset, vocab_size: int | None = None, eod: int | None = None
) -> Iterator[str]:
    """What is wrong with the dataset, in words; nothing when it is whole.

    With `vocab_size` every token is looked at; with `eod` every document must end with it.
    """
    position = 0
    for begin in range(0, len(dataset), _CHUNK):
        lengths = dataset.lengths[begin : begin + _CHUNK].astype(np.int64)
        ends = position + np.cumsum(lengths * dataset.dtype.itemsize)
        starts = ends - lengths * dataset.dtype.itemsize
        wrong = starts != dataset.pointers[begin : begin + _CHUNK]
        if wrong.any():
            at = int(np.argmax(wrong))
            pointer = int(dataset.pointers[begin + at])
            yield (
                f"sequence {begin + at} begins at byte {pointer}, but those before it end at "
                f"{int(starts[at])}"
            )
            return
        position = int(ends[-1])
    steps = np.diff(dataset.documents)
    if int(dataset.documents[0]) != 0 or (steps < 0).any():
        yield "the documents are not in order"
        return
    if vocab_size is not None:
        yield from _foreign_tokens(dataset, vocab_size)
    if eod is not None:
        yield from _unended(dataset, eod)


def _foreign_tokens(dataset: IndexedDataset, vocab_size: int) -> Iterator[str]:
    for begin, tokens in dataset.token_chunks(_CHUNK):
        foreign = (tokens < 0) | (tokens >= vocab_size)
        if foreign.any():
            at = int(np.argmax(foreign))
            yield f"token {begin + at} is {int(tokens[at])}, outside of {vocab_size} entries"
            return


def _unended(dataset: IndexedDataset, eod: int) -> Iterator[str]:
    count, first = 0, 0
    for document in range(dataset.document_count):
        last = int(dataset.documents[document + 1]) - 1
        if last < int(dataset.documents[document]):
            continue
        if int(dataset.get(last, int(dataset.lengths[last]) - 1, 1)[0]) != eod:
            first = first if count else document
            count += 1
    if count:
        yield f"{count} documents do not end with token {eod}, the first is {first}"


def difference(a: IndexedDataset, b: IndexedDataset) -> str | None:
    """The first difference between two datasets in words; None when they hold the same."""
    for what in ("dtype", "document_count"):
        left, right = getattr(a, what), getattr(b, what)
        if left != right:
            return f"{what}: {left} and {right}"
    if len(a) != len(b):
        return f"sequences: {len(a)} and {len(b)}"
    for name in ("documents", "lengths", "pointers"):
        left, right = getattr(a, name), getattr(b, name)
        if not np.array_equal(left, right):
            at = int(np.argmax(left != right))
            return f"{name}: entry {at} is {int(left[at])} and {int(right[at])}"
    for (begin, left), (_, right) in zip(
        a.token_chunks(_CHUNK), b.token_chunks(_CHUNK), strict=True
    ):
        if not np.array_equal(left, right):
            at = int(np.argmax(left != right))
            return f"token {begin + at} of all is {int(left[at])} and {int(right[at])}"
    return None
