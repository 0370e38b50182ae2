"""preprocess_data.py as it is called: flags, report, exit codes, start-up."""

import errno
import gzip
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.preprocess_output import Parts
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]


def write_lines(path: Path, count: int, text: str = "some words ") -> Path:
    lines = [json.dumps({"text": f"{i} " + text * (i % 5)}) + "\n" for i in range(count)]
    path.write_text("".join(lines))
    return path


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", 100)
    with source.open("a") as file:
        file.write('{"text": " "}\nnot json\n{"text": 5}\n')
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
    assert main([*words, "--workers", "1"]) == 1
    err = capsys.readouterr().err
    assert f"error: {source}, line 102: not JSON: Expecting value" in err
    assert main([*words, "--workers", "1", "--on-error", "skip"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "documents 101 (1 empty, left out), skipped 2"
    assert out[1:3] == ["  1 x not JSON", "  1 x not text"]
    assert out[3].startswith("tokens ") and out[3].endswith("longest document 48 tokens")
    assert out[5] == f"wrote {tmp_path}/out_text_document (.bin, .idx)"
    assert main([*words, "--on-error", "skip"]) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_progress_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", 40_000, "some words " * 4)
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--log-interval", "10000", *BYTES]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    pattern = r"processed \d+ documents \(\d+ docs/s, [\d.]+ MB/s, \d+ tokens/s\)"
    pattern += r", [\d.]+ %, 0:\d\d:\d\d left"
    assert all(re.fullmatch(pattern, line) for line in lines)


def test_separator_of_plain_text_takes_escapes(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("one\n\n\ntwo – é\n\n\nthree")
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--document-separator", r"\n\n\n", *BYTES]) == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert bytes(dataset.document(1)[:-1].tolist()).decode() == "two – é"
    assert dataset.document_count == 3


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_standard_input(compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = compress(write_lines(tmp_path / "a.jsonl", 50).read_bytes())
    pipe = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", pipe)
    words = ["--input", "-", "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, *BYTES]) == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_count == 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 0", "--workers 0: at least 1"),
        ("--partitions 0", "--partitions 0: at least 1"),
        ("--tokenizer-type NullTokenizer --vocab-size 10 --bos", "--bos: this tokenizer has no"),
        ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model"),
        ("--json-keys text body text", "--json-keys text body text: each key once"),
        (r"--document-separator \x", r"--document-separator '\\x': truncated \xXX escape"),
        (r"--document-separator \ud800", "surrogates not allowed"),
        ("--input absent.jsonl", "absent.jsonl: no such file"),
    ],
)
def test_wrong_flags(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", 3)
    given = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
    assert main([*given, *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_a_full_disk_is_an_error_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", 40_000)
    words = ["--input", str(source), *BYTES, "--workers", "1", "--partitions", "9"]
    append = Parts.append

    def full(self: Parts, *what) -> None:
        if self.sizes()[0] > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, *what)

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "append", full)
        assert main([*words, "--output-prefix", str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert main([*words, "--output-prefix", str(tmp_path / "out")]) == 0
    assert "of an interrupted run" in capsys.readouterr().out
    assert main([*words, "--output-prefix", str(tmp_path / "once")]) == 0
    first, second = (tmp_path / f"{name}_text_document.bin" for name in ("out", "once"))
    assert first.read_bytes() == second.read_bytes()


def test_a_full_disk_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megadiff.data.inputs.BLOCK", 2000)
    source = write_lines(tmp_path / "a.jsonl", 2000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes beyond the limit just fail
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        words = ["--input", str(source), *BYTES, "--workers", "1"]
        assert main([*words, "--output-prefix", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['preprocess_data.py', '--help']\n"
        "import tools.preprocess_data as tool\n"
        "try: tool.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_killed_run_goes_on_and_leaves_no_worker(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", 15_000, "some words " * 20)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source)]
    command += [*BYTES, "--workers", "2", "--partitions", "40", "--output-prefix"]
    journal = tmp_path / "out.journal"
    killed = subprocess.Popen([*command, str(tmp_path / "out")], start_new_session=True)
    while not journal.exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert journal.exists()
    assert not (tmp_path / "out_text_document.idx").exists()
    for _ in range(100):  # the workers see that their parent is gone
        try:
            os.killpg(killed.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        os.killpg(killed.pid, signal.SIGKILL)
        pytest.fail("workers outlived the run")
    again = subprocess.run(
        [*command, str(tmp_path / "out")], check=True, capture_output=True, text=True
    )
    assert "of an interrupted run" in again.stdout
    once = ["--workers", "1", "--output-prefix", str(tmp_path / "once")]
    assert main(["--input", str(source), *BYTES, *once]) == 0
    for suffix in (".bin", ".idx"):
        first, second = (tmp_path / f"{name}_text_document{suffix}" for name in ("out", "once"))
        assert first.read_bytes() == second.read_bytes()
