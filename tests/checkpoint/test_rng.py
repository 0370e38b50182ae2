import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megadiff.checkpoint.rng import matches, rng_tensors, set_rng
from megadiff.checkpoint.storage import load, save
from tests.distributed import run_distributed


def draw():
    return [
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
        [random.random(), random.gauss(0, 1)],
    ]


def seed(value):
    torch.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002
    random.seed(value)


@pytest.mark.parametrize("draws", [0, 1, 2])  # an odd number leaves half of a Gaussian pair behind
def test_all_generators_continue(tmp_path, draws):
    seed(5)
    for _ in range(draws):
        draw()
    save(tmp_path, rng_tensors(), {})
    expected = [draw(), draw()]
    seed(6)
    tensors = rng_tensors()
    assert matches(tmp_path, tensors)
    load(tmp_path, tensors)
    set_rng(tensors)
    assert [draw(), draw()] == expected


def save_by_rank(directory):
    seed(dist.get_rank())
    draw()
    save(directory, rng_tensors(), {})
    return draw()


def continue_by_rank(directory):
    tensors = rng_tensors()
    if not matches(directory, tensors):
        return None
    load(directory, tensors)
    set_rng(tensors)
    return draw()


def test_each_rank_has_its_own_state_and_another_world_none(tmp_path):
    drawn = run_distributed(2, save_by_rank, tmp_path)
    assert drawn[0] != drawn[1]
    assert run_distributed(2, continue_by_rank, tmp_path) == drawn
    assert run_distributed(4, continue_by_rank, tmp_path) == [None] * 4
