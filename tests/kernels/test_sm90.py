"""The kernels compile for Hopper on a machine without a GPU: what the interpreter cannot see."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def compiled(*arguments: int) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sm90", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def check(reports: list[dict]) -> None:
    for report in reports:
        assert report["shared"] <= 232448, report  # bytes that one program may have
        assert report["stack"] <= 512, report  # few spills
        assert report["wgmma"] > 0 or report["kernel"] == "preprocess", report


def test_narrow_heads() -> None:
    check(compiled(16, 32, 1, 0, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("norm_and_packed", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize(
    "widths", [(128, 256, 1), (128, 128, 1), (64, 128, 1), (128, 128, 0), (64, 64, 0)]
)
def test_every_shape(widths: tuple[int, int, int], norm_and_packed: tuple[int, int]) -> None:
    check(compiled(*widths, *norm_and_packed, 0))
