"""The README names flags, files and modules that exist."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megadiff.config import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The indented command lines, continuation lines joined."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", README, re.MULTILINE)
    return [line.strip() for b in blocks for line in b.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("line", [c for c in commands() if "pretrain_diff.py" in c])
def test_training_commands_are_understood(line: str) -> None:
    config = load_config(line.split("pretrain_diff.py")[1].split())
    assert config.data.data_path == ["data/corpus_text_document"]


def test_options_in_the_table_are_understood() -> None:
    flags = re.findall(r"`(--[a-z].*?)`", README)
    for words in flags:
        name = words.split()[0]
        if name == "--help":
            continue
        try:
            load_config([name, "1"])
        except ConfigError as error:
            assert "unknown flag" not in str(error), words


@pytest.mark.parametrize("line", [c for c in commands() if "python tools/" in c])
def test_tools_have_the_flags(line: str) -> None:
    script = re.search(r"tools/\w+\.py", line)
    assert script is not None
    words = [sys.executable, str(ROOT / script[0])]
    subcommand = re.match(r" ([a-z][a-z-]*) ", line[line.index(script[0]) + len(script[0]) :])
    words += [subcommand[1]] if subcommand else []
    text = subprocess.run([*words, "--help"], capture_output=True, text=True, check=True).stdout
    for flag in re.findall(r" (--[a-z-]+)", line):
        assert flag in text, (line, flag)


def test_links_and_modules_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`(megadiff\.[\w.]+)`", README):
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute), name
