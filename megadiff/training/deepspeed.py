"""DeepSpeed behind the loop: ZeRO 0 to 3 and offload, with tensor and data parallelism.

DeepSpeed partitions weights, gradients and optimizer state, accumulates and clips; the loss, the
schedule, the logs and the checkpoints are the native engine's. Checkpoints are in megadiff's own
format: any split opens them, and in float32 either engine resumes what the other saved.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.checkpoint.state import Tensors, add_piece, flat_pieces, module_tensors
from megadiff.config import Config, ConfigError, OptimizerConfig, data_parallel_size
from megadiff.data.loader import MicroBatch
from megadiff.models.build import build_model
from megadiff.optim.groups import group_rule
from megadiff.optim.optimizer import StepResult
from megadiff.optim.shards import StatePiece
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from megadiff.parallel.pipeline import sum_of_losses
from megadiff.training.engine import to_device
from megadiff.training.setup import Environment

logger = logging.getLogger(__name__)

_STATE_KEYS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def read_settings(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the file of `--deepspeed-config`, filled from megadiff's.

    What is missing or "auto" is filled. Raises ConfigError for a file that can not be read, and
    for values that contradict the configuration.
    """
    path = config.training.deepspeed_config
    if path is None:
        raise ConfigError(
            "--deepspeed needs --deepspeed-config, for example configs/deepspeed/zero1.json"
        )
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    for section in ("optimizer", "scheduler"):
        if section in settings:
            raise ConfigError(
                f"{path}: take out {section!r}; optimizer and schedule are megadiff's flags (--lr, "
                "--lr-decay-style, --weight-decay, ...)"
            )
    t, o = config.training, config.optimizer
    assert t.global_batch_size is not None
    dp = data_parallel_size(config, world_size)
    wanted: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": t.micro_batch_size,
        "gradient_accumulation_steps": t.global_batch_size // (t.micro_batch_size * dp),
        "train_batch_size": t.global_batch_size,
        "gradient_clipping": o.clip_grad,
        "bf16.enabled": t.bf16,
        "fp16.enabled": t.fp16,
    }
    if t.fp16:
        wanted |= {
            "fp16.loss_scale": o.loss_scale or 0,
            "fp16.initial_scale_power": round(math.log2(o.initial_loss_scale)),
            "fp16.loss_scale_window": o.loss_scale_window,
            "fp16.hysteresis": o.hysteresis,
            "fp16.min_loss_scale": o.min_loss_scale,
        }
    for key, value in wanted.items():
        _fill(settings, key, value, path)
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if t.bf16 and stage > 0:
        _fill(settings, "data_types.grad_accum_dtype", "fp32", path)
    # The optimizer below is torch's own, on the CPU too where it is offloaded.
    settings["zero_allow_untested_optimizer"] = True
    settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def _fill(settings: dict[str, Any], key: str, value: Any, path: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    found = settings.get(name, "auto")
    if found not in ("auto", value):
        raise ConfigError(
            f'{path}: {key} is {found}, but the configuration says {value}; write "auto"'
        )
    settings[name] = value


class _ModelParallelUnit:
    """The mesh in the words that DeepSpeed asks for it."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self.groups: dict[str, Any] = {
            name: getattr(mesh, name).group or alone for name in ("tp", "dp")
        }

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["tp"]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["dp"]


def _load_library() -> Any:
    try:
        import deepspeed
        import deepspeed.ops
    except ModuleNotFoundError:
        raise ConfigError(
            "--deepspeed needs the library: pip install 'megadiff[deepspeed]'"
        ) from None
    # Its shared-memory collectives for CPUs compile for minutes at first use; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine:
    """The model on DeepSpeed's engine; see `megadiff.training.engine.Engine`."""

    def __init__(self, config: Config, env: Environment) -> None:
        deepspeed = _load_library()
        self.config, self.device, self.mesh = config, env.device, env.mesh
        self.notes: list[str] = []
        self.model = build_model(config, env.mesh, dtype=env.dtype, device=env.device)
        initialize(self.model, config.training.seed)
        for parameter in self.model.parameters():
            sharded = any(s.copies == 1 for s in record_of(parameter).sections)
            parameter.tensor_model_parallel = parameter.model_parallel = (  # type: ignore[attr-defined]
                sharded and env.mesh.tp.size > 1
            )
        settings = read_settings(config, env.mesh.world_size)
        self.stage: int = settings.get("zero_optimization", {}).get("stage", 0)
        if self.stage == 0 and config.training.bf16:
            logger.info(
                "DeepSpeed accumulates gradients in bfloat16 at ZeRO stage 0; 1 uses float32"
            )
        self.engine, *_ = deepspeed.initialize(
            model=self.model.chunks[0],
            optimizer=_torch_optimizer(self.model, config.optimizer),
            config=settings,
            mpu=_ModelParallelUnit(env.mesh),
            dist_init_required=False,
        )
        self.optimizer = ZeroState(self.engine, self.model, self.stage, config, env.mesh)

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        if len(batches) != self.engine.gradient_accumulation_steps():  # a batch that ramps up
            size = self.engine.train_micro_batch_size_per_gpu() * self.mesh.dp.size
            self.engine.set_train_batch_size(len(batches) * size)
        # DeepSpeed averages gradients over data ranks; the loss is a mean over tokens already.
        factor = self.mesh.dp.size / tokens
        sums = []
        for index, batch in enumerate(batches):
            total = self._sum_of_losses(batch)
            self.engine.backward(total * factor, scale_wrt_gas=False)
            sums.append(total.detach())
            if index + 1 < len(batches):
                self.engine.step()  # counts the micro-batch
        return torch.stack(sums).sum(dtype=torch.float64) / tokens

    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["multiplier"]
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        scale = torch.tensor(float(self.optimizer.loss_scale), device=self.device)
        norm = self._gradient_norm()
        self.engine.step()
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        self.optimizer.steps += 1
        self.optimizer.updates += not skipped
        return StepResult(
            torch.as_tensor(float("nan") if norm is None else norm, device=self.device).float(),
            torch.tensor(skipped, device=self.device),
            scale,
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([self._sum_of_losses(b) for b in batches]).sum(dtype=torch.float64)

    def _sum_of_losses(self, batch: MicroBatch) -> Tensor:
        batch = to_device(batch, self.device)
        losses = self.engine(batch.tokens, batch.positions, batch.labels, batch.cu_seqlens)
        return sum_of_losses(losses, batch.loss_mask)

    def _gradient_norm(self) -> Tensor | None:
        """Stage 0 in float32 reports no norm: ours, each element once."""
        if not isinstance(self.engine.optimizer, torch.optim.Optimizer):
            return None
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.model.parameters():
            record = record_of(parameter)
            for section in record.sections:
                if section.copy_index == 0 and parameter.grad is not None:
                    part = local_view(parameter.grad, section, record.dim)
                    square += part.double().square().sum()
        if self.mesh.model.group is not None:
            dist.all_reduce(square, group=self.mesh.model.group)
        return square.sqrt()

    def weights(self, replica: int = 0, replicas: int = 1) -> Tensors:
        """See `Engine.weights`. At stage 3 a rank holds a flat part of every parameter."""
        if self.stage < 3:
            return module_tensors(self.model, replica, replicas)
        tensors: Tensors = {}
        for parameter in self.model.parameters():
            start, values = _stage3_part(parameter, parameter.ds_tensor, self.mesh)  # type: ignore[attr-defined]
            shape = parameter.ds_shape  # type: ignore[attr-defined]
            for section, piece in flat_pieces(
                record_of(parameter), shape, start, start + values.numel(), values
            ):
                add_piece(tensors, section.name, section.shape, piece)
        return tensors


def _torch_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's AdamW or SGD with one group for each rule of decay and learning rate."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        rules = {group_rule(s.group, config) for s in record_of(parameter).sections}
        if len(rules) > 1:
            names = ", ".join(s.name for s in record_of(parameter).sections)
            raise ConfigError(f"DeepSpeed can not treat the parts of one tensor apart: {names}")
        groups.setdefault(rules.pop() if rules else (False, 1.0), []).append(parameter)
    options = [
        {"params": members, "decays": decays, "multiplier": multiplier}
        for (decays, multiplier), members in groups.items()
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(options, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(options, lr=config.lr, betas=betas, eps=config.adam_eps)


def _stage3_part(parameter: nn.Parameter, flat: Tensor, mesh: ParallelMesh) -> tuple[int, Tensor]:
    """Where in the flattened parameter this rank's partition begins, and it without padding."""
    total = parameter.ds_numel  # type: ignore[attr-defined]
    size = -(-total // mesh.dp.size)
    start = min(mesh.dp.rank * size, total)
    return start, flat[: min(size, total - start)]


class ZeroState:
    """DeepSpeed's optimizer state as the checkpoint code asks for it (`optim.Optimizer`).

    The state is filled with zeros at the start, where torch's optimizers would wait for their first
    step, so that a checkpoint can be loaded before it.
    """

    def __init__(
        self, engine: Any, model: nn.Module, stage: int, config: Config, mesh: ParallelMesh
    ) -> None:
        self.zero, self.model, self.stage, self.mesh = engine.optimizer, model, stage, mesh
        self.steps = self.updates = 0  # all of them, and those that were not skipped
        self.main_weights = config.training.dtype != "float32"
        self.keys = _STATE_KEYS[config.optimizer.optimizer]
        if config.optimizer.optimizer == "sgd" and not config.optimizer.sgd_momentum:
            self.keys = ()
        self.inner = self.zero if self._plain else self.zero.optimizer
        for tensor in self._state_tensors():
            state = self.inner.state[tensor]
            if config.optimizer.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32)
            for key in self.keys:
                state[key] = torch.zeros_like(tensor)
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._lazy_init_hp_params_optimizer_state()

    @property
    def _plain(self) -> bool:
        return isinstance(self.zero, torch.optim.Optimizer)

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
        for parameter, key, start, values, write in self._fragments():
            if key != "main_weight" or self.main_weights:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield StatePiece("", parameter, shape, key, start, values, write)

    def _fragments(self) -> Iterator[tuple[nn.Parameter, str, int, Tensor, bool]]:
        """(parameter, key, first element, flat values, whether this rank writes them)."""
        keys = ("main_weight", *self.keys)
        if self._plain:
            for parameter in self.model.parameters():
                for key in self.keys:
                    values = self.inner.state[parameter][key].view(-1)
                    yield parameter, key, 0, values, self.mesh.dp.rank == 0
            return
        if hasattr(self.zero, "fp32_groups_flat"):  # float16 without partitions
            yield from self._whole_groups(keys)
            return
        for parameter in self.model.parameters():
            if self.stage == 3:
                for key in keys:
                    flat, _ = self.zero._get_fp32_opt_state_partition(
                        parameter, False, None if key == "main_weight" else key
                    )
                    start, values = _stage3_part(parameter, flat, self.mesh)
                    if values.numel():
                        yield parameter, key, start, values, True
            elif parameter._hp_mapping is not None:  # type: ignore[attr-defined]
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                start = mapping.lp_fragment_address.start
                yield parameter, "main_weight", start, mapping.hp_fragment.detach(), True
                for key in self.keys:
                    yield parameter, key, start, mapping.get_hp_fragment(key), True

    def _whole_groups(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[nn.Parameter, str, int, Tensor, bool]]:
        write = self.mesh.dp.rank == 0
        for members, flat in zip(self.zero.fp16_groups, self.zero.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in members:
                for key in keys:
                    whole = flat.detach() if key == "main_weight" else self.inner.state[flat][key]
                    yield parameter, key, 0, whole[offset : offset + parameter.numel()], write
                offset += parameter.numel()

    def state_scalars(self) -> dict[str, float]:
        scalars = {"steps": float(self.steps), "updates": float(self.updates)}
        return scalars | ({"loss_scale": self.loss_scale} if self.loss_scale != 1.0 else {})

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self.steps, self.updates = int(scalars["steps"]), int(scalars["updates"])
        for tensor in self._state_tensors():
            if "step" in self.inner.state[tensor]:
                self.inner.state[tensor]["step"].fill_(scalars["updates"])

    def wait_for_parameters(self) -> None:
        """DeepSpeed's parameters are whole when its step returns."""

    @torch.no_grad()
    def parameters_from_main_weights(self) -> None:
        """Weights were loaded beside their main weights; without those, they are the weights."""
        if not self.main_weights:
            self.main_weights_from_parameters()

    @torch.no_grad()
    def main_weights_from_parameters(self) -> None:
        """After parameters were loaded or set without optimizer state."""
        for parameter, key, start, values, _ in self._fragments():
            if key != "main_weight":
                continue
            if self.stage == 3:
                _, own = _stage3_part(parameter, parameter.ds_tensor, self.mesh)  # type: ignore[attr-defined]
            else:
                own = parameter.detach().view(-1)[start : start + values.numel()]
            values.copy_(own)
