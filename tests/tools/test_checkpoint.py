import json
import math
import subprocess
import sys

import pytest
import torch

from megadiff.checkpoint.directory import checkpoint_path, list_steps, read_tracker
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.state import Piece, ShardedTensor
from megadiff.checkpoint.storage import CheckpointReader, read_metadata
from tools.checkpoint import main


def state(scale=1.0):
    weight, norm = torch.arange(24.0).reshape(6, 4) * scale, torch.full((4,), float(scale))
    return {
        "layers.0.w": ShardedTensor((6, 4), torch.float32, [Piece((0, 0), weight)]),
        "layers.0.norm": ShardedTensor((4,), torch.float32, [Piece((0,), norm)]),
        "optimizer.exp_avg.layers.0.w": ShardedTensor(
            (6, 4), torch.float32, [Piece((0, 0), weight * 2)]
        ),
    }


@pytest.fixture
def folder(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    for step in (10, 20, 30):
        manager.save(step, state(step), {"training": {"step": step}})
    return tmp_path / "run"


def damage(folder, step):
    file = checkpoint_path(folder, step) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_list_and_show(folder, capsys):
    (checkpoint_path(folder, 10) / "__0_0.distcp").unlink()
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert "__0_0.distcp is not readable" in lines[0]
    assert lines[2].endswith("whole (latest)")
    assert main(["show", str(folder)]) == 0
    assert "2 weight tensors, 28 parameters" in capsys.readouterr().out
    assert main(["show", "--json", str(checkpoint_path(folder, 20))]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metadata"] == {"training": {"step": 20}}
    assert shown["tensors"]["layers.0.w"] == {"shape": [6, 4], "dtype": "float32"}


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    for command in (["list"], ["show"], ["to-deepspeed", "--output", str(tmp_path / "out")]):
        assert main([*command, str(tmp_path / "nowhere")]) == 1
        assert capsys.readouterr() == (
            "",
            f"checkpoint: error: there is no folder {tmp_path}/nowhere\n",
        )
    assert main(["list", str(tmp_path)]) == 1
    assert f"no checkpoints in {tmp_path}\n" in capsys.readouterr().err


def test_verify_finds_a_flipped_bit(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    damage(folder, 20)
    assert main(["verify", str(folder)]) == 1
    states = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()[3:]]
    assert states == ["whole", "__0_0.distcp does not match its checksum", "whole"]


def test_verify_finds_values_that_are_no_numbers(folder, capsys):
    bad = state()
    bad["layers.0.norm"].pieces[0].data[2] = math.nan
    CheckpointManager(folder).save(40, bad, {})
    assert main(["verify", str(checkpoint_path(folder, 40))]) == 0
    assert main(["verify", "--values", str(checkpoint_path(folder, 40))]) == 1
    assert "layers.0.norm has 1 values that are not finite" in capsys.readouterr().out


def test_compare(folder, capsys):
    ten, twenty = (str(checkpoint_path(folder, step)) for step in (10, 20))
    assert main(["compare", ten, ten]) == 0
    assert main(["compare", ten, twenty]) == 1
    out = capsys.readouterr().out
    assert "layers.0.w: 23 of 24 values, largest difference 230 of 460" in out
    assert "0 tensors are equal, 3 differ" in out
    assert main(["compare", "--tolerance", "0.51", ten, twenty]) == 0
    assert main(["compare", "--tolerance", "0.49", ten, twenty]) == 1


def test_compare_passes_over_infinities_that_are_equal(tmp_path, capsys):
    values = {1: [math.inf, 1.0, 2.0], 2: [math.inf, 1.0, 2.5], 3: [1.0, 1.0, 2.0]}
    for step, value in values.items():
        tensor = ShardedTensor((3,), torch.float32, [Piece((0,), torch.tensor(value))])
        CheckpointManager(tmp_path).save(step, {"w": tensor}, {})
    one, two, three = (str(checkpoint_path(tmp_path, step)) for step in values)
    assert main(["compare", one, two]) == 1
    assert "1 of 3 values, largest difference 0.5 of 2.5" in capsys.readouterr().out
    assert main(["compare", "--tolerance", "0.21", one, two]) == 0
    assert main(["compare", "--tolerance", "0.19", one, two]) == 1
    assert main(["compare", "--tolerance", "0.5", one, three]) == 1
    assert "largest difference inf of 2" in capsys.readouterr().out


def test_prune_keeps_what_a_run_resumes_from(folder, capsys):
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    assert main(["prune", str(folder), "--keep-last", "1", "--dry-run"]) == 0
    assert list_steps(folder) == [10, 20, 30]
    assert main(["prune", str(folder), "--keep-last", "1"]) == 0
    assert list_steps(folder) == [10, 30]
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert main(["prune", str(folder), "--keep-last", "1"]) == 1
    assert "nothing deleted" in capsys.readouterr().err
    assert list_steps(folder) == [10, 30]


def test_average_is_the_mean_of_the_weights(folder):
    output = folder.parent / "average" / "iter_0000030"
    paths = [str(checkpoint_path(folder, step)) for step in (10, 20, 30)]
    assert main(["average", *paths, "--output", str(output)]) == 0
    reader = CheckpointReader(output)
    assert set(reader.tensors) == {"layers.0.w", "layers.0.norm"}
    assert reader.read("layers.0.w").equal(torch.arange(24.0).reshape(6, 4) * 20)
    assert read_metadata(output)["averaged"]["of"] == paths
    assert read_tracker(output.parent) == 30


def test_average_refuses_different_models(folder, capsys):
    other = state()
    del other["layers.0.norm"]
    CheckpointManager(folder.parent / "other").save(1, other, {})
    paths = [str(folder), str(folder.parent / "other")]
    assert main(["average", *paths, "--output", str(folder.parent / "out")]) == 1
    assert "layers.0.norm differ" in capsys.readouterr().err
    assert not (folder.parent / "out").exists()


def test_convert(folder, capsys):
    output = folder.parent / "bf16" / "iter_0000030"
    assert main(["convert", str(folder), "--dtype", "bfloat16", "--output", str(output)]) == 0
    reader = CheckpointReader(output)
    assert reader.tensors["layers.0.w"] == ((6, 4), torch.bfloat16)
    assert reader.tensors["optimizer.exp_avg.layers.0.w"] == ((6, 4), torch.float32)
    part = reader.read("layers.0.w", (1, 1), (2, 2))
    assert part.equal(torch.tensor([[150.0, 180.0], [270.0, 300.0]]).bfloat16())
    assert main(["convert", str(folder), "--output", str(output)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify", "compare"])
def test_what_is_not_there_is_said(tmp_path, capsys, command):
    paths = [str(tmp_path / "nothing")] * (2 if command == "compare" else 1)
    assert main([command, *paths]) == 1
    captured = capsys.readouterr()
    assert "nothing" in captured.out + captured.err


def test_memory_is_bounded_by_blocks(tmp_path):
    """Converting and comparing 200 MB takes well below that, beside what the libraries take."""
    big = torch.ones(200, 1 << 18)
    tensors = {"w": ShardedTensor(tuple(big.shape), big.dtype, [Piece((0, 0), big)])}
    CheckpointManager(tmp_path).save(1, tensors, {})
    code = (
        "from pathlib import Path; from tools.checkpoint import main\n"
        "def memory(key):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return int(next(line for line in lines if line.startswith(key)).split()[1])\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # VmHWM, the peak, starts anew
        "before = memory('VmRSS')\n"
        f"assert main(['convert', {str(tmp_path)!r}, '--output', {str(tmp_path / 'out')!r}]) == 0\n"
        f"assert main(['compare', {str(tmp_path)!r}, {str(tmp_path / 'out')!r}]) == 0\n"
        "print(memory('VmHWM') - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert int(result.stdout.split()[-1]) < 150 * 1024
