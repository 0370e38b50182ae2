"""The real DeepSpeed trains as the native engine does, and each opens the other's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megadiff.checkpoint.storage import CheckpointReader, load, read_metadata
from megadiff.checkpoint.storage import save as save_tensors
from megadiff.config import Config, ConfigError, load_config, validate
from megadiff.data.loader import MicroBatch
from megadiff.optim.scaler import LossScaler
from megadiff.training import metrics
from megadiff.training.checkpointing import optimizer_tensors
from megadiff.training.deepspeed import DeepSpeedEngine, _load_library, read_settings
from megadiff.training.engine import Engine, NativeEngine
from megadiff.training.setup import start
from megadiff.training.zero_state import load_scaler, scaler_state
from tests.distributed import run_distributed

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
STEPS = 5
GLOBAL_BATCH, LENGTH, VOCABULARY = 8, 12, 61


def words_of(stage: str | None, tensor: int, *flags: str) -> list[str]:
    """A small V1 and V2 model; `stage` names a file of configs/deepspeed, None is native."""
    words = [
        "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
        "--num-query-groups", "2", "--ffn-hidden-size", "48", "--hybrid-layer-pattern", "12",
        "--vocab-size", str(VOCABULARY), "--make-vocab-size-divisible-by", "4",
        "--seq-length", str(LENGTH), "--micro-batch-size", "2", "--train-iters", "100",
        "--global-batch-size", str(GLOBAL_BATCH), "--device", "cpu", "--clip-grad", "0.5",
        "--tensor-model-parallel-size", str(tensor), "--init-method-std", "0.2",
    ]  # fmt: skip
    if stage is not None:
        words += ["--deepspeed", "--deepspeed_config", str(CONFIGS / f"{stage}.json")]
    return [*words, *flags]


def config_of(stage: str | None, tensor: int, *flags: str) -> Config:
    return load_config(words_of(stage, tensor, *flags))


def micro_batches(step: int, rank: int, data: int) -> list[MicroBatch]:
    """Uneven loss masks, so that ranks and micro-batches count different numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    masks = torch.rand(GLOBAL_BATCH, LENGTH, generator=generator)
    masks = (masks < torch.linspace(0.2, 1, GLOBAL_BATCH).unsqueeze(1)).float()
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    return [
        MicroBatch(text[i : i + 2, :-1], text[i : i + 2, 1:], masks[i : i + 2], positions)
        for i in range(2 * rank, GLOBAL_BATCH, 2 * data)
    ]


def count(step: int) -> int:
    return int(sum(b.loss_mask.sum() for b in micro_batches(step, 0, 1)))


