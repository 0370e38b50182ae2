"""Places that cannot be written: one clear message on every rank; earlier checkpoints remain."""

import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from megadiff.checkpoint.directory import damage, list_steps, saving_path
from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Piece, ShardedTensor
from megadiff.checkpoint.storage import save
from tests.checkpoint.training_runs import arguments, write_text
from tests.distributed import run_distributed

ROWS = 4096


def tensors():
    """16 MB of which this rank holds its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.ones(ROWS // world, 1024)
    offset = (rank * (ROWS // world), 0)
    return {"w": ShardedTensor((ROWS, 1024), torch.float32, [Piece(offset, part)])}


def message_of(action):
    with pytest.raises(CheckpointError) as error:
        action()
    return str(error.value)


def start_without_permission(root):
    group = dist.new_group()  # made while its store may be written
    dist.new_group = lambda **_: group
    if os.geteuid() == 0:
        os.seteuid(65534)
    return message_of(lambda: CheckpointManager(root / "checkpoints"))


def test_a_directory_of_another_user(tmp_path):
    tmp_path.chmod(0o555)
    messages = run_distributed(2, start_without_permission, tmp_path)
    assert messages[0] == messages[1]
    assert "cannot save checkpoints in" in messages[0]
    assert "Permission denied" in messages[0]


RUN_AS_NOBODY = """
import os, sys
from megadiff.checkpoint import directory

try_to_write = directory.try_to_write

def as_nobody(root):
    if os.geteuid() == 0:
        os.seteuid(65534)
    try_to_write(root)

directory.try_to_write = as_nobody

from megadiff.training.errors import run
from megadiff.training.pretrain import main

run(main, sys.argv[1:])
"""


def test_a_run_that_may_not_save_says_so_in_one_line(tmp_path):
    write_text(tmp_path / "text")
    (tmp_path / "theirs").mkdir(mode=0o555)
    save = ["--save", str(tmp_path / "theirs" / "checkpoints")]
    argv = arguments(tmp_path / "text", tmp_path / "log", 2, *save)
    run = subprocess.run(
        [sys.executable, "-c", RUN_AS_NOBODY, *argv], text=True, capture_output=True, timeout=120
    )
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"error: cannot save checkpoints in {save[1]}: Permission denied")


def start(root):
    return message_of(lambda: CheckpointManager(root))


def test_a_file_instead_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    messages = run_distributed(2, start, tmp_path / "file")
    assert "File exists" in messages[0] == messages[1]
    assert (tmp_path / "file").read_text() == "mine"


def save_on_a_small_disk(root, background):
    """Rank 1 may write no more than 4 MB of its 8."""
    with CheckpointManager(root, background=background) as manager:
        manager.save(1, tensors(), {})
        manager.wait()
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))

        def fail():
            manager.save(2, tensors(), {})
            manager.wait()

        message = message_of(fail)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        manager.save(3, tensors(), {})
    return message


@pytest.mark.parametrize("background", [False, True])
def test_one_rank_without_space(tmp_path, background):
    messages = run_distributed(2, save_on_a_small_disk, tmp_path, background)
    assert messages[0] == messages[1]
    assert "File too large" in messages[0]
    assert "__1_0.distcp (rank 1)" in messages[0]
    assert list_steps(tmp_path) == [1, 3]
    assert not saving_path(tmp_path, 2).exists()
    assert all(damage(path) == [] for path in tmp_path.glob("iter_*"))


def save_apart(root):
    return message_of(lambda: save(root / str(dist.get_rank()), tensors(), {}))


def test_a_directory_that_not_all_ranks_share(tmp_path):
    messages = run_distributed(2, save_apart, tmp_path)
    assert all("do all nodes share it? (rank 1)" in message for message in messages)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def save_twice(root):
    manager = CheckpointManager(root)
    manager.save(1, tensors(), {})
    return message_of(lambda: manager.save(2, tensors(), {}))


def test_a_full_disk(small_disk):
    """The first 16 MB fit into 20, the second do not."""
    root = small_disk / "checkpoints"
    messages = run_distributed(2, save_twice, root)
    assert messages[0] == messages[1]
    assert "No space left on device: " in messages[0]
    assert find_checkpoint(root) == root / "iter_0000001"
    assert not saving_path(root, 2).exists()


def test_a_read_only_mount(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    messages = run_distributed(2, start, small_disk / "checkpoints")
    assert "Read-only file system" in messages[0] == messages[1]
