"""DeepSpeed behind the loop: ZeRO 0 to 3 and offload, with tensor and data parallelism.

DeepSpeed partitions weights, gradients and optimizer state, accumulates and clips; the loss, the
schedule, the logs and the checkpoints are the native engine's. Checkpoints are in megadiff's own
format: any split opens them, and either engine resumes what the other saved.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.checkpoint.state import Tensors, module_tensors
from megadiff.config import Config, ConfigError, OptimizerConfig, data_parallel_size
from megadiff.data.loader import MicroBatch
from megadiff.libraries import need_library
from megadiff.models.build import build_model
from megadiff.optim.groups import group_rule
from megadiff.optim.optimizer import StepResult
from megadiff.optim.shards import StatePiece
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from megadiff.parallel.pipeline import sum_of_losses
from megadiff.training.checkpointing import add_flat
from megadiff.training.engine import to_device
from megadiff.training.setup import Environment
from megadiff.training.zero_state import ZeroState, local_shape, stage3_part

_KEYS = {
    "": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "gradient_clipping bf16 fp16 zero_optimization data_types communication_data_type "
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown memory_breakdown "
        "dump_state comms_logger flops_profiler csv_monitor tensorboard"
    ),
    "bf16": "enabled",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    "data_types": "grad_accum_dtype",
    "zero_optimization": (
        "stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size "
        "allgather_partitions allgather_bucket_size sub_group_size zero_hpz_partition_size "
        "offload_optimizer offload_param ignore_unused_parameters stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.offload_optimizer": "device pin_memory",
    "zero_optimization.offload_param": "device pin_memory",
}
"""What a file may set. Of the others some change the training behind the loop's back, some change
what an optimizer's state means (round_robin_gradients: in 0.19.8 its addresses are wrong, and so
would be every checkpoint), and DeepSpeed passes over what it does not know."""


def read_settings(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the file of `--deepspeed-config`, filled from megadiff's.

    What is missing or "auto" is filled. Raises ConfigError for a file that can not be read, for
    values that contradict the configuration, and for keys that are not in `_KEYS`.
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
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not a JSON object")
    for section in ("optimizer", "scheduler"):
        if section in settings:
            raise ConfigError(
                f"{path}: take out {section!r}; optimizer and schedule are megadiff's flags (--lr, "
                "--lr-decay-style, --weight-decay, ...)"
            )
    _refuse_other_keys(settings, path)
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
        # The optimizer is torch's own, on the CPU too where it is offloaded.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
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
    stage = _section(settings, "zero_optimization", path).setdefault("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ConfigError(f"{path}: zero_optimization.stage is {stage!r}, not 0, 1, 2 or 3")
    if stage == 0 and t.dtype != "float32" and config.parallel.tensor_model_parallel_size > 1:
        raise ConfigError(  # seen in 0.19.8; at stage 1 and above, and in float32, it is right
            f"{path}: at ZeRO stage 0 in 16 bits DeepSpeed's gradient norm leaves out the tensor "
            "ranks but one; use stage 1"
        )
    if t.bf16 and stage > 0:
        _fill(settings, "data_types.grad_accum_dtype", "fp32", path)
    return settings


def _refuse_other_keys(settings: dict[str, Any], path: str) -> None:
    for name, known in _KEYS.items():
        section = settings
        for key in filter(None, name.split(".")):
            section = _section(section, key, path) if key in section else {}
        for key in section:
            if key not in known.split():
                raise ConfigError(
                    f"{path}: take out {'.'.join(filter(None, (name, key)))}: it is unknown, or "
                    "not held to the native engine"
                )
        if section.get("device", "cpu") not in ("cpu", "none"):
            raise ConfigError(f"{path}: {name}.device is {section['device']!r}, not cpu or none")


def _section(settings: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    section = settings.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} is {section!r}, not an object")
    return section


def _fill(settings: dict[str, Any], key: str, value: Any, path: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        settings = _section(settings, section, path)
    found = settings.get(name, "auto")
    if found not in ("auto", value):
        raise ConfigError(
            f'{path}: {key} is {found!r}, but the configuration says {value}; write "auto"'
        )
    settings[name] = value


def _model_parallel_unit(mesh: ParallelMesh) -> SimpleNamespace:
    """The mesh in the words that DeepSpeed asks for it."""
    assert mesh.device_mesh is not None
    unit = SimpleNamespace()
    for word, name in (("model", "tp"), ("tensor_model", "tp"), ("data", "dp")):
        axis: Axis = getattr(mesh, name)
        group = mesh.device_mesh.get_group(name)  # also where the axis, of one rank, has none
        for what, value in (("rank", axis.rank), ("world_size", axis.size), ("group", group)):
            setattr(unit, f"get_{word}_parallel_{what}", lambda value=value: value)
    return unit


def _load_library() -> Any:
    deepspeed = need_library("deepspeed", "--deepspeed", "deepspeed")
    # Its shared-memory collectives for CPUs compile for minutes at first use; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator: Any = deepspeed.get_accelerator()
    if accelerator.device_name() == "cpu":  # it wants float16's own instructions; torch needs none
        accelerator.is_fp16_supported = lambda: True
    os.environ.setdefault("LOCAL_RANK", "0")  # it insists, for a single process too
    return deepspeed


class DeepSpeedEngine:
    """The model on DeepSpeed's engine; see `megadiff.training.engine.Engine`."""

    def __init__(self, config: Config, env: Environment) -> None:
        deepspeed = _load_library()
        self.config, self.device, self.mesh = config, env.device, env.mesh
        self.model = build_model(config, env.mesh, dtype=env.dtype, device=env.device)
        initialize(self.model, config.training.seed)
        wide = {p for p in self.model.parameters() if p.dtype != env.dtype}
        for parameter in self.model.parameters():
            sharded = any(s.copies == 1 for s in record_of(parameter).sections)
            parameter.tensor_model_parallel = parameter.model_parallel = (  # type: ignore[attr-defined]
                sharded and env.mesh.tp.size > 1
            )
        settings = read_settings(config, env.mesh.world_size)
        self.stage: int = settings["zero_optimization"]["stage"]
        self.notes: list[str] = []
        if self.stage == 0 and config.training.bf16:
            self.notes.append(
                "DeepSpeed accumulates gradients in bfloat16 at ZeRO stage 0; 1 uses float32"
            )
        try:
            self.engine, *_ = deepspeed.initialize(
                model=self.model.chunks[0],
                optimizer=_torch_optimizer(self.model, config.optimizer),
                config=settings,
                mpu=_model_parallel_unit(env.mesh),
                dist_init_required=False,
            )
        except (
            ValueError, TypeError, AssertionError, NotImplementedError,
            deepspeed.runtime.config.DeepSpeedConfigError,
        ) as error:  # fmt: skip
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{config.training.deepspeed_config}: DeepSpeed refuses it: {reason}"
            ) from error
        self.optimizer = ZeroState(self.engine, self.model, wide, self.stage, config, env.mesh)

    def forward_backward(self, batches: Sequence[MicroBatch], tokens: int) -> Tensor:
        if len(batches) != self.engine.gradient_accumulation_steps():  # a batch that ramps up
            size = self.engine.train_micro_batch_size_per_gpu() * self.mesh.dp.size
            self.engine.set_train_batch_size(len(batches) * size)
            self.engine.micro_steps = 0  # a step ends where this is a multiple of their number
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
        skipped = norm is not None and not bool(norm.isfinite())
        if skipped:  # in float32 without partitions DeepSpeed would take the step
            self.engine.zero_grad()
            self.engine.micro_steps += 1
            self.engine.global_steps += 1
            self.engine.skipped_steps += 1
            self.engine.global_samples += self.engine.train_batch_size()
        else:
            self.engine.step()
            skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        if skipped and self.stage in (1, 2):  # offloaded, they would stay and spoil every step
            kept = getattr(self.engine.optimizer, "averaged_gradients", {})  # not of bf16 at ZeRO 1
            for group in kept:
                kept[group] = None
        if norm is None:
            norm = self.engine.get_global_grad_norm()
            if self.stage == 3 and norm is not None:  # divided by the scale after this step
                norm = float(norm) * self.optimizer.loss_scale / scale.item()
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

    def weights(self) -> Tensors:
        """See `Engine.weights`. At stage 3 a rank holds a flat part of every parameter.

        What the native engine keeps in float32 (norms, lambda vectors) is written from its main
        weight, and has no other: checkpoints of both engines hold the same tensors.
        """
        wide, pieces = self.optimizer.wide, self.optimizer.wide_weights()
        tensors: Tensors = {}
        if self.stage < 3:
            names = {section.name for p in wide for section in record_of(p).sections}
            tensors = module_tensors(self.model, self.mesh.dp.rank, self.mesh.dp.size)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
        else:
            for p in self.model.parameters():
                if p not in wide:
                    start, values = stage3_part(p, p.ds_tensor, self.mesh)  # type: ignore[attr-defined]
                    pieces.append(StatePiece(p, local_shape(p), "weight", start, values, True))
        for piece in pieces:
            add_flat(tensors, piece)
        return tensors


def optimizer_groups(
    model: nn.Module, config: OptimizerConfig
) -> dict[tuple[bool, float], list[nn.Parameter]]:
    """The parameters by their rule of decay and learning rate, in the optimizer's order."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        rules = {group_rule(s.group, config) for s in record_of(parameter).sections}
        if len(rules) > 1:
            names = ", ".join(s.name for s in record_of(parameter).sections)
            raise ConfigError(f"DeepSpeed can not treat the parts of one tensor apart: {names}")
        groups.setdefault(rules.pop() if rules else (False, 1.0), []).append(parameter)
    return groups


def _torch_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's AdamW or SGD with one group for each rule of decay and learning rate."""
    options = [
        {"params": members, "decays": decays, "multiplier": multiplier}
        for (decays, multiplier), members in optimizer_groups(model, config).items()
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(options, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(options, lr=config.lr, betas=betas, eps=config.adam_eps)
