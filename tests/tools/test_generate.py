"""tools/generate.py continues prompts from a checkpoint of any split."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import load
from megadiff.config import ConfigError, load_config
from megadiff.data.errors import DataError
from megadiff.interop.checkpoint import read_checkpoint
from megadiff.models.decoder import Decoder
from tests.distributed import run_distributed
from tests.training.small import EOD, VOCABULARY, flags, train, write_data
from tools import generate

PROMPTS = ["1 2 3 4", "7", "50 51 53 54 55 56 57"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of a run over two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("run")
    argv = flags(write_data(folder), "--save", str(folder / "saved"), "--eval-iters", "0")
    run_distributed(2, train, [*argv, "--tensor-model-parallel-size", "2"])
    return str(folder / "saved")


def arguments(saved: str, *more: str) -> list[str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return ["--load", saved, "--json", "--max-new-tokens", "5", "--device", "cpu", *prompts, *more]


def outputs(text: str) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in text.splitlines()]


def greedy(saved: str, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, from the whole sequence each time."""
    config = load_config(flags("unused")).model
    config.vocab_size = VOCABULARY
    model = Decoder(config)
    path = find_checkpoint(saved)
    assert path is not None
    load(path, module_tensors(model), ignore=["optimizer.", "rng."])
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0))
        tokens.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return tokens[len(prompt) :]


def test_one_process_continues_a_tensor_parallel_run(
    saved: str, capsys: pytest.CaptureFixture
) -> None:
    generate.main(arguments(saved, "--temperature", "0", "--ignore-eod"))
    found = outputs(capsys.readouterr().out)
    assert found == [greedy(saved, [int(w) for w in p.split()], 5) for p in PROMPTS]


def _generate(argv: list[str], out: str) -> None:
    from contextlib import redirect_stdout

    with Path(out).open("a") as file, redirect_stdout(file):
        generate.main(argv)


def test_two_processes_sample_what_one_samples(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = arguments(saved, "--seed", "3", "--top-k", "20", "--top-p", "0.9", "--dtype", "fp64")
    run_distributed(2, _generate, argv, str(tmp_path / "out"))
    generate.main(argv)
    alone = outputs(capsys.readouterr().out)
    assert outputs((tmp_path / "out").read_text()) == alone
    assert all(alone)


def test_prompts_come_from_a_file_too(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "prompts"
    file.write_text('1 2\n"3 4"\n')
    generate.main(["--load", saved, "--json", "--prompt-file", str(file), "--device", "cpu"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["1 2", "3 4"]
    assert all(line["text"].startswith(line["prompt"]) for line in lines)


def test_only_line_ends_part_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('"a\u2028b"\n\nc\x0bd\r\n"', encoding="utf-8", newline="")
    assert generate.read_prompts(str(file)) == ["a\u2028b", "c\x0bd", '"']


def test_the_tokenizer_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    prefix, here = write_data(tmp_path), tmp_path / "elsewhere"
    here.mkdir()
    vocabulary = {str(i): i for i in range(EOD)} | {"<eos>": EOD}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer.json"]
    size = ["--vocab-size", str(VOCABULARY), "--train-iters", "2", "--eval-iters", "0"]
    train(flags(prefix, *named, *size, "--save", "saved"))
    monkeypatch.chdir(here)
    argv = ["--load", "../saved", "--device", "cpu", "--prompt", "17", "--max-new-tokens", "3"]
    generate.main(argv)
    assert "\n17 " in capsys.readouterr().out
    config, _ = read_checkpoint("../saved")  # as for an export
    assert config.data.tokenizer_model == str(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"--tokenizer-model tokenizer\.json: no such file"):
        generate.main(argv)


def test_a_step_that_is_not_there_is_refused(saved: str) -> None:
    with pytest.raises(CheckpointError, match="iter_0000099: there is no such checkpoint"):
        generate.main(arguments(saved, "--ckpt-step", "99"))


def test_a_split_that_the_model_has_not_is_refused(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="is not a multiple of --tensor-model-parallel-size 3"):
        generate.main(arguments(saved))


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        generate.main(arguments(str(tmp_path)))


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    learned = ["--position-embedding-type", "learned_absolute", "--train-iters", "1"]
    train(flags(write_data(tmp_path), "--save", saved, "--lr-warmup-iters", "0", *learned))
    with pytest.raises(ConfigError, match="are 22 together, but the model has learned 16"):
        generate.main(arguments(saved, "--max-new-tokens", "15"))


def test_impossible_sampling_is_refused(saved: str) -> None:
    with pytest.raises(ConfigError, match="top_p"):
        generate.main(arguments(saved, "--top-p", "0"))
