"""merge_datasets, split_dataset, inspect_data and prepare_cache, as they are called."""

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megadiff.data.preprocess_output import exclusive
from megadiff.data.tokenizers import ByteTokenizer
from tools import inspect_data, merge_datasets, prepare_cache, split_dataset

TEXTS = [f"Document {number} " + "x" * (number * 7 % 50) for number in range(40)]


def write(prefix: Path, texts: list[str]) -> str:
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for text in texts:
            builder.add_document([*text.encode(), ByteTokenizer.eod])
    return str(prefix)


def contents(prefix: str) -> tuple[bytes, bytes]:
    return Path(prefix + ".bin").read_bytes(), Path(prefix + ".idx").read_bytes()


@pytest.mark.parametrize("words", [["--split", "8,1,1"], ["--shards", "5"], ["--shards", "40"]])
def test_what_was_split_merges_back(words: list[str], tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", TEXTS)
    (tmp_path / "parts").mkdir()
    parts = str(tmp_path / "parts" / "part")
    assert split_dataset.main(["--input", whole, "--output-prefix", parts, *words]) == 0
    merged = str(tmp_path / "merged")
    inputs = [str(tmp_path / "parts")]
    if words[0] == "--split":
        inputs = [f"{parts}_{name}" for name in ("train", "valid", "test")]
        assert IndexedDataset(inputs[0]).document_count == 32
    assert merge_datasets.main(["--input", *inputs, "--output-prefix", merged]) == 0
    assert contents(merged) == contents(whole)


def test_shards_hold_about_as_many_tokens(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", TEXTS)
    assert split_dataset.main(f"--input {whole} --output-prefix {whole} --shards 4".split()) == 0
    sizes = [int(IndexedDataset(f"{whole}_{i}").lengths.sum()) for i in range(4)]
    mean = sum(sizes) / 4
    assert all(abs(size - mean) <= 70 for size in sizes)  # the longest document


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (merge_datasets.main, "--input {a} {int32} --output-prefix {out}", "int32 tokens"),
        (merge_datasets.main, "--input {a} {a} --output-prefix {out}", "more than once"),
        (merge_datasets.main, "--input {a} {b} --output-prefix {a}", "is one of the inputs"),
        (merge_datasets.main, "--input {a} --output-prefix {b}", "--overwrite"),
        (merge_datasets.main, "--input {absent} --output-prefix {out}", "no such dataset"),
        (split_dataset.main, "--input {a} --output-prefix {out} --shards 99", "has 40 documents"),
        (split_dataset.main, "--input {a} --output-prefix {out} --split 1,x", "--split 1,x"),
        (inspect_data.main, "show {a} --documents 40", "there are 40 documents"),
        (inspect_data.main, "show {a} --documents 7-3", "the first comes before the last"),
        (inspect_data.main, "stats {a} --histogram {out}/x.png", "No such file"),
        (inspect_data.main, "step --step 0 {run}", "--step 0: the run has the steps 1 to 10"),
        (inspect_data.main, "step --step 11 {run}", "--step 11: the run has the steps 1 to 10"),
        (inspect_data.main, "show {a} --documents x", "a number, or first-last"),
        (inspect_data.main, "stats {a} --nonsense", "unknown words: --nonsense"),
        (prepare_cache.main, "--data-path {a}", "--global-batch-size and --train-iters"),
        (
            prepare_cache.main,
            "--data-path {a} --global-batch-size 4 --train-iters 2 --tokenizer-type ByteTokenizer",
            "--data-cache-path",
        ),
    ],
)
def test_errors(
    main, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(tmp_path / name) for name in ("a", "b", "int32", "out", "absent")}
    names["run"] = " ".join(run_flags(names["a"], tmp_path))
    write(tmp_path / "a", TEXTS)
    write(tmp_path / "b", TEXTS[:3])
    with IndexedDatasetBuilder(names["int32"], np.int32) as builder:
        builder.add_document([1])
    assert main(words.format(**names).split()) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_two_runs_on_one_prefix_refuse_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "whole", TEXTS)
    merge = ["--input", whole, "--output-prefix", str(tmp_path / "out")]
    split = [*merge, "--shards", "2"]
    for main, words, prefix in (
        (merge_datasets.main, merge, "out"),
        (split_dataset.main, split, "out_1"),
    ):
        with exclusive(str(tmp_path / prefix)):
            assert main([*words, "--overwrite"]) == 1
        assert "another run is writing" in capsys.readouterr().err
        assert main([*words, "--overwrite"]) == 0


def test_a_split_does_not_replace_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "all_train", TEXTS)
    before = contents(whole)
    words = ["--input", whole, "--output-prefix", str(tmp_path / "all"), "--split", "8,1,1"]
    assert split_dataset.main([*words, "--overwrite"]) == 1
    assert "is one of the outputs" in capsys.readouterr().err
    assert contents(whole) == before


def test_a_reader_that_leaves_is_not_success(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", TEXTS * 500)
    command = [sys.executable, str(Path(inspect_data.__file__)), "show", whole]
    words = ["--documents", "0-19999"]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as tool:
        assert tool.stdout is not None and tool.stderr is not None
        assert tool.stdout.readline().startswith(b"--- document 0")
        tool.stdout.close()
        assert tool.stderr.read() == b""
    assert tool.returncode == 128 + signal.SIGPIPE


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", TEXTS)
    words = ["show", prefix, "--documents", "3", "38-99", "--tokenizer-type", "ByteTokenizer"]
    assert inspect_data.main(words) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Doc")] == [
        TEXTS[3],
        TEXTS[38],
        TEXTS[39],
    ]


