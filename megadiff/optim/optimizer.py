"""The optimizer: main weights, global gradient norm, clipping and one fused update per group.

Every rank updates the flat ranges that it owns (`buckets`, `shards`). The hot path never waits for
the device: norm, overflow, clip coefficient and loss scale stay there, and a step whose gradient is
not finite changes nothing on any rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config import OptimizerConfig
from megadiff.optim.buckets import Buckets
from megadiff.optim.groups import group_rule, update_rule
from megadiff.optim.matrices import WholeMatrices
from megadiff.optim.muon import is_muon_matrix, muon_step
from megadiff.optim.scaler import LossScaler
from megadiff.optim.shards import Range, Shard, StatePiece, Treatment
from megadiff.parallel.apex import (
    NOT_INSTALLED,
    apex_adamw,
    everywhere,
    find_apex_adam,
    milliseconds,
)
from megadiff.parallel.parameter import Group, Section, record_of

_STATE_KEYS = {
    "adam": ["exp_avg", "exp_avg_sq"],
    "sgd": ["momentum_buffer"],
    "muon": ["momentum_buffer"],
}


@dataclass(frozen=True)
class StepResult:
    """Of one step, on the device: reading it waits for the step to end."""

    grad_norm: Tensor  # float64, before clipping, unscaled; not finite if any gradient is not
    skipped: Tensor  # bool: the gradient was not finite and nothing changed
    loss_scale: Tensor  # float32, of this step; 1 but for float16


class Optimizer:
    """AdamW, SGD or Muon over the parameters of `modules` (the model, or a list of its chunks).

    `data_parallel_group`: ranks that hold the same parameters and see other data (data and context
    parallel); gradients are summed over it. `model_parallel_group`: ranks that hold the other parts
    of the model (tensor x pipeline). `tensor_parallel_group`: ranks that hold the other parts of a
    matrix, for Muon. None where there is one rank. `ties`: see `Buckets`.

    A step: `zero_grad(micro_batches)`, that many backward passes of `scale_loss(loss)`, and
    `step(learning_rate)`.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        config: OptimizerConfig,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        model_parallel_group: dist.ProcessGroup | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        ties: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        alignment: int = 64,
        bucket_size: int | None = None,
    ) -> None:
        self.config = config
        self._adam_constants = {
            "beta1": config.adam_beta1, "beta2": config.adam_beta2, "eps": config.adam_eps
        }  # fmt: skip
        several = isinstance(modules, (nn.ModuleList, Sequence))
        chunks: list[nn.Module] = list(modules) if several else [modules]
        self.buckets = Buckets(
            [(_name(name, p), p) for chunk in chunks for name, p in chunk.named_parameters()],
            group=data_parallel_group,
            sharded=config.use_distributed_optimizer,
            overlap_reduce=config.overlap_grad_reduce,
            float32_gradients=config.accumulate_allreduce_grads_in_fp32,
            bucket_size=bucket_size,
            alignment=alignment,
            ties=ties,
        )
        if config.overlap_param_gather:
            self.buckets.wait_in_forward(chunks)
        groups = (self.buckets.group if self.buckets.sharded else None, model_parallel_group)
        self._norm_groups = [group for group in groups if group is not None]
        self.shards = [
            Shard(bucket, config.main_weights, self._treatment, self._state_types)
            for bucket in self.buckets.buckets
        ]
        self._ranges = [r for shard in self.shards for r in shard.ranges]
        self._muon_ranges = [r for r in self._ranges if r.treatment.rule == "muon"]
        self._apex: Callable[..., None] | None = None
        own = config.optimizer == "adam" and config.adam_kernel == "auto"
        self._one_pass = [s for s in self.shards if own and s.in_one_pass]
        self._others = [s for s in self.shards if s not in self._one_pass]
        self._alike: dict[tuple[str, Group, torch.dtype], list[Range]] = {}  # of one kernel
        for shard in self._others:
            for r in shard.ranges:
                if r.treatment.rule != "muon":
                    alike = (r.treatment.rule, r.treatment.group, r.dtype)
                    self._alike.setdefault(alike, []).append(r)
        self._matrices = None
        if config.optimizer == "muon":
            self._matrices = WholeMatrices(
                self.shards, self.buckets, tensor_parallel_group, is_muon_matrix
            )
        device = self.buckets.buckets[0].parameters.device
        counted = [float(r.treatment.counted) for r in self._ranges]
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)
        self.steps = 0
        self.updates = torch.zeros((), dtype=torch.float32, device=device)  # steps not skipped
        self._one = torch.ones((), dtype=torch.float32, device=device)
        half = any(b.parameters.dtype == torch.float16 for b in self.buckets.buckets)
        self.scaler = LossScaler(config, device) if half else None
        self.adam_kernel = "" if config.optimizer == "sgd" else self._choose_adam_kernel()
        if self._one_pass:
            self.adam_kernel = f"16-bit parameters in one pass; others by {self.adam_kernel}"

    def _treatment(self, section: Section) -> Treatment:
        rule = update_rule(section, self.config)
        return Treatment(rule, section.group, section.copy_index == 0, section.copies)

    def _state_types(self, rule: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if rule == "sgd" and not self.config.sgd_momentum:
            return {}
        types = dict.fromkeys(_STATE_KEYS[rule], torch.promote_types(dtype, torch.float32))
        if dtype == torch.bfloat16:
            c = self.config
            kept = {"exp_avg": c.exp_avg_dtype, "exp_avg_sq": c.exp_avg_sq_dtype}
            types |= {key: dtype for key in types if kept.get(key) == "bf16"}
        return types

    @torch.no_grad()
    def _choose_adam_kernel(self, elements: int = 1 << 24) -> str:
        """Which AdamW runs, and why; Apex's unless it is not there, not asked for or not faster.

        Where 16-bit parameters are updated in one pass, this concerns the others only.
        """
        asked = self.config.adam_kernel
        if asked == "torch":
            return "AdamW: torch's kernel"
        kernel = everywhere(find_apex_adam(), self.updates.device)
        if kernel is None:
            return f"AdamW: torch's kernel; {NOT_INSTALLED}"
        self._apex = kernel
        if asked == "apex":
            return "AdamW: NVIDIA Apex's kernel"
        flat = [torch.ones(elements, device=self.updates.device) for _ in range(4)]
        state = {"exp_avg": flat[0], "exp_avg_sq": flat[1]}
        trial = Range(Treatment("adam", "matrix", True), 0, elements, torch.float32, state, flat[3])
        trial.weights, trial.gradient, trial.moments = *flat[2:], state

        def update(apex: Callable[..., None] | None) -> None:
            self._apex = apex
            rates = {"lr": 1e-3, "weight_decay": 0.1}
            self._adam([trial], rates, self._one.double(), self._one < 0)

        times = milliseconds([lambda: update(kernel), lambda: update(None)], self.updates.device)
        faster = times[0] < times[1]
        self._apex = kernel if faster else None
        return (
            f"AdamW: {'NVIDIA Apex' if faster else 'torch'}'s kernel; {elements:,} elements take "
            f"Apex {times[0]:.3f} ms and torch {times[1]:.3f} ms"
        )

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Forget the gradients; the next step sums those of `micro_batches` backward passes."""
        self.buckets.zero(micro_batches)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What to call backward on: `loss` times the loss scale of float16, else `loss` itself."""
        return loss if self.scaler is None else loss * self.scaler.scale

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float | None = None) -> StepResult:
        """Clip and update. `weight_decay` overrides the configuration's, for a decay schedule."""
        self.buckets.finish()
        self.buckets.wait()
        scale = self._one if self.scaler is None else self.scaler.scale.clone()
        scaled_norm = self._gradient_norm()
        skipped = ~scaled_norm.isfinite()
        norm = scaled_norm / scale
        divisor = scale.double()
        if self.config.clip_grad > 0:
            divisor = divisor * (norm / self.config.clip_grad).clamp(min=1.0)
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.updates += (~skipped).float()
        how = (learning_rate, decay, divisor, skipped)
        self._adam_in_one_pass(*how)
        for shard in self._others:
            shard.begin_update()
        for (rule, group, _), ranges in self._alike.items():
            update = self._adam if rule == "adam" else self._sgd
            update(ranges, self._of_group(group, learning_rate, decay), divisor, skipped)
        if self._matrices is not None:
            muon_step(self._muon_ranges, self._matrices, self.config, *how)
        if self.scaler is not None:
            self.scaler.update(skipped)
        for shard in self._others:
            shard.end_update(self.steps)
        self.steps += 1
        self._gather()
        return StepResult(norm, skipped, scale)

    def _gradient_norm(self) -> Tensor:
        """L2 norm over the whole model, each element once; float64 over the norms of ranges.

        Copies have no part in it, but one that is not finite makes the norm so: 0 x inf is NaN.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.updates.device)
        if self._ranges:
            gradients, dtype = [r.reduced for r in self._ranges], self._ranges[0].dtype
            norms = torch._foreach_norm(gradients, 2, dtype)
            square = (torch.stack(norms).double().square() * self._counted).sum()
        for group in self._norm_groups:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    def _adam_in_one_pass(self, lr: float, decay: float, divisor: Tensor, skipped: Tensor) -> None:
        if not self._one_pass:
            return
        c, t = self.config, self.updates.double()
        scalars = torch.stack(
            [
                (~skipped).double(),
                1 / divisor,
                1 / (1 - c.adam_beta1**t),
                (1 - c.adam_beta2**t).rsqrt(),
            ]
        ).float()
        for shard in self._one_pass:
            shard.adamw(
                scalars, self.steps, lambda g: self._of_group(g, lr, decay) | self._adam_constants
            )

    def _of_group(self, group: Group, lr: float, decay: float) -> dict[str, float]:
        decays, multiplier = group_rule(group, self.config)
        return {"lr": lr * multiplier, "weight_decay": decay if decays else 0.0}

    def _adam(
        self, ranges: list[Range], rates: dict[str, float], divisor: Tensor, skipped: Tensor
    ) -> None:
        tensors = (
            [r.weights for r in ranges],
            [r.gradient for r in ranges],
            [r.moments["exp_avg"] for r in ranges],
            [r.moments["exp_avg_sq"] for r in ranges],
        )
        constants = rates | self._adam_constants
        if self._apex is not None and ranges[0].dtype == torch.float32:
            apex_adamw(self._apex, tensors, self.updates, divisor, skipped, **constants)
            return
        torch._fused_adamw_(
            *tensors,
            [],
            [self.updates] * len(ranges),
            amsgrad=False,
            maximize=False,
            grad_scale=_kernel_scale(ranges, divisor),
            found_inf=skipped.float(),
            **constants,
        )

    def _sgd(
        self, ranges: list[Range], rates: dict[str, float], divisor: Tensor, skipped: Tensor
    ) -> None:
        torch._fused_sgd_(
            [r.weights for r in ranges],
            [r.gradient for r in ranges],
            [r.state["momentum_buffer"] for r in ranges] if self.config.sgd_momentum else [],
            momentum=self.config.sgd_momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=_kernel_scale(ranges, divisor),
            found_inf=skipped.float(),
            **rates,
        )

    def _gather(self) -> None:
        """Bring the ranges that other ranks own into this rank's parameters."""
        self.buckets.gather()
        if not self.config.overlap_param_gather:
            self.buckets.wait()

    def wait_for_parameters(self) -> None:
        """Before anything but forward reads parameters, where `overlap_param_gather` is on."""
        self.buckets.wait()

    def state_pieces(self) -> Iterator[StatePiece]:
        """All flat state of this rank; main weights only where they are not the parameters.

        Unsharded, every data-parallel rank yields the same pieces and one of them is to write each.
        """
        for shard in self.shards:
            yield from shard.pieces(self.buckets.writes)

    def state_scalars(self) -> dict[str, float]:
        """The numbers beside the pieces, for JSON; waits for the device."""
        scalars = {"steps": self.steps, "updates": self.updates.item()}
        return scalars | (self.scaler.state() if self.scaler is not None else {})

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Undo `state_scalars`."""
        self.steps = int(scalars["steps"])
        self.updates.fill_(scalars["updates"])
        if self.scaler is not None and "loss_scale" in scalars:
            self.scaler.load(scalars)

    @torch.no_grad()
    def parameters_from_main_weights(self) -> None:
        """After pieces were loaded: round the main weights into the parameters of all ranks."""
        for shard in self.shards:
            shard.main.restore()
        self._gather()

    @torch.no_grad()
    def main_weights_from_parameters(self) -> None:
        """After parameters were loaded or set without optimizer state."""
        for shard in self.shards:
            shard.main.reset()


def _kernel_scale(ranges: Sequence[Range], divisor: Tensor) -> Tensor | None:
    """`divisor` for the fused kernels, which read float32; wider gradients are divided here."""
    if ranges[0].dtype != torch.float64:
        return divisor.float()
    for r in ranges:
        r.gradient.div_(divisor)
    return None


def _name(name: str, parameter: nn.Parameter) -> str:
    """A parameter goes by its section's global name, or by its module path if it has several."""
    sections = record_of(parameter).sections
    return sections[0].name if len(sections) == 1 else name
