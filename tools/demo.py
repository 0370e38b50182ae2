#!/usr/bin/env python3
"""From raw text to a trained, resumed and sampled DIFF Transformer on two CPU cores.

The text is on every machine with Python: the language reference that `help()` shows, and sources
and documentation strings of the standard library.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megadiff.config import Config, ConfigError, load_config
from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.parallel.mesh import Axis
from megadiff.training.data import build_data, set_vocabulary
from tools.plot_metrics import Metrics, draw, read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "demo.yaml"
SOURCE_BYTES = 1_000_000  # of modules that are taken whole; of the others come their docstrings
HELD_OUT = 16  # one document in so many is for validation
VOCABULARY = 1024


# ------------------------------------------------------------------------------------- text


def python_documents() -> Iterator[tuple[str, str]]:
    """(name, text): topics of the language reference, then a document for each library module."""
    for name, text in sorted(topics.items()):
        yield f"topic {name}", text
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "pydoc_data", "encodings", "lib2to3"}
    modules = [p for p in library.rglob("*.py") if not left_out & set(p.relative_to(library).parts)]
    sources = 0
    for path in sorted(modules, key=lambda p: hash_of(p.relative_to(library).as_posix())):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        name = path.relative_to(library).as_posix()
        if sources < SOURCE_BYTES and 2000 < len(source) < 60_000:
            sources += len(source)
            yield f"source {name}", source
        else:
            yield f"docstrings {name}", "\n\n".join(docstrings(tree))


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write_text(folder: Path) -> dict[str, int]:
    """Write train.jsonl and valid.jsonl; the number of documents and bytes of each.

    Whole documents are held out. A paragraph that has been seen before (topics quote each other) is
    dropped, so that nothing held out is in the training text.
    """
    seen: set[str] = set()
    counts = {"train": 0, "valid": 0, "train_bytes": 0, "valid_bytes": 0}
    files = {part: (folder / f"{part}.jsonl").open("w") for part in ("train", "valid")}
    for name, text in python_documents():
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if key not in seen:
                seen.add(key)
                kept.append(paragraph)
        document = "\n\n".join(kept).strip()
        if len(document) < 200:
            continue
        part = "valid" if hash_of(name) % HELD_OUT == 0 else "train"
        files[part].write(json.dumps({"text": document}) + "\n")
        counts[part] += 1
        counts[f"{part}_bytes"] += len(document.encode())
    for file in files.values():
        file.close()
    return counts


# ---------------------------------------------------------------- a model to compare with


def kneser_ney_loss(training: Path, pairs: tuple[np.ndarray, np.ndarray], vocabulary: int) -> float:
    """Loss in nats of an interpolated Kneser-Ney bigram model estimated on the dataset `training`.

    `pairs` are (tokens before, tokens scored). Chen and Goodman (1998), section 2.7, with the
    discount n1 / (n1 + 2 n2); the continuation counts are discounted likewise, over a uniform
    distribution.
    """
    dataset = IndexedDataset(str(training))
    stream = np.concatenate([dataset[i] for i in range(len(dataset))]).astype(np.int64)
    counts = np.zeros((vocabulary, vocabulary))
    np.add.at(counts, (stream[:-1], stream[1:]), 1)
    continuations = (counts > 0).sum(0)
    uniform = np.full(vocabulary, 1 / vocabulary)
    unigram = discounted(continuations[None].astype(float), uniform)[0]
    model = discounted(counts, unigram)
    return float(-np.log(model[pairs]).mean())


def discounted(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Absolute discounting of the rows of `counts`, what it frees spread as `lower` says."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once else 0.5
    total = counts.sum(1, keepdims=True)
    freed = discount * (counts > 0).sum(1, keepdims=True)
    higher = np.maximum(counts - discount, 0)
    return np.where(total > 0, (higher + freed * lower) / np.maximum(total, 1), lower)


def held_out_pairs(flags: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Every (token, next token) that the validation loss of a run with `flags` is a mean over."""
    config = load_config(flags)
    data = build_data(config, Axis(), set_vocabulary(config))
    assert config.training.global_batch_size is not None
    valid, samples = data.valid["validation"]
    steps = valid.once(samples, config.training.global_batch_size)
    batches = [batch for step in steps for batch in step]
    for batches_of in (data.train, valid):
        batches_of.close()
    before, scored = (
        np.concatenate([getattr(b, name)[b.loss_mask > 0].numpy() for b in batches])
        for name in ("tokens", "labels")
    )
    return before, scored


# ------------------------------------------------------------------------------------ steps


