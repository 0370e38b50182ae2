"""What the loop asks of an engine, and the native one.

An engine has two seams: forward and backward of one global batch, and the optimizer's step. How a
global batch runs through micro-batches, pipeline stages or another library is its own matter.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megadiff.checkpoint.state import Tensors, module_tensors
from megadiff.config import Config, ConfigError
from megadiff.data.loader import MicroBatch
from megadiff.models.build import Model, build_model
from megadiff.models.norm import choose_rms_norm
from megadiff.optim.optimizer import Optimizer, StepResult
from megadiff.optim.shards import StatePiece
from megadiff.parallel.forward_backward import ForwardBackward
from megadiff.parallel.parameter import initialize
from megadiff.training.setup import Environment


class OptimizerState(Protocol):
    """What checkpoints need of an optimizer; `optim.Optimizer` says what each does."""

    def state_pieces(self) -> Iterator[StatePiece]: ...
    def state_scalars(self) -> dict[str, float]: ...
    def load_scalars(self, scalars: dict[str, float]) -> None: ...
    def parameters_from_main_weights(self) -> None: ...
    def main_weights_from_parameters(self) -> None: ...
    def wait_for_parameters(self) -> None: ...


class Engine(Protocol):
    """This rank's part of the model and of its optimizer."""

    model: Model
    notes: list[str]  # for the log's beginning: which kernels were chosen

    @property
    def optimizer(self) -> OptimizerState: ...

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        """Gradients of one global batch, in which all ranks together have `tokens` unmasked tokens.

        Returns this rank's share of the loss, a scalar on the device: the sum of its unmasked token
        losses over `tokens`. The shares of all data-parallel ranks add up to the loss.
        """
        ...

    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        """Clip the gradients and update the weights."""
        ...

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of this rank's unmasked token losses, a float64 scalar on the device."""
        ...

    def weights(self) -> Tensors:
        """The model's weights by global name, as this rank holds them (see `module_tensors`)."""
        ...


class NativeEngine:
    """megadiff's own model, schedules, gradient reduction and optimizer."""

    def __init__(self, config: Config, env: Environment) -> None:
        self.device, self.replicas = env.device, env.mesh.dp_cp
        self.model = build_model(config, env.mesh, dtype=env.dtype, device=env.device)
        initialize(self.model, config.training.seed)
        self.notes = [compute_in_float8(self.model, env.device)] if config.training.fp8 else []
        self.optimizer = Optimizer(
            self.model,
            config.optimizer,
            data_parallel_group=self.replicas.group,
            model_parallel_group=env.mesh.model.group,
            tensor_parallel_group=env.mesh.tp.group,
            ties=self.model.tied_parameters(),
        )
        t, cut = config.training, env.mesh.cp.size
        cut *= env.mesh.tp.size if env.mesh.sequence_parallel else 1
        tokens = t.micro_batch_size * t.seq_length // cut
        self.notes += [self.optimizer.adam_kernel, choose_rms_norm(self.model, tokens, env.dtype)]
        self.runner = ForwardBackward(
            self.model.chunks,
            env.mesh,
            schedule=config.parallel.schedule,
            hidden_size=config.model.hidden_size,
            dtype=env.dtype,
            device=env.device,
        )
        wide = torch.promote_types(env.dtype, torch.float32)
        self.one = torch.ones((), dtype=wide, device=env.device)

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        self.optimizer.zero_grad(len(batches))
        batches = [to_device(batch, self.device) for batch in batches]
        factor = self.optimizer.scale_loss(self.one) / tokens
        return self.runner.train(batches, factor) / tokens

    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        return self.optimizer.step(learning_rate, weight_decay)

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        return self.runner.evaluate([to_device(batch, self.device) for batch in batches])

    def weights(self) -> Tensors:
        return module_tensors(self.model, self.replicas.rank, self.replicas.size)


def compute_in_float8(model: Model, device: torch.device) -> str:
    """Linear layers in float8 from now on; says which. Raises ConfigError where that can not be."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ConfigError(f"--fp8 needs a GPU of the Hopper generation or later, this is {name}")
    try:
        from megadiff.parallel.float8 import use_float8
    except ImportError as error:
        raise ConfigError(f"--fp8 needs torchao ({error}): pip install 'megadiff[fp8]'") from None
    try:
        names = use_float8(model)
    except ValueError as error:
        raise ConfigError(f"--fp8: {error}") from None
    kinds = dict.fromkeys(".".join(name.split(".")[-2:]) for name in names)
    return f"float8: {len(names)} linear layers ({', '.join(kinds)}); all else is bfloat16"


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch on `device`; the copies do not wait for it."""
    moved: dict[str, Any] = {
        k: None if v is None else v.to(device, non_blocking=True) for k, v in vars(batch).items()
    }
    return MicroBatch(**moved)
