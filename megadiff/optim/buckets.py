"""Contiguous parameters and gradients, and their reduction over the data-parallel group.

Parameters become views of flat *buckets*, made in the reverse of module order because that is about
the order in which backward finishes with them. A gradient is added to its bucket's buffer as soon
as autograd has it, a linear layer's by the product that makes it; when every parameter of a bucket
has had the gradients of all micro-batches the bucket is reduced while backward goes on with the
layers below. Gradients are summed, never averaged: the loss is already a mean over the tokens of
the whole global batch.

Sharded, each rank receives the sum of its own equal range only (reduce-scatter) and later hands the
updated range to the others (all-gather); unsharded, each rank owns all of every bucket.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.parallel.collectives import all_gather_single, reduce_scatter_single

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class Slot:
    """The place `[start, end)` of one parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int
    next_start: int  # `end` and alignment
    gradient: Tensor  # the accumulated gradient: a view of the bucket in the parameter's shape
    remaining: int = 0  # micro-batches whose gradient is still to come
    empty: bool = False  # `gradient` holds old values, which the next one overwrites
    added: bool = False  # what autograd is about to have is in `gradient` already

    def add_product(self, a: Tensor, b: Tensor) -> Tensor:
        """`GradientSum.add_product`, in one pass over the sum."""
        total, dtype, beta = self.gradient, self.gradient.dtype, 0 if self.empty else 1
        if a.is_cuda:
            torch.addmm(total, a, b, out_dtype=dtype, beta=beta, out=total)  # type: ignore
        else:
            total.addmm_(a.to(dtype), b.to(dtype), beta=beta)
        self.empty, self.added = False, True
        return torch.empty_like(self.parameter)

    @property
    def direct(self) -> bool:
        """Whether autograd can accumulate straight into the bucket."""
        return self.gradient.dtype == self.parameter.dtype


@dataclass
class Bucket:
    """Flat parameters and gradients; `[shard_start, shard_end)` is what this rank updates."""

    slots: tuple[Slot, ...]
    parameters: Tensor  # [length], the parameters' dtype
    gradients: Tensor  # [length], the accumulation dtype
    shard_start: int
    shard_end: int
    rank: int  # of the shard, 0 where there is one
    tie_group: dist.ProcessGroup | None = None  # stages that hold copies of this bucket's parameter
    waiting: int = 0  # parameters that have not had all their gradients yet
    reduced: bool = False  # the reduction has at least been started
    reduction: Any = None  # running collectives
    gathering: Any = None

    @property
    def own_parameters(self) -> Tensor:
        return self.parameters[self.shard_start : self.shard_end]

    @property
    def own_gradients(self) -> Tensor:
        return self.gradients[self.shard_start : self.shard_end]