def command(*words: object, hide: str = "(?!)") -> str:
    """Run a Python program of this repository; exit when it fails.

    Shows it and its output, but for lines that match `hide`.
    """
    line = [str(word) for word in words]
    print(f"\n$ {shlex.join(['python', *line]).replace(f'{ROOT}/', '')}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *line], cwd=ROOT, env=environment, text=True, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    output = []
    for text in process.stdout:
        output.append(text)
        if not re.match(hide, text):
            print(text, end="", flush=True)
    if process.wait() != 0:
        raise SystemExit(f"error: the command above failed:\n{''.join(output[-30:])}")
    return "".join(output)


def pretrain(*words: object) -> None:
    """Two processes that train together."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    program = [*launcher, ROOT / "pretrain_diff.py", "--config", CONFIG, *words]
    command(*program, hide=r"(\w+:|  \S.*)\n")  # the configuration is in config.yaml


def run_demo(out: Path, flags: list[str]) -> None:
    config = load_config(["--config", str(CONFIG), *flags])
    iterations = config.training.train_iters
    assert iterations is not None
    started = time.monotonic()
    for part in ("text", "checkpoints", "tensorboard", "metrics.jsonl", "log.txt"):
        path = out / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    text = out / "text"
    text.mkdir(parents=True)

    title(1, "Text: Python's language reference, library sources and documentation strings")
    counts = write_text(text)
    print(
        f"{counts['train']} documents ({counts['train_bytes'] / 1e6:.1f} MB) to train on, "
        f"{counts['valid']} ({counts['valid_bytes'] / 1e6:.2f} MB) held out"
    )

    title(2, "A SentencePiece tokenizer, and the text as .bin/.idx datasets")
    tokenizer = text / "tokenizer.model"
    command(
        ROOT / "tools/train_tokenizer.py", "--input", text / "train.jsonl", "--output-prefix",
        text / "tokenizer", "--vocab-size", VOCABULARY, "--model-type", "bpe",
    )  # fmt: skip
    for part in ("train", "valid"):
        command(
            ROOT / "tools/preprocess_data.py", "--input", text / f"{part}.jsonl",
            "--output-prefix", text / part, "--tokenizer-type", "SentencePieceTokenizer",
            "--tokenizer-model", tokenizer, "--append-eod", "--workers", 2,
        )  # fmt: skip
    training, held_out = text / "train_text_document", text / "valid_text_document"

    title(3, "Pretrain on two processes that share every layer, and stop half way")
    common = [
        "--train-data-path", training, "--valid-data-path", held_out, "--tokenizer-model",
        tokenizer, "--save", out / "checkpoints", "--log-dir", out, "--tensorboard-dir",
        out / "tensorboard", *flags,
    ]  # fmt: skip
    pretrain(*common, "--tensor-model-parallel-size", 2, "--exit-interval", iterations // 2)

    title(4, "Resume with whole layers on each process and half of the data")
    pretrain(*common, "--tensor-model-parallel-size", 1, "--load", out / "checkpoints")

    title(5, "Sample")
    sampled = command(
        ROOT / "tools/generate.py", "--load", out / "checkpoints", "--max-new-tokens", 60,
        "--temperature", 0.7, "--top-p", 0.95, "--prompt", "The following", "--prompt",
        "def __init__(self", "--prompt", "Return the",
    )  # fmt: skip
    (out / "samples.txt").write_text(sampled, encoding="utf-8")

    title(6, "Result")
    metrics = read_metrics(out / "metrics.jsonl")
    bigram = kneser_ney_loss(
        training, held_out_pairs(["--config", str(CONFIG), *map(str, common)]), VOCABULARY
    )
    draw(
        metrics,
        out / "demo.png",
        f"A small Transformer ({config.model.token_mixer}) on Python's documentation",
        marks=[(iterations // 2, "resumed on another split")],
        references=[(bigram, "Kneser-Ney bigram")],
    )
    report(out, metrics, config, bigram, time.monotonic() - started)
    if metrics["validation"][-1]["lm_loss"] >= bigram:
        raise SystemExit("error: the model is no better than the bigram model")


def title(number: int, text: str) -> None:
    print(f"\n=== {number}. {text}", flush=True)


def report(out: Path, metrics: Metrics, config: Config, bigram: float, seconds: float) -> None:
    """What was done, what was found and what to try next."""
    train, final = metrics["train"], metrics["validation"][-1]
    half = (config.training.train_iters or 0) // 2
    before = [e for e in train if e["iteration"] <= half][-1]
    after = next(e for e in train if e["iteration"] > half)
    first, last = train[0], train[-1]
    lambdas = ", ".join(
        f"{first['lambda'][k]:.2f} to {last['lambda'][k]:.2f}" for k in last["lambda"]
    )
    loss, perplexity = final["lm_loss"], final["perplexity"]
    mixer = config.model.token_mixer
    samples, length = last["consumed_samples"], config.training.seq_length
    print(f"""
What it did
  In {seconds:.0f} s, from raw text, it trained a Transformer ({mixer}) on {samples:,}
  samples of {length} tokens: {half} steps with every layer split over two processes, the rest,
  from the checkpoint, with whole layers and each process on half of the data.

What it found
  {loss:.4f}  validation loss on {final["tokens"]:,} held-out tokens (perplexity {perplexity:.1f})
  {bigram:.4f}  an interpolated Kneser-Ney bigram model on the same tokens ({math.exp(bigram):.1f})
  {before["lm_loss"]:.4f}  training loss before the change of split
  {after["lm_loss"]:.4f}  training loss after it
  lambda by layer, first steps to last: {lambdas or "none"}

What to look at, in {out}
  demo.png, log.txt, metrics.jsonl, samples.txt; tensorboard --logdir {out / "tensorboard"}

What to try next
  make demo DEMO="--token-mixer diff_v1"     the first DIFF Transformer
  make demo DEMO="--token-mixer standard"    the baseline
  README.md says how to train on text and machines of your own""")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further flags are those of pretrain_diff.py.", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo")
    arguments, flags = parser.parse_known_args(words)
    try:
        run_demo(arguments.output.absolute(), flags)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
