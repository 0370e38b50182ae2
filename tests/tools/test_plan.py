"""The table of splits in configs/README.md is what the tool computes.

`PYTHONPATH=. python tests/tools/test_plan.py` writes it anew.
"""

from pathlib import Path

import pytest

from megadiff.config import Config, load_config
from tools.plan import FREE, main, peak, plan, splits

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = ["125M", "830M", "llama-3.2-1B", "1.4B", "2.8B", "3B-1T", "6.8B", "13.1B"]
GPUS = (1, 8, 64)
MEMORY = 80e9


def read(size: str, mixer: str = "diff_v2") -> Config:
    return load_config(["--config", str(CONFIGS / size / f"{mixer}.yaml")])


def row(size: str) -> str:
    cells = []
    for gpus in GPUS:
        found = plan(read(size), gpus, MEMORY)
        cells.append(f"{found[0]}: {found[1].total / 1e9:.0f} GB" if found else "does not fit")
    return f"| `{size}` | {' | '.join(cells)} |"


@pytest.mark.parametrize("size", SIZES)
def test_the_table_is_true(size):
    assert row(size) in (CONFIGS / "README.md").read_text(), row(size)


def write_table() -> None:
    readme = CONFIGS / "README.md"
    lines = readme.read_text().splitlines()
    begin = lines.index("| preset | 1 GPU | 8 GPUs | 64 GPUs |") + 2
    lines[begin : begin + len(SIZES)] = [row(size) for size in SIZES]
    readme.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mixer", ["standard", "diff_v1"])
def test_the_splits_hold_the_other_mixers(size, mixer):
    for gpus in GPUS:
        found = plan(read(size), gpus, MEMORY)
        if found is not None:
            assert peak(found[0], read(size, mixer), gpus).total < MEMORY


def test_splits_come_in_the_order_of_their_cost():
    config = read("6.8B")
    found = list(splits(config, 8))
    costs = [split.cost(config, 8) for split in found]
    assert costs == sorted(costs) and len({split.tensor for split in found}) == 4
    first = plan(config, 8, MEMORY)
    assert first is not None and first[1].total <= (1 - FREE) * MEMORY
    for cheaper in found[: found.index(first[0])]:
        assert peak(cheaper, config, 8).total > (1 - FREE) * MEMORY


def test_the_tool_prints_flags(capsys):
    words = ["--config", str(CONFIGS / "830M" / "diff_v2.yaml"), "--gpus", "1", "2"]
    assert main([*words, "--memory", "16"]) == 0
    printed = capsys.readouterr().out
    assert "1 GPUs: no split fits" in printed
    assert "2 GPUs: " in printed and "GB (weights" in printed and "--micro-batch-size " in printed


def test_a_run_may_be_told_in_samples(capsys):
    words = ["--train-samples", "1000", "--global-batch-size", "8", "--vocab-size", "1000"]
    assert main(["--gpus", "1", *words]) == 0
    assert "1 GPUs: " in capsys.readouterr().out


def test_ranks_that_share_sequences_are_no_replicas(capsys):
    """Two sequences a step on four GPUs, in pairs."""
    words = ["--context-parallel-size", "2", "--global-batch-size", "2", "--gpus", "4"]
    assert main(["--config", str(CONFIGS / "125M" / "diff_v2.yaml"), *words]) == 0
    assert "4 GPUs: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "7", "8"], "7 GPUs: no split is valid: --global-batch-size"),
        (["--num-attention-heads", "7"], "no split is valid: --num-attention-heads 7"),
        (["--deepspeed"], "leave out --deepspeed"),
        (["--micro-batch-size", "0"], "a positive --micro-batch-size"),
    ],
)
def test_what_no_split_can_mend_is_told(words, told, capsys):
    assert main(["--config", str(CONFIGS / "125M" / "diff_v2.yaml"), *words]) == 1
    printed = capsys.readouterr()
    assert told in printed.out + printed.err
    assert ("8 GPUs: 15.78 GB" in printed.out) == ("7" in words and "8" in words)


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus", "-8"], ["--memory", "nan"]])
def test_no_gpus_and_no_memory_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert "must be positive" in capsys.readouterr().err


if __name__ == "__main__":
    write_table()
