"""A run that was stopped and resumed equals one that never was, bit for bit."""

import os
import signal
from pathlib import Path

import pytest

from megadiff.parallel.forward_backward import ForwardBackward
from tests.distributed import run_distributed
from tests.training.small import flags, read, train, write_data
from tools.checkpoint import main as checkpoint_tool

# What is trained on two ranks, and the step after which it is stopped. An epoch has 74 samples.
CASES = {
    "tensor parallel": ("--tensor-model-parallel-size 2", 4),
    "sharded, saved in the background": ("--use-distributed-optimizer --async-save", 4),
    "bfloat16": ("--tensor-model-parallel-size 2 --bf16", 4),
    "pure bfloat16": (
        "--use-distributed-optimizer --bf16 --main-weights stochastic --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16 --no-accumulate-allreduce-grads-in-fp32",
        4,
    ),
    "before the end of an epoch": ("--train-iters 12", 9),
    "after the end of an epoch": ("--train-iters 12", 10),
    "inside the warmup": ("--lr-warmup-iters 5", 3),
    "inside the decay of WSD": ("--lr-decay-style WSD --lr-wsd-decay-iters 4", 4),
    "while the batch grows": (
        "--micro-batch-size 1 --rampup-batch-size 2 2 24 --train-samples 44 --train-iters 10",
        5,
    ),
    "while float16 seeks its loss scale": (
        "--fp16 --initial-loss-scale 1e9 --loss-scale-window 2 --hysteresis 2 --train-iters 16",
        6,
    ),
    "right after an evaluation": ("--eval-interval 4", 4),
    "by a signal in the middle of gradient accumulation": (
        "--micro-batch-size 1 --eval-interval 5",
        4,
    ),
}
EXACT = ("lm_loss", "grad_norm", "loss_scale", "learning_rate", "consumed_samples", "lambda")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


def train_until_signal(argv: list[str], micro_batch: int) -> str:
    """Train on this rank; rank 1 gets SIGTERM in the forward of a micro-batch, counted from 1."""
    forward, calls = ForwardBackward._sum_of_losses, 0

    def signalled(self, batch):
        nonlocal calls
        calls += 1
        if calls == micro_batch and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, batch)

    ForwardBackward._sum_of_losses = signalled
    return train(argv)


def logged(folder: Path) -> dict[tuple[str, int], list]:
    return {
        (e["kind"], e["iteration"]): [e.get(key) for key in EXACT] for e in read(folder / "log")
    }


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_that_never_stopped(case: str, data: str, tmp_path: Path) -> None:
    words, step = CASES[case]

    def arguments(name: str, *more: str) -> list[str]:
        folder = tmp_path / name
        places = ["--save", str(folder / "saved"), "--log-dir", str(folder / "log")]
        return flags(data, *words.split(), *places, *more)

    run_distributed(2, train, arguments("whole"))
    if "signal" in case:  # four micro-batches a step on each rank
        micro_batch = 4 * (step - 1) + 2
        run_distributed(2, train_until_signal, arguments("parts"), micro_batch)
    else:
        run_distributed(2, train, arguments("parts", "--exit-interval", str(step)))
    assert max(iteration for _, iteration in logged(tmp_path / "parts")) == step
    run_distributed(2, train, arguments("parts", "--load", str(tmp_path / "parts" / "saved")))

    whole = logged(tmp_path / "whole")
    assert logged(tmp_path / "parts") == whole
    assert (
        checkpoint_tool(["compare", *(str(tmp_path / n / "saved") for n in ("whole", "parts"))])
        == 0
    )
    scales = [values[2] for (kind, _), values in sorted(whole.items()) if kind == "train"]
    assert ("loss scale" in case) == (
        scales[step - 1] != scales[-1] and scales[0] != scales[step - 1]
    )
