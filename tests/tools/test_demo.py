"""The parts of the demo that are its own: text, and the model that it compares with."""

import json
import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.indexed_dataset import IndexedDatasetBuilder
from tests.training.small import EOD, VOCABULARY, flags, read, train, write_data
from tools import demo

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_holds_the_language_reference_sources_and_docstrings() -> None:
    kinds = Counter(name.split()[0] for name, _ in demo.python_documents())
    assert kinds["topic"] > 50 and kinds["source"] > 20 and kinds["docstrings"] > 100


def test_nothing_held_out_is_in_the_training_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paragraphs = [f"Paragraph {i}: " + "words " * 40 for i in range(100)]
    documents = [
        (f"name {i}", "\n\n".join([paragraphs[i], paragraphs[i // 2]])) for i in range(100)
    ]
    monkeypatch.setattr(demo, "python_documents", lambda: iter(documents))
    counts = demo.write_text(tmp_path)
    texts = {}
    for part in ("train", "valid"):
        lines = (tmp_path / f"{part}.jsonl").read_text().splitlines()
        texts[part] = [json.loads(line)["text"] for line in lines]
        assert len(lines) == counts[part] > 0
    pieces = {part: {p.strip() for t in ts for p in t.split("\n\n")} for part, ts in texts.items()}
    assert not pieces["train"] & pieces["valid"]
    assert len(pieces["train"] | pieces["valid"]) == 100


def brute_force(stream: list[int], pairs: list[tuple[int, int]], vocabulary: int) -> float:
    """Interpolated Kneser-Ney by its definition, a word at a time."""
    bigrams = Counter(pairwise(stream))
    followed = Counter(w for _, w in bigrams)

    def discount(counts: Counter) -> float:
        once, twice = (sum(c == n for c in counts.values()) for n in (1, 2))
        return once / (once + 2 * twice)

    d2, d1 = discount(bigrams), discount(followed)

    def unigram(word: int) -> float:
        higher = max(followed[word] - d1, 0) / len(bigrams)
        return higher + d1 * len(followed) / len(bigrams) / vocabulary

    def bigram(before: int, word: int) -> float:
        total = sum(c for (v, _), c in bigrams.items() if v == before)
        if total == 0:
            return unigram(word)
        kinds = sum(v == before for v, _ in bigrams)
        higher = max(bigrams[before, word] - d2, 0) / total
        return higher + d2 * kinds / total * unigram(word)

    assert sum(bigram(stream[0], w) for w in range(vocabulary)) == pytest.approx(1)
    return -sum(math.log(bigram(*pair)) for pair in pairs) / len(pairs)


def test_the_bigram_model_is_kneser_neys(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [np.minimum(rng.zipf(1.4, 30), 70).tolist() for _ in range(20)]
    with IndexedDatasetBuilder(str(tmp_path / "data"), np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
    before, after = rng.integers(0, 80, 50), rng.integers(0, 80, 50)
    loss = demo.kneser_ney_loss(tmp_path / "data", (before, after), 80)
    stream = [token for document in documents for token in document]
    pairs = list(zip(before.tolist(), after.tolist(), strict=True))
    assert loss == pytest.approx(brute_force(stream, pairs, 80), rel=1e-12)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_both_models_are_scored_on_the_same_tokens(packing: str, tmp_path: Path) -> None:
    prefix = write_data(tmp_path)
    argv = flags(prefix, "--train-iters", "2", "--packing", packing)
    i = argv.index("--data-path")
    argv[i : i + 4] = ["--train-data-path", prefix, "--valid-data-path", prefix]
    train([*argv, "--log-dir", str(tmp_path)])
    scored = next(e["tokens"] for e in read(tmp_path) if e["kind"] == "validation")
    pairs = demo.held_out_pairs(argv)
    assert len(pairs[0]) == len(pairs[1]) == scored
    assert max(pairs[1]) == EOD < VOCABULARY
    assert EOD not in pairs[0]  # --eod-mask-loss


@pytest.mark.slow
def test_a_mistyped_flag_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("an earlier demo")
    with pytest.raises(SystemExit, match="error: unknown flag --token-mixr"):
        demo.main(["--output", str(tmp_path), "--token-mixr", "diff_v1"])
    assert (tmp_path / "log.txt").exists()


def test_the_whole_demo(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools/demo.py"), "--output", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("demo.png", "log.txt", "metrics.jsonl", "samples.txt", "config.yaml"):
        assert (tmp_path / name).stat().st_size > 0
    assert list((tmp_path / "tensorboard").iterdir())
    assert "What it found" in run.stdout
