"""lm-evaluation-harness scores an exported model as our model scores itself."""

import json
from dataclasses import replace

import pytest
import torch

from megadiff.interop.hf.convert import export_checkpoint
from tests.interop.models import MODELS, decoder, save_checkpoint

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": f"{word} is a", "choices": [" fruit", " colour", " verb"], "answer": n % 3}
    for n, word in enumerate(["apple", "red", "to go", "pear", "blue", "to see", "plum"])
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def accuracy(model) -> float:
    """How often the right choice is the likeliest continuation, in bytes."""
    right = 0
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            prompt, ids = list(row["question"].encode()), list(choice.encode())
            whole = torch.tensor([prompt + ids])
            with torch.no_grad():
                logits = model(whole, torch.arange(whole.shape[1]).unsqueeze(0))[0, :, :259]
            log = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            scores.append(log.gather(1, torch.tensor(ids).unsqueeze(1)).sum().item())
        right += scores.index(max(scores)) == row["answer"]
    return right / len(QUESTIONS)


@pytest.mark.parametrize("name", ["diff_v1_no_weight", "diff_v2"])
def test_a_local_task(tmp_path, monkeypatch, name):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    model = decoder(replace(MODELS[name], vocab_size=259))
    save_checkpoint(tmp_path / "checkpoint", model)
    folder = export_checkpoint(
        tmp_path / "checkpoint",
        tmp_path / "hf",
        tokenizer={"tokenizer_type": "ByteTokenizer"},
    ).path
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(file=data))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},trust_remote_code=True,dtype=float32",
        tasks=["local_choice"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    assert results["results"]["local_choice"]["acc,none"] == pytest.approx(accuracy(model))
