"""What a launcher's variables and a split's groups must be."""

import socket

import pytest
import torch
import torch.distributed as dist

from megadiff.config import (
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
    validate,
)
from megadiff.training.errors import USER_ERRORS
from megadiff.training.setup import pick_device, start, world_size
from tests.distributed import run_distributed
from tests.training.small import flags, train, write_data


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [
        (None, None, 1),
        ("1", None, 1),
        ("4", "3", 4),
        ("2", None, "WORLD_SIZE is 2 and RANK is not set"),  # each would train alone
        (None, "1", "WORLD_SIZE is 1 and RANK is 1"),
        ("2", "2", "WORLD_SIZE is 2 and RANK is 2"),  # would wait for a rank 0 and 1 in vain
        ("0", "0", "WORLD_SIZE is 0"),
        ("two", "0", "WORLD_SIZE is two"),
        ("2", "-1", "RANK is -1"),
    ],
)
def test_a_launchers_variables_fit_each_other(monkeypatch, size, rank, expected):
    for name, value in {"WORLD_SIZE": size, "RANK": rank}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(expected, int):
        assert world_size() == expected
        return
    with pytest.raises(ConfigError, match=expected):
        world_size()


@pytest.mark.parametrize(
    ("local", "of", "expected"),
    [
        (None, None, None),
        ("1", None, None),
        ("1", "2", None),
        ("2", "2", "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        (None, "0", "LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 0"),
        ("x", None, "LOCAL_RANK is x and LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_a_launchers_variables_of_a_node(monkeypatch, local, of, expected):
    for name, value in {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if expected is None:
        assert world_size() == 1
        return
    with pytest.raises(ConfigError, match=expected):
        world_size()


def test_ranks_that_see_several_gpus_are_told_whose_is_which(monkeypatch):
    """Without LOCAL_RANK all would take the first. Each may see one of its own."""
    config = Config(training=TrainingConfig(device="cuda"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device(config) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this node shows 2 GPUs, and LOCAL_RANK"):
        pick_device(config)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(config) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("address", "port", "told"),
    [(None, "1", "MASTER_ADDR exp"), ("localhost", "x", "literal.*'x'")],
)
def test_ranks_are_told_where_to_meet(monkeypatch, address, port, told):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port, "MASTER_ADDR": address}
    for name, value in places.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"ranks meet at MASTER_ADDR and MASTER_PORT.*{told}"):
        start(Config(training=TrainingConfig(device="cpu")))


def test_a_place_that_is_taken_is_told(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"do not meet at localhost:{port}: .*in use"):
            start(Config(training=TrainingConfig(device="cpu")))


def test_nccl_needs_gpus():
    config = Config(parallel=ParallelConfig(distributed_backend="nccl"))
    config.training.device = "cpu"
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        start(config)


def tensor_ranks_of_a_delta_model() -> int:
    model = ModelConfig(
        num_layers=1, hidden_size=40, ffn_hidden_size=40, vocab_size=8, token_mixer="delta_net",
        num_attention_heads=4, num_query_groups=2, delta_num_heads=5,
    )  # fmt: skip
    training = TrainingConfig(train_iters=1, device="cpu")
    config = Config(model, ParallelConfig(tensor_model_parallel_size=5), training)
    validate(config, 5)
    return start(config).mesh.tp_copies.size


def test_query_groups_do_not_matter_without_attention():
    """Two groups and five ranks, of which neither divides the other."""
    assert run_distributed(5, tensor_ranks_of_a_delta_model) == [1] * 5


def train_with(words: dict[int, list[str]], argv: list[str]) -> str:
    """What ends a run whose ranks have further flags of their own; nothing may."""
    try:
        return train([*argv, *words.get(dist.get_rank(), [])])
    except USER_ERRORS as error:
        return str(error)


def test_ranks_with_different_options_are_refused(tmp_path):
    """They would train on, each with its own, or wait for each other in vain."""
    argv = flags(write_data(tmp_path))
    for words in (["--lr", "0.02"], ["--tensor-model-parallel-size", "2"], ["--log-interval", "3"]):
        for told in run_distributed(2, train_with, {1: words}, argv):
            assert told == (f"rank 1 was started with other options than rank 0: {words[0]}")


def test_ranks_may_find_the_same_data_in_different_places(tmp_path):
    """And are refused where one has other data."""
    places = [tmp_path / name for name in ("here", "there", "old")]
    for seed, place in enumerate(places):
        place.mkdir()
        write_data(place, seed=seed // 2)
    here, there, old = (str(place / "data") for place in places)
    moved = {1: ["--data-path", there]}
    assert run_distributed(2, train_with, moved, flags(here)) == ["finished"] * 2
    others = (["--data-path", old], ["--valid-data-sets", f"a={old}"])
    others += (["--valid-data-sets", f"a={here}", f"b={here}"],)  # an evaluation more
    argv = flags(here, "--valid-data-sets", f"a={here}")
    for words in others:
        for told in run_distributed(2, train_with, {1: words}, argv):
            assert told.startswith("rank 1 reads other data than rank 0:")