def train(engine: Engine, config: Config, env: Any, first: int = 0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the steps."""
    outcome = []
    for step in range(first, first + STEPS):
        batches = micro_batches(step, env.mesh.dp.rank, env.mesh.dp.size)
        share = engine.forward_backward(batches, count(step))
        loss = metrics.sum_over_data(share, env).item()
        result = engine.step(config.optimizer.lr, config.optimizer.weight_decay)
        outcome.append((loss, result.grad_norm.item()))
    return outcome


def make(stage: str | None, tensor: int, flags: tuple[str, ...]) -> tuple[Any, Config, Any]:
    config = config_of(stage, tensor, *flags)
    validate(config, torch.distributed.get_world_size())
    env = start(config)
    engine = DeepSpeedEngine if config.training.deepspeed else NativeEngine
    return engine(config, env), config, env


def run(stage: str | None, tensor: int, flags: tuple[str, ...], folder: str) -> Any:
    engine, config, env = make(stage, tensor, flags)
    outcome = train(engine, config, env)
    engine.optimizer.wait_for_parameters()
    save(engine, folder)
    return outcome


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    reader = CheckpointReader(folder)
    return {name: reader.read(name) for name in reader.tensors}


SPLITS: list[Any] = [("zero0", 2, 1), ("zero2", 4, 2), ("zero3", 2, 1)]
SPLITS += [
    pytest.param(*split, marks=pytest.mark.slow)
    for split in (
        ("zero1", 2, 1), ("zero0", 4, 2), ("zero1", 4, 2), ("zero3", 4, 2), ("zero2_offload", 2, 1)
    )
]  # fmt: skip


@pytest.mark.parametrize(("stage", "world", "tensor"), SPLITS)
def test_trains_as_the_native_engine(tmp_path, stage, world, tensor):
    """SGD: losses, norms and weights in float32 to rounding."""
    flags = ("--optimizer", "sgd", "--lr", "0.1", "--sgd-momentum", "0.5")
    native = run_distributed(world, run, None, tensor, flags, str(tmp_path / "native"))
    theirs = run_distributed(world, run, stage, tensor, flags, str(tmp_path / "deepspeed"))
    for ours, other in zip(native, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(ours), rtol=1e-5, atol=0)
    expected, found = read(tmp_path / "native"), read(tmp_path / "deepspeed")
    assert set(expected) == set(found)
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 1e-5, name


def ramp(stage: str | None, flags: tuple[str, ...]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps with more and more micro-batches on each of two ranks."""
    engine, config, env = make(stage, 1, flags)
    outcome = []
    for step, number in enumerate((1, 2, 3, 3, 2)):
        parts = [micro_batches(step, r, 2) + micro_batches(step + 9, r, 2) for r in range(2)]
        tokens = int(sum(b.loss_mask.sum() for part in parts for b in part[:number]))
        share = engine.forward_backward(parts[env.mesh.dp.rank][:number], tokens)
        result = engine.step(config.optimizer.lr, 0.0)
        outcome.append((metrics.sum_over_data(share, env).item(), result.grad_norm.item()))
    return outcome


@pytest.mark.parametrize("stage", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_batch_that_ramps_up(stage):
    flags = ("--optimizer", "sgd", "--lr", "0.1")
    native, theirs = (run_distributed(2, ramp, s, flags)[0] for s in (None, stage))
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(native), rtol=1e-5, atol=0)


def stumble(stage: str | None, flags: tuple[str, ...]) -> list[tuple[float, bool]]:
    """(loss, whether skipped) of steps of which the second has a gradient that is not finite."""
    engine, config, env = make(stage, 1, flags)
    outcome = []
    for step in range(4):
        batches = micro_batches(step, env.mesh.dp.rank, 2)
        if step == 1 and env.mesh.dp.rank == 0:
            batches[0].loss_mask[0, 0] = float("nan")
        share = engine.forward_backward(batches, count(step))
        result = engine.step(config.optimizer.lr, 0.1)
        outcome.append((metrics.sum_over_data(share, env).item(), bool(result.skipped)))
    return outcome


STUMBLES: list[Any] = [("zero0", ()), ("zero1", ("--bf16",)), ("zero2_offload", ("--bf16",))]
STUMBLES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("zero2", ()), ("zero3", ()), ("zero0", ("--bf16",)), ("zero2", ("--bf16",)),
        ("zero3_offload", ("--bf16",)),
    )
]  # fmt: skip


@pytest.mark.parametrize(("stage", "precision"), STUMBLES)
def test_a_step_that_is_not_finite_is_skipped(stage, precision):
    flags = ("--optimizer", "sgd", "--lr", "0.1", *precision)
    native, theirs = (run_distributed(2, stumble, s, flags)[0] for s in (None, stage))
    assert [skipped for _, skipped in theirs] == [False, True, False, False]
    assert [skipped for _, skipped in native] == [False, True, False, False]
    torch.testing.assert_close(
        torch.tensor(theirs), torch.tensor(native), rtol=0.02 if precision else 1e-5, atol=0,
        equal_nan=True,
    )  # fmt: skip


def restore(engine: Engine, folder: str) -> None:
    load(Path(folder), engine.weights() | optimizer_tensors(engine.optimizer))
    engine.optimizer.load_scalars(read_metadata(folder)["optimizer"])
    engine.optimizer.parameters_from_main_weights()


def save(engine: Engine, folder: str) -> None:
    tensors = engine.weights() | optimizer_tensors(engine.optimizer)
    save_tensors(Path(folder), tensors, {"optimizer": engine.optimizer.state_scalars()})


