"""A tiny dataset, tokenizer and configuration for runs that a launcher starts."""

import json
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TINY = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, token_mixer: diff_v2}
training: {seq_length: 64, micro_batch_size: 2, global_batch_size: 4, eval_iters: 0, device: cpu}
optimizer: {lr: 1.0e-3}
data: {split: "90,10,0", num_workers: 0}
logging: {log_interval: 1}
"""


def make_corpus(folder: Path) -> dict[str, str]:
    """Write corpus, tokenizer and configuration; the variables that the launch scripts read."""
    text = folder / "corpus.jsonl"
    with text.open("w") as file:
        for topic in pydoc_data.topics.topics.values():
            file.write(json.dumps({"text": topic}) + "\n")
    tokenizer = folder / "tokenizer"
    tool("train_tokenizer", "--input", text, "--output-prefix", tokenizer, "--vocab-size", 500)
    model = [
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        f"{tokenizer}.model",
    ]
    prefix = folder / "corpus"
    tool("preprocess_data", "--input", text, "--output-prefix", prefix, "--workers", 1, *model)
    config = folder / "tiny.yaml"
    config.write_text(TINY)
    return {
        "CONFIG": str(config),
        "DATA": f"{prefix}_text_document",
        "TOKENIZER": f"{tokenizer}.model",
    }


def tool(name: str, *arguments: object) -> None:
    command = [sys.executable, f"tools/{name}.py", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def last_losses(run: Path) -> dict[int, float]:
    """The loss that the log has last for each iteration; a restarted run writes some twice."""
    losses = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "iteration" in record and "lm_loss" in record:
            losses[record["iteration"]] = record["lm_loss"]
    return losses


def iterations_logged(log: Path) -> int:
    """The last iteration in a log of Megatron's lines; 0 while there is none."""
    if not log.exists():
        return 0
    found = re.findall(r"iteration\s+(\d+)/", log.read_text(errors="replace"))
    return int(found[-1]) if found else 0