class Buckets:
    """The buckets of a rank's parameters.

    `group` is the data-parallel (and context-parallel) group, None for a single process. `sharded`
    gives each rank `1/dp` of each bucket. Gradients are kept in float32, or in the parameter's
    dtype where it is wider or where `float32_gradients` is False. `ties` are parameters whose
    copies live on other pipeline stages, with the group of the stages that hold one: their
    gradients are summed over it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        group: dist.ProcessGroup | None = None,
        sharded: bool = False,
        overlap_reduce: bool = True,
        float32_gradients: bool = True,
        bucket_size: int | None = None,  # elements
        alignment: int = 64,  # elements: 128 bytes of bf16, for vectorised kernels and NCCL
        ties: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
    ) -> None:
        self.world = dist.get_world_size(group) if group is not None else 1
        self.group = group if self.world > 1 else None
        self.sharded = sharded and self.world > 1
        self._rank = dist.get_rank(group) if self.group is not None else 0
        self._overlap = overlap_reduce and self.group is not None
        self._float32_gradients = float32_gradients
        self._alignment = alignment
        self._ties = dict(ties)
        if bucket_size is None:  # Megatron-LM's: messages stay long on many ranks
            bucket_size = max(40_000_000, 1_000_000 * self.world)
        self._next = 0  # the bucket to reduce next
        self.buckets = [
            self._make_bucket(members)
            for members in _split(named_parameters, self._ties, bucket_size)
        ]
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
                if not slot.direct and torch.version.hip is None:
                    slot.parameter.megadiff_gradient_sum = weakref.ref(slot)  # type: ignore
        self.gather_order = list(reversed(self.buckets))  # that of the next forward
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._writers = {slot.name: index % self.world for index, slot in enumerate(slots)}
        self.zero(1)

    def _make_bucket(self, members: list[tuple[str, nn.Parameter]]) -> Bucket:
        first = members[0][1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        if not self._float32_gradients:
            dtype = first.dtype
        starts = [0]
        for _, parameter in members:
            starts.append(starts[-1] + _round_up(parameter.numel(), self._alignment))
        length = _round_up(starts[-1], self._alignment * self.world)
        parameters = torch.zeros(length, dtype=first.dtype, device=first.device)
        gradients = torch.zeros(length, dtype=dtype, device=first.device)
        slots: list[Slot] = []
        for (name, parameter), start, following in zip(members, starts, starts[1:], strict=False):
            end = start + parameter.numel()
            view = parameters[start:end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            gradient = gradients[start:end].view(parameter.shape)
            slots.append(Slot(name, parameter, start, end, following, gradient))
        own = length // self.world if self.sharded else length
        begin = own * self._rank if self.sharded else 0
        tie_group = self._ties.get(first)
        return Bucket(
            tuple(slots), parameters, gradients, begin, begin + own, begin // max(own, 1), tie_group
        )

    def zero(self, backward_passes: int) -> None:
        """Forget all gradients; each parameter now expects those of `backward_passes` passes.

        The number only says when a bucket is complete and may be reduced early; a parameter that
        gets fewer gradients is reduced in `finish`.
        """
        self._next = 0
        self._finished = False
        for bucket in self.buckets:
            bucket.reduced = False
            bucket.waiting = len(bucket.slots)
            if bucket.slots[0].direct:
                bucket.gradients.zero_()
            for slot in bucket.slots:
                slot.remaining = backward_passes
                slot.empty = not slot.direct
                slot.parameter.grad = slot.gradient if slot.direct else None

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait; all `own_gradients` are then final."""
        if self._finished:
            return
        self._finished = True
        for bucket in self.buckets[self._next :]:
            for slot in bucket.slots:
                _collect(slot)
                if slot.empty:
                    slot.gradient.zero_()
            self._reduce(bucket)
        self._next = len(self.buckets)
        for bucket in self.buckets:
            if bucket.reduction is not None:
                bucket.reduction.wait()
                bucket.reduction = None
        for bucket in self.buckets:
            if bucket.tie_group is not None:
                dist.all_reduce(bucket.own_gradients, group=bucket.tie_group)

    def gather(self) -> None:
        """Start to fetch the ranges that other ranks updated; `wait` before they are read."""
        if not self.sharded:
            return
        for bucket in self.gather_order:
            bucket.gathering = all_gather_single(
                bucket.parameters, bucket.own_parameters, group=self.group, async_op=True
            )

    def wait_in_forward(self, chunks: Sequence[nn.Module]) -> None:
        """From now on forward waits for gathered parameters, just before it needs them.

        A member of a ModuleList or ModuleDict (a block) waits for all parameters below it, and each
        of `chunks` for its parameters outside of such members, which are gathered first. Who reads
        parameters elsewhere calls `wait`.
        """
        place = {slot.parameter: b for b in self.buckets for slot in b.slots}
        order: list[Bucket] = []
        for chunk in chunks:
            blocks = [
                m for c in chunk.modules() if isinstance(c, _CONTAINERS) for m in c.children()
            ]
            inside = {parameter for block in blocks for parameter in block.parameters()}
            outside = [p for p in chunk.parameters() if p not in inside]
            for module, parameters in [(chunk, outside), *((m, m.parameters()) for m in blocks)]:
                needed = list({id(b): b for p in parameters if (b := place.get(p))}.values())
                order += needed
                module.register_forward_pre_hook(lambda *_, needed=needed: self.wait(needed))
        self.gather_order = list({id(b): b for b in order}.values())

    def wait(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Make the updated parameters of `buckets` (all by default) visible to what runs next."""
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    def writes(self, slot: Slot) -> bool:
        """Whether this rank writes its state of `slot` to checkpoints; sharded, every rank does."""
        return self.sharded or self._writers[slot.name] == self._rank

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        # A parameter holds its hook where Python's collector does not look: one that held the
        # parameter's slot in turn would keep weights and gradients for as long as the process runs.
        alive = weakref.ref(self)
        bucket, slot = weakref.proxy(bucket), weakref.proxy(slot)

        def accumulated(parameter: Tensor) -> None:
            if (this := alive()) is None:  # the model goes on without this optimizer
                return
            if bucket.reduced:
                raise RuntimeError(
                    f"{slot.name}: a gradient arrived after its bucket was reduced: there were "
                    "more backward passes than announced, or a parameter is used in several "
                    "reentrant checkpoints (turn overlap_grad_reduce off for such a model)"
                )
            _collect(slot)
            slot.remaining -= 1
            if slot.remaining == 0:
                bucket.waiting -= 1
                if this._overlap:
                    this._reduce_complete()

        return accumulated

    def _reduce_complete(self) -> None:
        """Start the complete buckets in list order, which is the same on every rank."""
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._reduce(self.buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: Bucket) -> None:
        bucket.reduced = True
        if self.group is None:
            return
        if self.sharded:
            bucket.reduction = reduce_scatter_single(
                bucket.own_gradients, bucket.gradients, group=self.group, async_op=True
            )
        else:
            bucket.reduction = dist.all_reduce(bucket.gradients, group=self.group, async_op=True)


def _collect(slot: Slot) -> None:
    """Move what autograd left in `.grad` to the bucket, unless it was accumulated there."""
    gradient = slot.parameter.grad
    if gradient is None or gradient is slot.gradient:
        return
    if slot.added:
        slot.added = False
    elif slot.empty:
        slot.gradient.copy_(gradient)
        slot.empty = False
    else:
        slot.gradient.add_(gradient)
    slot.parameter.grad = slot.gradient if slot.direct else None


def _split(
    named_parameters: Iterable[tuple[str, nn.Parameter]], ties: Iterable[nn.Parameter], size: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Members of each bucket, in the order in which backward is expected to complete them.

    A bucket has one dtype. A tied parameter gets one of its own, so that the ranges of its holders
    on different stages are the same.
    """
    tied = set(ties)
    complete: list[list[tuple[str, nn.Parameter]]] = []
    open_by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    unique = {parameter: name for name, parameter in named_parameters if parameter.requires_grad}
    for parameter, name in reversed(unique.items()):
        if parameter in tied:
            complete.append([(name, parameter)])
            continue
        kind = (parameter.dtype, parameter.device)
        members = open_by_kind.setdefault(kind, [])
        members.append((name, parameter))
        if sum(p.numel() for _, p in members) >= size:
            complete.append(open_by_kind.pop(kind))
    return complete + list(open_by_kind.values())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
