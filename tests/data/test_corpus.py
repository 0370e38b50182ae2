"""A whole corpus of real text through real tokenizers and back, document by document.

`MEGADIFF_CORPUS` names a folder of JSON lines (`*.jsonl`, key "text") with `tokenizer.model` and
`tokenizer.json` beside them; docs/performance.md says which ones were read.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.inputs import list_inputs
from megadiff.data.preprocess import PreprocessSettings, TokenizerSettings, preprocess

CORPUS = os.environ.get("MEGADIFF_CORPUS")
TOKENIZERS = {
    "SentencePieceTokenizer": "tokenizer.model",
    "HuggingFaceTokenizer": "tokenizer.json",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]


def texts(files: list[str]) -> Iterator[str]:
    for path in files:
        with Path(path).open(encoding="utf-8") as file:
            for line in file:
                text = json.loads(line)["text"]
                if text.strip():
                    yield text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_document_comes_back(kind: str, tmp_path: Path) -> None:
    if not CORPUS:
        pytest.skip("MEGADIFF_CORPUS names no folder with a corpus and tokenizers")
    model = Path(CORPUS) / TOKENIZERS[kind]
    if not model.exists():
        pytest.skip(f"there is no {model}")
    inputs = list_inputs([f"{CORPUS}/*.jsonl"])
    tokenizer = TokenizerSettings(kind, tokenizer_model=str(model))
    settings = PreprocessSettings(
        inputs, str(tmp_path / "all"), tokenizer, append_eod=True, workers=2
    )
    totals = preprocess(settings)
    dataset, loaded = IndexedDataset(settings.outputs()[0]), tokenizer.build()
    assert dataset.document_count == totals.documents - totals.empty
    number = -1
    for number, text in enumerate(texts(inputs)):
        ids = dataset.document(number).tolist()
        assert ids[-1] == loaded.eod
        assert loaded.decode(ids[:-1]) == text, f"document {number}"
    assert number + 1 == dataset.document_count
    print(
        f"\n{kind}: {number + 1} documents, {totals.text_bytes} bytes, {totals.tokens} tokens, "
        f"{totals.text_bytes / totals.tokens:.3f} bytes per token, all read back"
    )
