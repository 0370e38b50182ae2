"""The optimizer: main weights, global gradient norm, clipping and one fused update per group.

Every rank updates the flat ranges that it owns (`buckets`). Sections of a parameter say to which
group they belong; neighbouring ranges of one group are updated together. The hot path never waits
for the device: norm, overflow and clip coefficient stay there, and a step whose gradient is not
finite changes nothing on any rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config import OptimizerConfig
from megadiff.optim.buckets import Bucket, Buckets, Slot
from megadiff.parallel.parameter import Group, Section, record_of


@dataclass(frozen=True)
class StepResult:
    """Of one step, on the device: reading it waits for the step to end."""

    grad_norm: Tensor  # float, before clipping, unscaled; not finite if any gradient is not
    skipped: Tensor  # bool: the gradient was not finite and nothing changed


@dataclass(frozen=True)
class StatePiece:
    """A flat piece of optimizer state: elements `[start, start + len(values))` of a parameter.

    `start` counts in the flattened local parameter. `values` is a view: writing to it loads state.
    """

    name: str
    parameter: nn.Parameter
    key: str  # "main_weight", "exp_avg", "exp_avg_sq", "momentum_buffer"
    start: int
    values: Tensor


@dataclass(frozen=True)
class _Range:
    """Neighbouring elements of a shard that are updated alike; positions in the shard."""

    start: int
    end: int
    group: Group
    counted: bool  # in the gradient norm


class _Shard:
    """What this rank owns of a bucket: main weights and moments, cut into ranges."""

    def __init__(self, bucket: Bucket, state_keys: Sequence[str]) -> None:
        self.bucket = bucket
        own = bucket.own_parameters
        dtype = torch.promote_types(own.dtype, torch.float32)
        self.main = own if own.dtype == dtype else own.to(dtype)
        self.state = {key: torch.zeros_like(self.main) for key in state_keys}
        self.ranges = list(_shard_ranges(bucket))
        self.main_cuts = self._cut(self.main)
        self.state_cuts = [self._cut(flat) for flat in self.state.values()]
        self._gradient_cuts = self._cut(bucket.own_gradients)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[r.start : r.end] for r in self.ranges]

    def gradient_cuts(self) -> list[Tensor]:
        """The gradient of each range, in the dtype of the main weights."""
        if self.bucket.gradients.dtype == self.main.dtype:
            return self._gradient_cuts
        return self._cut(self.bucket.own_gradients.to(self.main.dtype))

    @property
    def has_main_weights(self) -> bool:
        return self.main.dtype != self.bucket.parameters.dtype

    def publish(self) -> None:
        """Round the main weights into the parameters."""
        if self.has_main_weights:
            self.bucket.own_parameters.copy_(self.main)


class Optimizer:
    """AdamW or SGD over the parameters of `modules` (the model, or its chunks on this stage).

    `data_parallel_group`: ranks that hold the same parameters and see other data (data and context
    parallel); gradients are summed over it. `model_parallel_group`: ranks that hold the other parts
    of the model (tensor x pipeline). None where there is one rank. `ties`: see `Buckets`.

    A step: `zero_grad(micro_batches)`, that many backward passes, `step(learning_rate)`.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        config: OptimizerConfig,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        model_parallel_group: dist.ProcessGroup | None = None,
        ties: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        alignment: int = 64,
        bucket_size: int = 40_000_000,
    ) -> None:
        self.config = config
        chunks = [modules] if isinstance(modules, nn.Module) else list(modules)
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
        self._norm_groups = [
            group
            for group in (
                self.buckets.group if self.buckets.sharded else None,
                model_parallel_group,
            )
            if group is not None and dist.get_world_size(group) > 1
        ]
        if config.optimizer == "adam":
            self._state_keys = ["exp_avg", "exp_avg_sq"]
        else:
            self._state_keys = ["momentum_buffer"] if config.sgd_momentum else []
        self.shards = [_Shard(bucket, self._state_keys) for bucket in self.buckets.buckets]
        device = self.shards[0].main.device
        self.updates = torch.zeros((), dtype=torch.float32, device=device)  # steps not skipped

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Forget the gradients; the next step sums those of `micro_batches` backward passes."""
        self.buckets.zero(micro_batches)

    def finish_gradients(self) -> None:
        """Wait for the sums over data-parallel ranks and ties; `step` does so by itself."""
        self.buckets.finish()

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float | None = None) -> StepResult:
        """Clip and update. `weight_decay` overrides the configuration's, for a decay schedule."""
        self.finish_gradients()
        gradients = [shard.gradient_cuts() for shard in self.shards]
        norm = self._gradient_norm(gradients)
        skipped = ~norm.isfinite()
        divisor = torch.ones_like(norm)
        if self.config.clip_grad > 0:
            divisor = (norm / self.config.clip_grad).clamp(min=1.0)
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        self.updates += (~skipped).float()
        for dtype in dict.fromkeys(shard.main.dtype for shard in self.shards):
            self._update(dtype, gradients, divisor, skipped, learning_rate, decay)
        for shard in self.shards:
            shard.publish()
        self.buckets.gather()
        self.buckets.wait()
        return StepResult(norm, skipped)

    def _gradient_norm(self, gradients: Sequence[list[Tensor]]) -> Tensor:
        """L2 norm over the whole model, each element once; float64 over the norms of ranges."""
        counted = [
            gradient
            for shard, cuts in zip(self.shards, gradients, strict=True)
            for gradient, r in zip(cuts, shard.ranges, strict=True)
            if r.counted
        ]
        if counted:
            square = torch.stack([n.double() for n in torch._foreach_norm(counted)]).square().sum()
        else:
            square = torch.zeros((), dtype=torch.float64, device=self.updates.device)
        for group in self._norm_groups:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    def _update(
        self,
        dtype: torch.dtype,
        gradients: Sequence[list[Tensor]],
        divisor: Tensor,
        skipped: Tensor,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Update all main weights of `dtype` with `gradients / divisor`, unless `skipped`."""
        scale = divisor.float()
        if dtype == torch.float64:  # the fused kernels read their scale as float32
            for shard, cuts in zip(self.shards, gradients, strict=True):
                if shard.main.dtype == dtype:
                    for gradient in cuts:
                        gradient.div_(divisor)
            scale = None
        for group in _GROUPS:
            views = [
                (shard.main_cuts[i], gradient, *(cuts[i] for cuts in shard.state_cuts))
                for shard, gradient_cuts in zip(self.shards, gradients, strict=True)
                if shard.main.dtype == dtype
                for i, gradient in enumerate(gradient_cuts)
                if shard.ranges[i].group == group
            ]
            if views:
                decays, multiplier = group_rule(group, self.config)
                self._fused(
                    [list(column) for column in zip(*views, strict=True)],
                    lr=learning_rate * multiplier,
                    weight_decay=weight_decay if decays else 0.0,
                    maximize=False,
                    grad_scale=scale,
                    found_inf=skipped.float(),
                )

    def _fused(self, views: list[list[Tensor]], **common: Any) -> None:
        config = self.config
        if config.optimizer == "adam":
            weights, gradients, first, second = views
            torch._fused_adamw_(
                weights,
                gradients,
                first,
                second,
                [],
                [self.updates] * len(weights),
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                amsgrad=False,
                **common,
            )
        else:
            torch._fused_sgd_(
                *views,
                *([] if config.sgd_momentum else [[]]),
                momentum=config.sgd_momentum,
                dampening=0.0,
                nesterov=False,
                is_first_step=False,
                **common,
            )

    def state_pieces(self) -> Iterator[StatePiece]:
        """All flat state of this rank. Unsharded, every data-parallel rank yields the same."""
        for shard in self.shards:
            flats = dict(shard.state)
            if shard.has_main_weights:
                flats["main_weight"] = shard.main
            offset = shard.bucket.shard_start
            for slot in shard.bucket.slots:
                start = max(slot.start, offset)
                end = min(slot.end, shard.bucket.shard_end)
                if start >= end:
                    continue
                for key, flat in flats.items():
                    values = flat[start - offset : end - offset]
                    yield StatePiece(slot.name, slot.parameter, key, start - slot.start, values)

    def state_scalars(self) -> dict[str, float]:
        """The numbers beside the tensors, for JSON."""
        return {"updates": self.updates.item()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self.updates.fill_(scalars["updates"])

    @torch.no_grad()
    def parameters_from_main_weights(self) -> None:
        """After main weights were loaded."""
        for shard in self.shards:
            shard.publish()
        self.buckets.gather()
        self.buckets.wait()

    @torch.no_grad()
    def main_weights_from_parameters(self) -> None:
        """After parameters were loaded without optimizer state."""
        for shard in self.shards:
            if shard.has_main_weights:
                shard.main.copy_(shard.bucket.own_parameters)


_GROUPS: tuple[Group, ...] = ("matrix", "embedding", "vector", "lambda")


def group_rule(group: Group, config: OptimizerConfig) -> tuple[bool, float]:
    """Whether `group` decays, and its learning-rate multiplier. The only place that says so."""
    decays = group in ("matrix", "embedding")
    return decays, config.lambda_lr_multiplier if group == "lambda" else 1.0


def _name(name: str, parameter: nn.Parameter) -> str:
    """A parameter goes by its section's global name, or by its module path if it has several."""
    sections = record_of(parameter).sections
    return sections[0].name if len(sections) == 1 else name


def flat_sections(slot: Slot) -> Iterator[tuple[int, int, Section]]:
    """`(start, end, section)` in the flattened local parameter, ascending; padding is left out."""
    record = record_of(slot.parameter)
    if record.dim == 0:
        row = slot.parameter[0].numel() if slot.parameter.shape[0] else 0
        for section in sorted(record.sections, key=lambda s: s.start):
            yield section.start * row, (section.start + section.length) * row, section
        return
    kinds = {(s.group, s.copy_index) for s in record.sections}
    if len(kinds) > 1:
        raise ValueError(
            f"{slot.name}: sections along dim {record.dim} of different optimizer groups or copies "
            "are not contiguous; lay them along dim 0"
        )
    if record.sections:
        yield 0, slot.parameter.numel(), record.sections[0]


def _shard_ranges(bucket: Bucket) -> Iterator[_Range]:
    """The ranges of a bucket's shard; neighbours that are treated alike are one range.

    Neighbours may have alignment between them (zeros, which stay zeros) but no padding of a
    parameter.
    """
    current: _Range | None = None
    covered = 0  # up to here every element of the bucket belongs to a section or is alignment
    for slot in bucket.slots:
        for begin, finish, section in flat_sections(slot):
            touches = covered == slot.start + begin
            covered = slot.start + finish
            start = max(slot.start + begin, bucket.shard_start) - bucket.shard_start
            end = min(slot.start + finish, bucket.shard_end) - bucket.shard_start
            if start >= end:
                continue
            counted = section.copy_index == 0
            alike = current and (current.group, current.counted) == (section.group, counted)
            if current and touches and alike:
                current = _Range(current.start, end, section.group, counted)
                continue
            if current:
                yield current
            current = _Range(start, end, section.group, counted)
        if covered == slot.end:
            covered = slot.next_start
    if current:
        yield current
