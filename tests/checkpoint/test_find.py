import shutil

import pytest
import torch.distributed as dist

from megadiff.checkpoint.directory import (
    TRACKER,
    checkpoint_path,
    saving_path,
)
from megadiff.checkpoint.find import find_checkpoint, find_newest
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.storage import load
from tests.checkpoint.test_manager import flip, loaded, save_steps, tensors
from tests.distributed import run_distributed


def test_the_tracker_and_a_named_step_choose(tmp_path):
    save_steps(tmp_path, 10, 20)
    assert find_checkpoint(tmp_path, step=10) == checkpoint_path(tmp_path, 10)
    (tmp_path / TRACKER).write_text("10")
    assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 10)


def test_a_new_directory_has_nothing_to_load(tmp_path):
    assert find_checkpoint(tmp_path / "new") is None
    assert find_checkpoint(tmp_path) is None
    saving_path(tmp_path, 10).mkdir()  # killed in the first save
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        find_checkpoint(tmp_path, step=10)


@pytest.mark.parametrize("damage", ["flip", "truncate", "tensors", "index", "manifest", "mark"])
def test_a_damaged_newest_falls_back_to_the_newest_whole_one(tmp_path, caplog, damage):
    save_steps(tmp_path, 10, 20, 30)
    newest = checkpoint_path(tmp_path, 30)
    if damage == "flip":
        flip(newest / "__0_0.distcp")
    elif damage == "truncate":
        (newest / "__0_0.distcp").write_bytes((newest / "__0_0.distcp").read_bytes()[:-1])
    elif damage == "tensors":
        (newest / "__0_0.distcp").unlink()
    elif damage == "index":
        flip(newest / ".metadata")
    elif damage == "manifest":
        (newest / "manifest.json").write_text("{")
    else:
        (newest / "manifest.json").unlink()
    assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 20)
    assert "iter_0000030: " in caplog.text
    assert "loading" in caplog.text
    with pytest.raises(CheckpointError, match="name another step"):
        find_checkpoint(tmp_path, step=30)
    if damage == "flip":
        assert find_checkpoint(tmp_path, verify=False) == newest


@pytest.mark.parametrize("tracker", [None, b"", b"junk", b"\xff\xfe", b"-3"])
def test_without_a_readable_tracker_the_newest_is_loaded_and_said(tmp_path, caplog, tracker):
    save_steps(tmp_path, 10, 20)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / TRACKER).write_bytes(tracker)
    assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 20)
    assert TRACKER in caplog.text


def test_a_directory_without_a_whole_checkpoint_is_no_new_start(tmp_path):
    save_steps(tmp_path, 10)
    flip(checkpoint_path(tmp_path, 10) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        find_checkpoint(tmp_path)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="not overwritten"):
        find_checkpoint(tmp_path)


def test_a_tracker_without_checkpoints_is_no_new_start(tmp_path):
    (tmp_path / TRACKER).write_text("100\n")
    with pytest.raises(CheckpointError, match="is there, but no checkpoint"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_in_place_of_its_folder_is_no_new_start(tmp_path):
    save_steps(tmp_path, 10)
    with pytest.raises(CheckpointError, match="give the folder that holds it as iter_"):
        find_checkpoint(checkpoint_path(tmp_path, 10))


def test_a_second_place_of_another_run_is_passed_over(tmp_path, caplog):
    first, second = tmp_path / "first", tmp_path / "second"
    CheckpointManager(first).save(1, tensors(1), {"run": {"name": "mine"}})
    CheckpointManager(second).save(2, tensors(2), {"run": {"name": "other"}})
    for name, expected in [("other", second / "iter_0000002"), ("mine", first / "iter_0000001")]:
        found = find_newest([first, second], fits=lambda m, name=name: m["run"]["name"] == name)
        assert found == expected
    assert f"{second / 'iter_0000002'} is of another run" in caplog.text


def test_a_lost_or_damaged_second_place_is_passed_over(tmp_path, caplog):
    first, second = tmp_path / "first", tmp_path / "second"
    manager = CheckpointManager(first, second=second)
    manager.save(1, tensors(1), {})
    manager.save(2, tensors(2), {}, second=True)
    flip(checkpoint_path(second, 2) / "__0_0.distcp")
    assert find_newest([first, second]) == checkpoint_path(first, 1)
    assert "looking elsewhere" in caplog.text
    shutil.rmtree(second)
    assert find_newest([first, second]) == checkpoint_path(first, 1)
    flip(checkpoint_path(first, 1) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        find_newest([first, second])


def save_on_all(root):
    rank, world = dist.get_rank(), dist.get_world_size()
    CheckpointManager(root).save(5, tensors(5, rank, world), {})
    path = find_checkpoint(root)
    into = tensors(0, rank, world)
    load(path, into)
    assert into["w"].pieces[0].data.eq(5).all()
    return path


def find_on_all(root):
    return find_checkpoint(root)


def test_all_ranks_find_the_same(tmp_path):
    assert run_distributed(4, save_on_all, tmp_path) == [checkpoint_path(tmp_path, 5)] * 4
    assert loaded(checkpoint_path(tmp_path, 5)) == [5]
    save_steps(tmp_path, 6)
    flip(checkpoint_path(tmp_path, 6) / "__0_0.distcp")
    assert run_distributed(2, find_on_all, tmp_path) == [checkpoint_path(tmp_path, 5)] * 2
