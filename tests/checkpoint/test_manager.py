import hashlib
import threading
import time

import torch
import torch.distributed as dist

from megadiff.checkpoint import manager as manager_module
from megadiff.checkpoint.directory import (
    TRACKER,
    checkpoint_path,
    list_steps,
    read_tracker,
    saving_path,
)
from megadiff.checkpoint.find import find_checkpoint, find_newest
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Piece, ShardedTensor
from megadiff.checkpoint.storage import load, read_metadata
from tests.distributed import run_distributed


def tensors(value, rank=0, world=1):
    size = 12 // world
    data = torch.full((size,), float(value))
    return {"w": ShardedTensor((12,), torch.float32, [Piece((rank * size,), data)])}


def save_steps(root, *steps, **options):
    manager = CheckpointManager(root, **options)
    for step in steps:
        manager.save(step, tensors(step), {"run": {"step": step}})
    return manager


def loaded(path):
    into = tensors(0)
    load(path, into)
    return into["w"].pieces[0].data.unique().tolist()


def flip(path):
    with path.open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 4]))


def test_the_layout_is_megatrons(tmp_path):
    save_steps(tmp_path, 10, 20)
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, "iter_0000010", "iter_0000020"}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20\n"
    path = find_checkpoint(tmp_path)
    assert path == tmp_path / "iter_0000020"
    assert loaded(path) == [20]
    assert read_metadata(path) == {"run": {"step": 20}}


def test_retention_keeps_the_last_every_mth_and_the_proven_one(tmp_path):
    save_steps(tmp_path, *range(10, 100, 10), keep_last=2, keep_every=40, proven=30)
    assert list_steps(tmp_path) == [30, 40, 80, 90]


def test_retention_does_not_count_damaged_checkpoints(tmp_path):
    save_steps(tmp_path, 10, 20)
    (checkpoint_path(tmp_path, 20) / "__0_0.distcp").unlink()
    save_steps(tmp_path, 30, keep_last=2)
    assert list_steps(tmp_path) == [10, 20, 30]
    save_steps(tmp_path, 40, keep_last=2)
    assert list_steps(tmp_path) == [20, 30, 40]


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path):
    save_steps(tmp_path, 10, 20)
    manager = CheckpointManager(tmp_path)
    manager.save(10, tensors(-1), {})
    assert loaded(checkpoint_path(tmp_path, 10)) == [-1]
    assert read_tracker(tmp_path) == 10
    assert list_steps(tmp_path) == [10, 20]


def test_leftovers_of_a_crash_go_with_the_next_save(tmp_path):
    saving_path(tmp_path, 10).mkdir(parents=True)
    (saving_path(tmp_path, 10) / "__0_0.distcp").write_bytes(b"half")
    save_steps(tmp_path, 20)
    assert {p.name for p in tmp_path.iterdir()} == {TRACKER, "iter_0000020"}