def test_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", TEXTS)
    picture = tmp_path / "lengths.png"
    assert inspect_data.main(["stats", prefix, "--histogram", str(picture)]) == 0
    out = capsys.readouterr().out
    lengths = [len(text) + 1 for text in TEXTS]
    for line in ("documents 40", f"tokens {sum(lengths)}", f"longest {max(lengths)}"):
        assert f"  {line}\n" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_check_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", TEXTS)
    byte_level = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]
    assert inspect_data.main(["check", prefix, *byte_level]) == 0
    tokens, index = Path(prefix + ".bin"), Path(prefix + ".idx")
    whole = tokens.read_bytes(), index.read_bytes()

    def damaged(path: Path, offset: int, value: bytes) -> str:
        data = bytearray(path.read_bytes())
        data[offset : offset + len(value)] = value
        path.write_bytes(data)
        assert inspect_data.main(["check", prefix, *byte_level]) == 1
        tokens.write_bytes(whole[0])
        index.write_bytes(whole[1])
        return capsys.readouterr().out

    end = 2 * (len(TEXTS[0]) + 1)
    assert "token 5 is 300, outside of 259" in damaged(tokens, 10, b"\x2c\x01")
    assert "1 documents do not end with token 256, the first is 0" in damaged(
        tokens, end - 2, b"a\0"
    )
    assert "sequence 1 begins at byte 7" in damaged(index, 34 + 40 * 4 + 8, b"\x07")
    assert "the documents are not in order" in damaged(index, 34 + 40 * 12 + 8, b"\x09")
    tokens.write_bytes(whole[0] + b"ab")
    assert inspect_data.main(["check", prefix]) == 1
    assert "the index is of another .bin" in capsys.readouterr().out
    tokens.write_bytes(whole[0][:-2])
    assert inspect_data.main(["check", prefix]) == 1
    assert "it was cut off" in capsys.readouterr().out


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", TEXTS), write(tmp_path / "b", TEXTS)
    c = write(tmp_path / "c", [*TEXTS[:-1], TEXTS[-1].replace("D", "d")])
    assert inspect_data.main(["compare", a + ".idx", b + ".bin"]) == 0
    assert inspect_data.main(["compare", a, c]) == 1
    assert inspect_data.main(["compare", a, write(tmp_path / "d", TEXTS[:-1])]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = sum(len(text) + 1 for text in TEXTS[:-1])
    assert lines == ["the same", f"token {at} of all is 68 and 100", "document_count: 40 and 39"]


def run_flags(prefix: str, folder: Path) -> list[str]:
    flags = f"--data-path {prefix} --split 9,1,0 --seq-length 16 --seed 5 --train-iters 10"
    flags += " --global-batch-size 4 --eval-iters 1 --tokenizer-type ByteTokenizer"
    return [*flags.split(), "--data-cache-path", str(folder)]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_step_is_what_training_reads(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megadiff.config import load_config
    from megadiff.parallel.mesh import Axis
    from megadiff.training.data import build_data, set_vocabulary

    flags = run_flags(write(tmp_path / "a", TEXTS), tmp_path / "cache")
    flags += ["--packing", packing]
    assert inspect_data.main(["step", "--step", "3", "--characters", "0", *flags]) == 0
    samples: list[str] = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("sample "):
            samples.append("")
        else:
            samples[-1] += ast.literal_eval(line.split(": ", 1)[1])
    config = load_config(flags)
    batches = build_data(config, Axis(), set_vocabulary(config)).train.step(8, 4)
    assert len(samples) == len(batches) == 4
    for text, batch in zip(samples, batches, strict=True):
        assert text.startswith(ByteTokenizer().decode(batch.tokens[0].tolist()).rstrip("\0"))


def test_steps_of_samples_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = run_flags(write(tmp_path / "a", TEXTS), tmp_path / "cache")
    at = flags.index("--train-iters")
    flags[at : at + 2] = ["--train-samples", "22", "--rampup-batch-size", "2", "2", "8"]
    # 4 steps of 2, 3 of 4; the last two samples would not fill a step
    assert inspect_data.main(["step", "--step", "7", *flags]) == 0
    assert capsys.readouterr().out.startswith("sample 16: ")
    assert inspect_data.main(["step", "--step", "8", *flags]) == 1
    assert "the run has the steps 1 to 7" in capsys.readouterr().err


def test_prepared_cache_is_what_a_run_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = run_flags(write(tmp_path / "a", TEXTS), tmp_path / "cache")
    assert prepare_cache.main(flags) == 0
    assert "train: 8" in capsys.readouterr().out
    before = sorted((tmp_path / "cache").iterdir())
    assert len(before) == 2  # train and valid
    assert inspect_data.main(["step", "--step", "1", *flags]) == 0
    assert sorted((tmp_path / "cache").iterdir()) == before


def test_data_paths_may_stand_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", TEXTS), write(tmp_path / "b", TEXTS[:20])
    words, lists = tmp_path / "words", tmp_path / "lists.json"
    words.write_text(f"0.5 {a} 0.5 {b}")
    lists.write_text(json.dumps({"train": [a], "valid": [b]}))
    flags = run_flags("PATH", tmp_path / "cache")
    at = flags.index("--data-path")
    del flags[at : at + 2]
    assert prepare_cache.main([*flags, "--data-args-path", str(words)]) == 0
    blended = capsys.readouterr().out.splitlines()
    assert blended[0] == "train: 40 samples"
    assert prepare_cache.main([*flags, "--per-split-data-args-path", str(lists)]) == 0
    apart = capsys.readouterr().out.splitlines()
    assert apart[1].startswith("valid: ") and apart[2] == "test: none"
    words_twice = ["--data-args-path", str(words), "--data-path", a]
    assert prepare_cache.main([*flags, *words_twice]) == 1
    assert "not both" in capsys.readouterr().err
