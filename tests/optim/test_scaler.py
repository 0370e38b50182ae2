import torch

from megadiff.config import OptimizerConfig
from megadiff.optim.scaler import LossScaler

CONFIG = OptimizerConfig(
    initial_loss_scale=1024.0, min_loss_scale=256.0, loss_scale_window=3, hysteresis=2
)


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; x is an overflow."""
    values = []
    for symbol in overflows:
        scaler.update(torch.tensor(symbol == "x"))
        values.append(scaler.scale.item())
    return values


def test_scale_halves_after_hysteresis_and_doubles_after_a_window() -> None:
    scaler = LossScaler(CONFIG, torch.device("cpu"))
    # the first overflow only uses up the tolerance, the second and later ones halve, not below 256
    assert scales(scaler, "x.x") == [1024, 1024, 512]
    assert scales(scaler, "xx") == [256, 256]
    # three good steps double the scale and restore the tolerance
    assert scales(scaler, "...x.") == [256, 256, 512, 512, 512]
    # an overflow restarts the window
    assert scales(scaler, ".x...") == [512, 256, 256, 256, 512]


def test_state_goes_on_where_it_was() -> None:
    one, other = (LossScaler(CONFIG, torch.device("cpu")) for _ in range(2))
    scales(one, "x..")
    other.load(one.state())
    assert scales(one, ".x..") == scales(other, ".x..") == [2048, 2048, 2048, 2048]


def test_a_constant_scale_never_changes() -> None:
    config = OptimizerConfig(loss_scale=128.0)
    assert scales(LossScaler(config, torch.device("cpu")), "xxx") == [128.0] * 3