def test_a_second_place_holds_the_last_save_in_between(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    manager = CheckpointManager(first, second=second)
    for step in range(1, 6):
        manager.save(step, tensors(step), {}, second=step % 4 != 0)
    assert (list_steps(first), list_steps(second)) == ([4], [5])
    assert find_newest([first, second]) == checkpoint_path(second, 5)
    manager.save(6, tensors(6), {})
    assert find_newest([first, second]) == checkpoint_path(first, 6)


def test_going_back_gives_up_what_is_later(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    manager = CheckpointManager(first, keep_last=1, second=second)
    assert manager.go_back(10) is None
    for step in (2, 4, 6, 8):
        CheckpointManager(first).save(step, tensors(step), {})
    manager.save(9, tensors(9), {}, second=True)
    flip(checkpoint_path(first, 4) / "__0_0.distcp")
    assert manager.go_back(6) == checkpoint_path(first, 2)
    assert list_steps(first) == [2] and read_tracker(first) == 2
    assert list(second.iterdir()) == []
    manager.save(5, tensors(5), {})
    assert list_steps(first) == [2, 5]  # the one that the run goes on from is spared
    assert manager.go_back(2) is None
    assert list_steps(first) == [2, 5]


def test_going_back_leaves_the_checkpoints_of_other_runs_alone(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save_steps(first, 2, 4, 20)
    save_steps(second, 6)
    fresh = CheckpointManager(first, second=second)  # nothing was loaded
    assert fresh.go_back(10) is None
    fresh.save(3, tensors(3), {})
    assert fresh.go_back(10) == checkpoint_path(first, 3)
    assert list_steps(first) == [2, 3, 4, 20] and read_tracker(first) == 3
    resumed = CheckpointManager(first, proven=3)
    resumed.save(5, tensors(5), {})
    assert resumed.go_back(5) == checkpoint_path(first, 3)
    assert list_steps(first) == [2, 3, 4, 20]
    assert resumed.go_back(3) == checkpoint_path(first, 2)  # from before it was resumed


def test_a_background_save_holds_the_weights_of_its_own_step(tmp_path):
    big = torch.zeros(3_000_000)
    state = {"w": ShardedTensor((3_000_000,), torch.float32, [Piece((0,), big)])}
    digests = {}
    with CheckpointManager(tmp_path, background=True) as manager:
        manager.reserve(state)
        memory = manager._buffers._memory.data_ptr()
        for step in range(1, 5):
            big.normal_(generator=torch.Generator().manual_seed(step))
            digests[step] = hashlib.sha256(big.numpy()).hexdigest()
            manager.save(step, state, {"run": {"step": step}})
            big.zero_()  # training goes on
        assert manager._buffers._memory.data_ptr() == memory
    for step, digest in digests.items():
        load(checkpoint_path(tmp_path, step), state)
        assert hashlib.sha256(big.numpy()).hexdigest() == digest
    assert read_tracker(tmp_path) == 4


def test_metadata_of_a_background_save_is_of_its_own_step(tmp_path):
    metadata = {"run": {"samples": [1]}}
    with CheckpointManager(tmp_path, background=True) as manager:
        manager.save(1, tensors(1), metadata)
        metadata["run"]["samples"].append(2)
    assert read_metadata(checkpoint_path(tmp_path, 1)) == {"run": {"samples": [1]}}


def test_training_does_not_wait_for_a_background_save(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "megadiff")
    release = threading.Event()
    save = manager_module.save
    monkeypatch.setattr(manager_module, "save", lambda *a: (release.wait(60), save(*a)))
    with CheckpointManager(tmp_path, background=True) as manager:
        assert manager.save(1, tensors(1), {}) < 30
        manager.check()
        assert find_checkpoint(tmp_path) is None
        release.set()
        manager.save(2, tensors(2), {})  # waits for the first
        assert read_tracker(tmp_path) == 1
        manager.wait()
        manager.check()
    assert read_tracker(tmp_path) == 2
    for told, step in zip(caplog.messages, (1, 2), strict=True):
        assert told.startswith(f"wrote {checkpoint_path(tmp_path, step)}: ")


def fail_in_background(root):
    rank, world = dist.get_rank(), dist.get_world_size()
    state = tensors(1, rank, world)
    messages = []
    with CheckpointManager(root, background=True) as manager:
        manager.save(1, state, {})
        manager.wait()
        if rank == 1:
            state["w"].pieces[0].offset = (0,)  # now nobody writes the second half
        manager.save(2, state, {})
        while not messages:
            try:
                manager.check()
            except CheckpointError as error:
                messages.append(str(error))
            time.sleep(0.01)
        state["w"].pieces[0].offset = (rank * 6,)
        manager.save(3, state, {})  # a caller who goes on may
    return messages[0]


def test_an_error_in_the_background_reaches_every_rank(tmp_path):
    messages = run_distributed(2, fail_in_background, tmp_path)
    assert all("parts of it are written twice" in message for message in messages)
    assert list_steps(tmp_path) == [1, 3]
    assert not saving_path(tmp_path, 2).exists()
