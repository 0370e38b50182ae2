"""The optimizer state of DeepSpeed's engine, as checkpoints ask for it."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.config import Config, OptimizerConfig
from megadiff.optim.shards import StatePiece
from megadiff.parallel.mesh import ParallelMesh


def state_keys(config: OptimizerConfig) -> tuple[str, ...]:
    """What torch's optimizer keeps of each weight."""
    if config.optimizer == "adam":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if config.sgd_momentum else ()


class ZeroState:
    """DeepSpeed's optimizer state as the checkpoint code asks for it (`optim.Optimizer`).

    The state is filled with zeros at the start, where torch's optimizers would wait for their first
    step, so that a checkpoint can be loaded before it. `wide` are the parameters that the native
    engine keeps in float32.
    """

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        wide: set[nn.Parameter],
        stage: int,
        config: Config,
        mesh: ParallelMesh,
    ) -> None:
        self.zero, self.model, self.stage, self.mesh = engine.optimizer, model, stage, mesh
        self.wide = wide
        self.steps = self.updates = 0  # all of them, and those that were not skipped
        self.main_weights = config.training.dtype != "float32"
        self.keys = state_keys(config.optimizer)
        self.inner = getattr(self.zero, "optimizer", self.zero)  # torch's, alone in plain float32
        for tensor in self._state_tensors():
            state = self.inner.state[tensor]
            if config.optimizer.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32)
            for key in self.keys:
                state[key] = torch.zeros_like(tensor)
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._lazy_init_hp_params_optimizer_state()

    def _state_tensors(self) -> list[Tensor]:
        """The tensors that torch's optimizer updates on this rank."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [p for group in self.inner.param_groups for p in group["params"]]

    @property
    def loss_scale(self) -> float:
        """The scale of float16's loss, 1 for other types."""
        return float(getattr(self.zero, "cur_scale", None) or getattr(self.zero, "loss_scale", 1.0))

    def state_pieces(self) -> Iterator[StatePiece]:
        """See `Optimizer.state_pieces`; main weights only where they are not the parameters."""
        for piece in self._pieces():
            if piece.key != "main_weight" or (
                self.main_weights and piece.parameter not in self.wide
            ):
                yield piece

    def wide_weights(self) -> list[StatePiece]:
        """The main weights of the `wide` parameters."""
        return [piece for piece in self._main_weights() if piece.parameter in self.wide]

    def _main_weights(self) -> Iterator[StatePiece]:
        return (piece for piece in self._pieces() if piece.key == "main_weight")

    def _pieces(self) -> Iterator[StatePiece]:
        """Main weights (which in plain float32 are the parameters) and moments of this rank."""
        keys = ("main_weight", *self.keys)
        if self.stage == 0:  # without partitions
            members = mains = list(self.model.parameters())
            if self.inner is not self.zero:  # 16 bits
                members, mains = chain(*self.zero.fp16_groups), chain(*self.zero.fp32_groups)
            write = self.mesh.dp.rank == 0
            for parameter, main in zip(members, mains, strict=True):
                for key in keys:
                    whole = main.detach() if key == "main_weight" else self.inner.state[main][key]
                    yield StatePiece(parameter, parameter.shape, key, 0, whole.view(-1), write)
            return
        for parameter in self.model.parameters():
            shape = local_shape(parameter)
            if self.stage == 3:
                for key in keys:
                    flat, _ = self.zero._get_fp32_opt_state_partition(
                        parameter, False, None if key == "main_weight" else key
                    )
                    start, values = stage3_part(parameter, flat, self.mesh)
                    if values.numel():
                        yield StatePiece(parameter, shape, key, start, values, True)
            elif parameter._hp_mapping is not None:  # type: ignore[attr-defined]
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                start, main = mapping.lp_fragment_address.start, mapping.hp_fragment.detach()
                yield StatePiece(parameter, shape, "main_weight", start, main, True)
                for key in self.keys:
                    values = mapping.get_hp_fragment(key)
                    yield StatePiece(parameter, shape, key, start, values, True)

    def state_scalars(self) -> dict[str, float]:
        scalars = {"steps": float(self.steps), "updates": float(self.updates)}
        return scalars | scaler_state(self._scaler)

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self.steps, self.updates = int(scalars["steps"]), int(scalars["updates"])
        for tensor in self._state_tensors():
            if "step" in self.inner.state[tensor]:
                self.inner.state[tensor]["step"].fill_(scalars["updates"])
        if is_dynamic(self._scaler) and "loss_scale" in scalars:
            load_scaler(self._scaler, scalars)

    @property
    def _scaler(self) -> Any:
        """What keeps DeepSpeed's loss scale, if anything does."""
        return getattr(self.zero, "loss_scale_config", getattr(self.zero, "loss_scaler", None))

    def wait_for_parameters(self) -> None:
        """DeepSpeed's parameters are whole when its step returns."""

    @torch.no_grad()
    def parameters_from_main_weights(self) -> None:
        """After weights and their main weights were loaded."""
        if not self.main_weights:
            self.main_weights_from_parameters()
        else:
            self._round_main_weights()

    @torch.no_grad()
    def main_weights_from_parameters(self) -> None:
        """After parameters were loaded without optimizer state; the wide are main weights."""
        for piece in self._main_weights():
            if piece.parameter not in self.wide:
                piece.values.copy_(self._own(piece))
        if self.main_weights:
            self._round_main_weights()

    def _round_main_weights(self) -> None:
        for piece in self._main_weights():
            self._own(piece).copy_(piece.values)
        if hasattr(self.zero, "update_lp_params"):  # the other data ranks' parts
            self.zero.update_lp_params()

    def _own(self, main: StatePiece) -> Tensor:
        """The part of the parameter itself that a piece of its main weights is of."""
        if self.stage == 3:
            return stage3_part(main.parameter, main.parameter.ds_tensor, self.mesh)[1]  # type: ignore[attr-defined]
        return main.parameter.detach().view(-1)[main.start : main.start + main.values.numel()]


def is_dynamic(scaler: Any) -> bool:
    """Whether DeepSpeed's keeper of the loss scale, of whichever class or none, changes it."""
    return getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))


def scaler_state(scaler: Any) -> dict[str, float]:
    """DeepSpeed's dynamic loss scale in the words of `optim.LossScaler.state`, {} where it is not.

    DeepSpeed grows the scale one step later after an overflow (-1 good steps), and counts steps on
    where we begin anew.
    """
    if not is_dynamic(scaler):
        return {}
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "loss_scale": float(scaler.cur_scale),
        "good_steps": float((good - 1) % scaler.scale_window if good > 0 else -1),
        "tolerance": float(getattr(scaler, "cur_hysteresis", 1)),
    }


def load_scaler(scaler: Any, state: dict[str, float]) -> None:
    """Undo `scaler_state`, also of a state that the native engine saved."""
    scaler.cur_scale = state["loss_scale"]
    scaler.cur_iter = 0
    scaler.last_overflow_iter = -2 - int(state["good_steps"])
    if hasattr(scaler, "cur_hysteresis"):
        scaler.cur_hysteresis = max(1, int(state["tolerance"]))


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def stage3_part(parameter: nn.Parameter, flat: Tensor, mesh: ParallelMesh) -> tuple[int, Tensor]:
    """Where in the flattened parameter this rank's partition begins, and it without padding."""
    total = parameter.ds_numel  # type: ignore[attr-defined]
    size = -(-total // mesh.dp.size)
    start = min(mesh.dp.rank * size, total)
    return start, flat[: min(size, total - start)]
