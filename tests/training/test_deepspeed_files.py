"""DeepSpeed's own checkpoints, read by us and written from ours, equal what its engine holds."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.storage import read_metadata
from megadiff.training.deepspeed_files import read_deepspeed, write_deepspeed
from tests.distributed import run_distributed
from tests.training.test_deepspeed import (
    CONFIGS,
    HALF,
    STEPS,
    config_of,
    make,
    read,
    restore,
    save,
    train,
    words_of,
)
from tools.checkpoint import main

SGD = ("--optimizer", "sgd", "--sgd-momentum", "0.5", "--lr", "0.1")


def undisturbed(stage: str, tensor: int, flags: tuple[str, ...], folder: str) -> Any:
    engine, config, env = make(stage, tensor, flags)
    train(engine, config, env)
    save(engine, f"{folder}/direct")
    engine.engine.save_checkpoint(f"{folder}/theirs")
    return train(engine, config, env, STEPS)


def resume_natively(flags: tuple[str, ...], folder: str) -> Any:
    engine, config, env = make(None, 1, flags)
    restore(engine, f"{folder}/converted/iter_0000005")
    return train(engine, config, env, STEPS)


def go_back(stage: str, tensor: int, flags: tuple[str, ...], folder: str) -> Any:
    words = ["--deepspeed_config", str(CONFIGS / f"{stage}.json")]
    words += ["--tensor-model-parallel-size", str(tensor)]
    back = Path(folder) / "back"
    write_deepspeed(Path(folder) / "converted" / "iter_0000005", back, words)
    engine, config, env = make(stage, tensor, flags)
    path, _ = engine.engine.load_checkpoint(str(back))
    assert path is not None and engine.engine.global_steps == STEPS
    return train(engine, config, env, STEPS)


CASES: list[Any] = [("zero1", 2, 1, ("--bf16",)), ("zero3", 2, 1, HALF)]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("zero0", 2, 1, ()), ("zero0", 2, 1, HALF), ("zero0", 4, 2, ()),
        ("zero1", 4, 2, ()), ("zero1", 2, 1, HALF), ("zero2", 2, 1, SGD),
        ("zero2", 4, 2, ("--bf16",)), ("zero3", 2, 1, ()), ("zero3", 4, 2, ("--bf16",)),
    )
]  # fmt: skip


@pytest.mark.parametrize(("stage", "world", "tensor", "precision"), CASES)
def test_there_and_back(tmp_path, stage, world, tensor, precision):
    flags = ("--lr", "1e-3", *precision)
    expected = run_distributed(world, undisturbed, stage, tensor, flags, str(tmp_path))[0]
    output = tmp_path / "converted" / "iter_0000005"
    start = ["from-deepspeed", str(tmp_path / "theirs"), "--output", str(output)]
    half = "--bf16" in precision or "--fp16" in precision
    assert main([*start, *words_of(None, 1, *(() if half else ("--bf16",)))]) == 1
    # Sizes that do not fit the ranks, and what only the native engine has.
    words = ["--micro-batch-size", "3", "--save", "unused", "--loss-spike-sigma-factor", "6"]
    words += ["--loss-spike-skip-iters", "4"]
    assert main([*start, *words_of(None, 1, *flags), *words]) == 0

    direct, converted = read(tmp_path / "direct"), read(output)
    assert set(direct) == set(converted)
    for name, value in direct.items():
        assert torch.equal(value, converted[name]) and value.dtype == converted[name].dtype, name
    metadata = read_metadata(output)
    assert metadata["optimizer"] == read_metadata(tmp_path / "direct")["optimizer"]
    assert metadata["progress"] == {"iteration": STEPS, "consumed_samples": 8 * STEPS}

    # Adam amplifies rounding where a gradient is near zero; 16 bits have 3 digits.
    rtol = 1e-5 if precision == SGD else 1e-3 if not precision else 0.02
    native = run_distributed(2, resume_natively, flags, str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(native), torch.tensor(expected), rtol=rtol, atol=0)
    stale = tmp_path / ".saving_back" / "global_step5" / "of_a_try_that_failed.pt"
    stale.parent.mkdir(parents=True)
    stale.touch()
    again = run_distributed(world, go_back, stage, tensor, flags, str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected), rtol=1e-7, atol=0)
    assert not list((tmp_path / "back").rglob(stale.name))


def save_twice(stage: str, flags: tuple[str, ...], folder: str) -> None:
    engine, config, env = make(stage, 1, flags)
    for first in (0, STEPS):
        train(engine, config, env, first)
        engine.engine.save_checkpoint(folder)


def test_files_of_different_steps_do_not_mix(tmp_path):
    run_distributed(2, save_twice, "zero2", (), str(tmp_path))
    newest, older = tmp_path / "global_step10", tmp_path / "global_step5"
    file = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = file.read_bytes()

    def refused(match: str, *flags: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            read_deepspeed(tmp_path, config_of(None, 1, *flags))

    refused("holds exp_avg, which the optimizer as configured does not keep", "--optimizer", "sgd")
    file.write_bytes((older / file.name).read_bytes())
    refused(f"{file.name} is of update 5")
    # SGD counts no steps.
    state = torch.load(older / file.name, weights_only=False)
    inner = state["optimizer_state_dict"]["base_optimizer_state"]
    for values in inner["state"].values():
        del values["step"]
    torch.save(state, file)
    refused("main weights are of another step than the model")
    inner["param_groups"][1]["lr"] = 0.05
    torch.save(state, file)
    refused(f"{file.name} is of another step: its learning rates are .*, 0.05")
    file.write_bytes(whole)
    state = torch.load(file, weights_only=False)
    for values in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del values["exp_avg"]
    torch.save(state, file)
    refused("'s exp_avg are there")
    file.write_bytes((newest / file.name.replace("rank_1", "rank_0")).read_bytes())
    refused(f"{file.name} was saved as zero_pp_rank_0_mp_rank_00_optim_states.pt")
    file.write_bytes(whole[: len(whole) // 2])
    refused(f"{file.name} is cut off")
    file.unlink()
    refused(f"No such file or directory: .*{file.name}")
    (tmp_path / "latest").write_bytes(b"\xff")
    refused("cannot read")


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_nothing_in_a_file_runs(tmp_path, capsys):
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "mp_world_size": Hostile()}, file)
    with pytest.raises(CheckpointError, match=r"more than tensors and plain data: .*print"):
        read_deepspeed(tmp_path, config_of(None, 1))
    file.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        read_deepspeed(tmp_path, config_of(None, 1))
    assert "run" not in capsys.readouterr().out


def test_what_is_not_deepspeeds_is_told(tmp_path, capsys):
    words = ["from-deepspeed", str(tmp_path), "--output", str(tmp_path / "new")]
    assert main([*words, *words_of(None, 1)]) == 1
    assert "has neither mp_rank_00_model_states.pt" in capsys.readouterr().err
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    assert main([*words, *words_of(None, 1)]) == 1
    assert "there is no 'mp_world_size'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