def exchange(stage: str, flags: tuple[str, ...], folder: str) -> Any:
    """Native trains and saves; both go on from there; DeepSpeed saves; native goes on from that."""
    native, config, env = make(None, 1, flags)
    train(native, config, env)
    save(native, f"{folder}/native")
    theirs, their_config, their_env = make(stage, 1, flags)
    restore(theirs, f"{folder}/native")
    save(theirs, f"{folder}/again")
    first = train(native, config, env, STEPS), train(theirs, their_config, their_env, STEPS)
    save(theirs, f"{folder}/deepspeed")
    restore(native, f"{folder}/deepspeed")
    second = (
        train(native, config, env, 2 * STEPS),
        train(theirs, their_config, their_env, 2 * STEPS),
    )
    return first, second


HALF = ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "8")
EXCHANGES: list[Any] = [("zero1", ()), ("zero3", ()), ("zero1", ("--bf16",)), ("zero2", HALF)]
EXCHANGES += [
    pytest.param(*exchange, marks=pytest.mark.slow)
    for exchange in (
        ("zero0", ()), ("zero2", ()), ("zero3_offload", ()), ("zero0", ("--bf16",)),
        ("zero2", ("--bf16",)), ("zero3", ("--bf16",)), ("zero0", HALF), ("zero1", HALF),
        ("zero3", HALF),
    )
]  # fmt: skip


@pytest.mark.parametrize(("stage", "precision"), EXCHANGES)
def test_each_opens_the_others_checkpoints(tmp_path, stage, precision):
    """What was loaded is saved again bit for bit, loss scale included, and both go on alike."""
    flags = ("--lr", "1e-3", *precision)
    # Adam amplifies rounding where a gradient is near zero; 16 bits have 3 digits.
    tolerance = 0.02 if precision else 1e-3
    for outcome in run_distributed(2, exchange, stage, flags, str(tmp_path)):
        for native, theirs in outcome:
            torch.testing.assert_close(
                torch.tensor(theirs), torch.tensor(native), rtol=tolerance, atol=0
            )
    ours, again = read(tmp_path / "native"), read(tmp_path / "again")
    assert set(ours) == set(again)
    for name, value in ours.items():
        assert torch.equal(value, again[name]), name
        assert value.dtype == again[name].dtype, name
    scalars = [read_metadata(tmp_path / name)["optimizer"] for name in ("native", "again")]
    if stage == "zero0":  # which lowers the scale at every overflow
        scalars = [{**values, "tolerance": 1} for values in scalars]
    assert scalars[0] == scalars[1]
    assert ("good_steps" in scalars[0]) == (precision == HALF)


def follow_scalers() -> None:
    _load_library().init_distributed("gloo")  # its scaler asks for the rank
    arguments = {"init_scale": 256.0, "scale_window": 3, "min_scale": 1.0, "delayed_shift": 2}
    config = config_of(None, 1, "--fp16", "--loss-scale-window", "3").optimizer
    overflows = [step in (2, 3, 7, 8, 9, 22) for step in range(40)]

    def fresh() -> DynamicLossScaler:
        return DynamicLossScaler(**arguments, consecutive_hysteresis=False)

    for stop in range(len(overflows)):
        scaler = fresh()
        for overflow in overflows[:stop]:
            scaler.update_scale(overflow)
        again, native = fresh(), LossScaler(config, torch.device("cpu"))
        load_scaler(again, scaler_state(scaler))
        native.load(scaler_state(scaler))
        assert native.state() == scaler_state(scaler) == scaler_state(again)
        comparable = True
        for overflow in overflows[stop:]:
            scaler.update_scale(overflow)
            again.update_scale(overflow)
            native.update(torch.tensor(overflow))
            assert again.cur_scale == scaler.cur_scale
            comparable &= not overflow
            assert not comparable or native.scale.item() == scaler.cur_scale


def test_the_loss_scale_goes_on_where_it_was():
    """Saved at any step and loaded anew, by DeepSpeed or by us up to the next overflow."""
    run_distributed(1, follow_scalers)


def half(stage: str, flags: tuple[str, ...]) -> Any:
    engine, _, env = make(stage, 1, flags)
    results = []
    for step in range(3):
        batches = micro_batches(step, env.mesh.dp.rank, env.mesh.dp.size)
        engine.forward_backward(batches, count(step))
        result = engine.step(1e-3, 0.1)
        results.append((bool(result.skipped), float(result.loss_scale)))
    return results, engine.optimizer.updates


