"""Bytes that training keeps for each parameter, counted over all tensors of the process."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megadiff.config import Config, ModelConfig, OptimizerConfig, TrainingConfig, validate
from megadiff.models.decoder import Decoder
from megadiff.models.memory import estimate_memory
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.parameter import Init, Section, make_parameter
from tests.distributed import run_distributed

ROWS, COLUMNS, MATRICES = 256, 128, 4
PURE = {"main_weights": "stochastic", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
PURE |= {"accumulate_allreduce_grads_in_fp32": False}
PARAMETERS = ROWS * COLUMNS * MATRICES


def bytes_per_parameter(config: OptimizerConfig, dtype: torch.dtype) -> float:
    """Of parameters, gradients and optimizer state, between two steps."""
    before = allocated()
    matrices = [
        make_parameter(
            (ROWS, COLUMNS),
            [Section(f"w{i}", (ROWS, COLUMNS), 0, ROWS, 0, "matrix", Init())],
            dtype=dtype,
            device="cpu",
        )
        for i in range(MATRICES)
    ]
    for weight in matrices:
        nn.init.zeros_(weight)
    group = dist.group.WORLD if dist.is_initialized() else None
    optimizer = Optimizer(
        nn.ParameterList(matrices), config, data_parallel_group=group, bucket_size=ROWS * COLUMNS
    )
    for _ in range(2):
        optimizer.zero_grad()
        sum(weight.float().sum() for weight in matrices).backward()
        optimizer.step(0.1)
    return (allocated() - before) / PARAMETERS


def allocated() -> int:
    """Bytes of all storages that tensors refer to."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):  # not what other tests leave of fakes
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "options", "fixed", "sharded"),
    [
        (torch.bfloat16, {}, 2 + 4, 4 + 4 + 4),
        (torch.bfloat16, {"accumulate_allreduce_grads_in_fp32": False}, 2 + 2, 4 + 4 + 4),
        (torch.bfloat16, {"main_weights": "kahan"}, 2 + 4, 2 + 4 + 4),
        (torch.bfloat16, {"main_weights": "stochastic"}, 2 + 4, 4 + 4),
        (torch.bfloat16, {"optimizer": "muon"}, 2 + 4, 4 + 4),
        (torch.bfloat16, PURE, 2 + 2, 2 + 2),
    ],
)
def test_bytes_per_parameter(dtype, options: dict, fixed: int, sharded: int) -> None:
    """`fixed + sharded / dp`, and little scalars and views beside them."""
    small = 4096 / PARAMETERS
    config = OptimizerConfig(**options)
    assert bytes_per_parameter(config, dtype) == pytest.approx(fixed + sharded, abs=small)
    config = OptimizerConfig(**options, use_distributed_optimizer=True)
    for got in run_distributed(2, bytes_per_parameter, config, dtype):
        assert got == pytest.approx(fixed + sharded / 2, abs=small)


def test_nothing_stays_when_model_and_optimizer_are_gone() -> None:
    before = allocated()
    bytes_per_parameter(OptimizerConfig(), torch.bfloat16)
    assert allocated() - before < PARAMETERS


def test_a_model_goes_on_without_its_optimizer() -> None:
    sections = [Section("w", (2, 3), 0, 2, 0, "matrix", Init())]
    weight = make_parameter((2, 3), sections, dtype=torch.float32, device="cpu")
    modules = nn.ParameterList([weight])
    optimizer = Optimizer(modules, OptimizerConfig())
    del optimizer
    gc.collect()
    weight.sum().backward()
    later = Optimizer(modules, OptimizerConfig(clip_grad=0.0))
    later.zero_grad()
    weight.sum().backward()
    assert later.step(0.1).grad_norm.item() == pytest.approx(6**0.5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"main_weights": "kahan"},
        {"main_weights": "stochastic"},
        PURE,
        *({"optimizer": o} for o in ("muon", "sgd")),
    ],
)
def test_estimate_counts_the_state_of_every_optimizer(options: dict) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=128, token_mixer="diff_v1"
    )
    config = Config(
        model,
        optimizer=OptimizerConfig(**options),
        training=TrainingConfig(bf16=True, train_iters=1),
    )
    validate(config, 1)
    (estimate,) = estimate_memory(config, 1)
    optimizer = Optimizer(Decoder(model, dtype=torch.bfloat16), config.optimizer)
    assert estimate.optimizer == sum(p.values.nbytes for p in optimizer.state_pieces())
