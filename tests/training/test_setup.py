"""What a launcher's variables and a split's groups must be."""

import pytest

from megadiff.config import (
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
    validate,
)
from megadiff.training.setup import start, world_size
from tests.distributed import run_distributed


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
