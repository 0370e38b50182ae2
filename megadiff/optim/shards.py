"""What a rank owns of each bucket: ranges of main weights, gradients and optimizer state.

A parameter's record says to which optimizer group each of its sections belongs. Neighbouring
sections that are treated alike form one range, whatever parameter boundaries it crosses, so that an
update launches few kernels on long tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megadiff.kernels.device import on_triton
from megadiff.optim.buckets import Bucket, Slot
from megadiff.optim.weights import Mode, make_main_weights, random_seed, round_stochastically
from megadiff.parallel.parameter import Group, Section, record_of


@dataclass(frozen=True)
class Treatment:
    """How a section is updated; sections of the same treatment may share a range.

    `copies` cuts ranges alike on all ranks that hold copies: random rounding counts from their
    starts, and only one of these ranks counts the section.
    """

    rule: str  # "adam", "sgd" or "muon"
    group: Group
    counted: bool  # in the gradient norm
    copies: int = 1


@dataclass
class Range:
    """Elements `[start, end)` of a bucket, all owned by this rank and treated alike."""

    treatment: Treatment
    start: int
    end: int
    dtype: torch.dtype  # of the update, at least float32
    state: dict[str, Tensor]  # as it is kept
    reduced: Tensor  # the gradient as the bucket holds it
    # between begin_update and end_update, in `dtype`
    weights: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    moments: dict[str, Tensor] = field(init=False)


@dataclass(frozen=True)
class StatePiece:
    """A flat piece of optimizer state: elements `[start, start + len(values))` of a parameter.

    `start` counts in the flattened local parameter. `values` is a view: writing to it loads state.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the local parameter, also where an engine has taken it apart
    key: str  # "main_weight", "compensation", "exp_avg", "exp_avg_sq", "momentum_buffer"
    start: int
    values: Tensor
    write: bool  # of the ranks that hold the same values this one writes them to a checkpoint


class Shard:
    """This rank's part of a bucket.

    `state_types` names the state of a rule for parameters of a dtype, zero at first, and its types.
    """

    def __init__(
        self,
        bucket: Bucket,
        main_weights: Mode,
        treatment: Callable[[Section], Treatment],
        state_types: Callable[[str, torch.dtype], dict[str, torch.dtype]],
    ) -> None:
        self.bucket = bucket
        own = bucket.own_parameters
        self.dtype = torch.promote_types(own.dtype, torch.float32)
        self.name = f"{bucket.slots[0].name}/{bucket.rank}"
        self.main = make_main_weights(own, main_weights, self.name)
        self._weights = self._empty = own.new_empty(0)
        self.ranges = [
            Range(
                how,
                start,
                end,
                self.dtype,
                {
                    key: own.new_zeros(end - start, dtype=dtype)
                    for key, dtype in state_types(how.rule, own.dtype).items()
                },
                bucket.gradients[start:end],
            )
            for how, start, end in owned_ranges(bucket, treatment)
        ]
        self.in_one_pass = (
            self.main.mode is not None
            and on_triton(own)
            and all(r.treatment.rule == "adam" for r in self.ranges)
        )

    def adamw(self, scalars: Tensor, step: int, rule: Callable[[Group], dict[str, float]]) -> None:
        """The whole update where `in_one_pass`, without `begin_update` and `end_update`.

        `scalars` as `adamw_triton.adamw_` takes them; `rule` gives its constants for a group.
        """
        from megadiff.kernels import adamw_triton

        behind = self.main.behind
        for r in self.ranges:
            adamw_triton.adamw_(
                self.bucket.parameters[r.start : r.end],
                None if behind is None else self._cut(behind, r),
                r.reduced,
                r.state["exp_avg"],
                r.state["exp_avg_sq"],
                scalars,
                mode=self.main.mode or "float32",
                seed=random_seed(f"{self.name}/{r.start}", step),
                **rule(r.treatment.group),
            )

    def begin_update(self) -> None:
        """Give the ranges their weights and gradients, in the precision of the update."""
        self._weights = self.main.load()
        gradients = self.bucket.own_gradients.to(self.dtype)
        for r in self.ranges:
            r.weights, r.gradient = self._cut(self._weights, r), self._cut(gradients, r)
            r.moments = {key: kept.to(self.dtype) for key, kept in r.state.items()}

    def end_update(self, step: int) -> None:
        """Bring the weights into the parameters, and free what was made for the update."""
        self.main.store(self._weights, step)
        self._weights = self._empty
        for r in self.ranges:
            for key, kept in r.state.items():
                if kept.dtype != self.dtype:
                    seed = random_seed(f"{self.name}/{r.start}/{key}", step)
                    generator = torch.Generator(kept.device).manual_seed(seed)
                    round_stochastically(r.moments[key], generator, out=kept)
            r.weights, r.gradient, r.moments = self._empty, self._empty, {}

    def _cut(self, flat: Tensor, r: Range) -> Tensor:
        return flat[r.start - self.bucket.shard_start : r.end - self.bucket.shard_start]

    def pieces(self, write: Callable[[Slot], bool]) -> Iterator[StatePiece]:
        """All state, one piece for each parameter that a range touches."""
        for r in self.ranges:
            main = {key: self._cut(flat, r) for key, flat in self.main.state().items()}
            tensors = r.state | main
            for slot in self.bucket.slots:
                start, end = max(slot.start, r.start), min(slot.end, r.end)
                if start >= end:
                    continue
                for key, flat in tensors.items():
                    values = flat[start - r.start : end - r.start]
                    begin = start - slot.start
                    shape = tuple(slot.parameter.shape)
                    yield StatePiece(slot.parameter, shape, key, begin, values, write(slot))


def flat_sections(slot: Slot) -> Iterator[tuple[int, int, Section]]:
    """`(start, end, section)` in the flattened local parameter, ascending; padding is left out."""
    record = record_of(slot.parameter)
    if record.dim == 0:
        row = slot.parameter.numel() // max(slot.parameter.shape[0], 1)
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


def owned_ranges(
    bucket: Bucket, treatment: Callable[[Section], Treatment]
) -> list[tuple[Treatment, int, int]]:
    """The ranges `[start, end)` of a bucket that this rank owns, ascending.

    A range may cross alignment (zeros, which every rule leaves zero) but no parameter's padding.
    """
    ranges: list[tuple[Treatment, int, int]] = []
    covered = 0  # up to here every element of the bucket belongs to a section or is alignment
    for slot in bucket.slots:
        for begin, finish, section in flat_sections(slot):
            touches = covered == slot.start + begin
            covered = slot.start + finish
            start = max(slot.start + begin, bucket.shard_start)
            end = min(slot.start + finish, bucket.shard_end)
            if start >= end:
                continue
            how = treatment(section)
            if ranges and touches and ranges[-1][0] == how:
                ranges[-1] = (how, ranges[-1][1], end)
            else:
                ranges.append((how, start, end))
        if covered == slot.end:
            covered = slot.next_start
    return ranges