def test_float16_overflow_skips_and_lowers_the_scale():
    flags = ("--fp16", "--initial-loss-scale", str(2.0**32), "--hysteresis", "1")
    for results, updates in run_distributed(2, half, "zero1", flags):
        assert [skipped for skipped, _ in results] == [True, True, True]
        assert [scale for _, scale in results] == [2.0**32, 2.0**31, 2.0**30]
        assert updates == 0


@pytest.mark.parametrize("stage", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_bfloat16_trains_as_the_native_engine(tmp_path, stage):
    """DeepSpeed rounds norms' weights and lambda vectors to bfloat16 too, 3 digits."""
    flags = ("--bf16", "--lr", "1e-3")
    native = run_distributed(2, run, None, 1, flags, str(tmp_path / "native"))
    theirs = run_distributed(2, run, stage, 1, flags, str(tmp_path / "deepspeed"))
    for ours, other in zip(native, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(ours), rtol=0.02, atol=0)
    assert set(read(tmp_path / "native")) == set(read(tmp_path / "deepspeed"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline-model-parallel-size", "2"], "does not go with --pipeline-model-parallel"),
        (["--optimizer", "muon"], "does not go with --optimizer muon"),
        (["--tensor-model-parallel-size", "4"], "copied key/value groups"),
    ],
)
def test_what_it_can_not_do_is_refused_by_name(flags, message):
    config = config_of("zero1", 1, *flags)
    with pytest.raises(ConfigError) as error:
        validate(config, 4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gradient_clipping": 1.0}', "gradient_clipping is 1.0, but the configuration says 0.5"),
        ('{"bf16": {"enabled": true}}', "bf16.enabled is True, but the configuration says False"),
        ('{"optimizer": {"type": "AdamW"}}', "take out 'optimizer'"),
        ("{", "not valid JSON"),
    ],
)
def test_contradictions_are_refused(tmp_path, text, message):
    file = tmp_path / "zero.json"
    file.write_text(text)
    config = config_of(None, 1, "--deepspeed", "--deepspeed-config", str(file))
    validate(config, 2)
    with pytest.raises(ConfigError) as error:
        read_settings(config, 2)
    assert message in str(error.value)


def test_what_deepspeed_refuses_is_one_line(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"overlap_comm": "perhaps"}}')
    flags = ("--deepspeed", "--deepspeed_config", str(file))
    with pytest.raises(AssertionError, match=r"ConfigError: .*zero.json: DeepSpeed refuses it: .*"):
        run_distributed(1, make, None, 1, flags)


def test_a_wrong_norm_is_refused():
    config = config_of("zero0", 2, "--bf16")
    validate(config, 4)
    with pytest.raises(ConfigError, match=r"zero0.json: at ZeRO stage 0 in 16 bits"):
        read_settings(config, 4)


def test_auto_and_missing_values_are_filled():
    config = config_of("zero2", 1)
    validate(config, 2)
    settings = read_settings(config, 2)
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a JSON object"),
        ('{"bf16": true}', "bf16 is True, not an object"),
        ('{"zero_optimization": 3}', "zero_optimization is 3, not an object"),
        ('{"zero_optimization": {"stage": "auto"}}', "stage is 'auto', not 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 7}}', "stage is 7, not 0, 1, 2 or 3"),
        ('{"train_batch_size": "8"}', "train_batch_size is '8', but the configuration says 8"),
        ('{"zero_force_ds_cpu_optimizer": true}', "cpu_optimizer is True, but .* says False"),
        ('{"sequence_parallel_size": 2}', "take out sequence_parallel_size"),
        (
            '{"zero_optimization": {"round_robin_gradients": true}}',
            "take out zero_optimization.round_robin_gradients",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}',
            "offload_optimizer.device is 'nvme', not cpu or none",
        ),
    ],
)
def test_a_malformed_file_is_told(tmp_path, text, message):
    file = tmp_path / "zero.json"
    file.write_text(text)
    config = config_of(None, 1, "--deepspeed", "--deepspeed_config", str(file))
    validate(config, 2)
    with pytest.raises(ConfigError, match=message):
        read_settings(config, 2)
