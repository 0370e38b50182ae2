"""Where a loss or gradient that is not finite comes from, found by running its batch again.

Hooks are on the modules only while that happens.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.config import Config
from megadiff.data.loader import sample_numbers
from megadiff.parallel.mesh import ParallelMesh, gather_objects
from megadiff.parallel.parameter import gradient_sum
from megadiff.training.data import Batches, sample_ids
from megadiff.training.errors import NotFiniteError
from megadiff.training.metrics import Outcome
from megadiff.training.setup import Environment


@dataclass(frozen=True, order=True)
class Origin:
    """The first value on a rank that is not finite; the smallest of all ranks came first."""

    backward: bool
    micro_batch: int
    stage: int  # in the order that the pass takes
    order: int  # among all that this rank computed
    rank: int
    data_parallel_rank: int
    module: str

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"the {way} of {self.module} on rank {self.rank}, micro-batch {self.micro_batch}"


@contextmanager
def watch_modules(chunks: Sequence[nn.Module], mesh: ParallelMesh) -> Iterator[list[Origin]]:
    """Within, forward and backward of `chunks` look for values that are not finite; waits for each.

    What is given gets the first origin found. A module's forward is at fault when its output is not
    finite, its backward when the gradient of its input or of a parameter of its own is not.
    """
    origins: list[Origin] = []
    order = count()
    hooks = ExitStack()  # which removes them

    @torch.no_grad()  # isfinite takes abs, which recomputation would count as kept for backward
    def look(values: Any, name: str, stage: int, micro_batch: int, backward: bool) -> None:
        now = next(order)
        found = (v for v in _tensors(values) if v.is_floating_point())
        if not origins and any(not v.isfinite().all() for v in found):
            at = -stage if backward else stage
            place = (backward, micro_batch, at, now, mesh.rank, mesh.dp.rank, name)
            origins.append(Origin(*place))

    def watch_stage(chunk: nn.Module, stage: int) -> None:
        micro_batches = count()
        running: int | None = None  # the micro-batch whose forward has begun and is not over

        def before_stage(*_: Any) -> None:
            nonlocal running
            running = next(micro_batches)

        def after_stage(*_: Any) -> None:
            nonlocal running
            running = None

        def after_forward(name: str, _: nn.Module, inputs: Any, output: Any) -> None:
            micro_batch = running
            if micro_batch is None:  # computed again, within the backward of any micro-batch
                return
            look(output, name, stage, micro_batch, False)
            for x in _tensors(inputs):
                if x.requires_grad:
                    x.register_hook(lambda g: look(g, name, stage, micro_batch, True))

        hooks.enter_context(chunk.register_forward_pre_hook(before_stage))
        for name, module in chunk.named_modules():
            hook = partial(after_forward, name or "the whole stage")
            hooks.enter_context(module.register_forward_hook(hook))
        hooks.enter_context(chunk.register_forward_hook(after_stage))

    def watch_parameter(parameter: nn.Parameter, name: str, stage: int) -> None:
        micro_batches = count()  # it gets one gradient from each

        def before_accumulation(gradient: Tensor) -> None:
            total = gradient_sum(parameter)()
            seen = total.gradient if total is not None and total.added else gradient
            look(seen, name, stage, next(micro_batches), True)

        hooks.enter_context(parameter.register_hook(before_accumulation))

    with hooks:
        for number, chunk in enumerate(chunks):
            stage = mesh.pp.rank + number * mesh.pp.size
            watch_stage(chunk, stage)
            for name, parameter in chunk.named_parameters():
                watch_parameter(parameter, name, stage)
        yield origins


def _tensors(values: Any) -> list[Tensor]:
    values = values if isinstance(values, tuple | list) else (values,)
    return [value for value in values if isinstance(value, Tensor)]


def first_origin(origins: list[Origin], env: Environment) -> Origin | None:
    """The first of all ranks, the same on all; None when all was finite."""
    return min(chain(*gather_objects(origins, env.control)), default=None)


def report(
    bad: list[Outcome], origin: Origin | None, config: Config, env: Environment, data: Batches
) -> NotFiniteError:
    """The error that ends the run; the main rank writes the samples of the first bad step."""
    first = bad[0]
    words = f"it comes from {origin}"
    if origin is None:
        words = "running it again gave finite numbers, which speaks for a fault of the hardware"
    where = ""
    if config.logging.log_dir is not None:
        path = Path(config.logging.log_dir) / f"not_finite_iteration_{first.iteration}.json"
        where = f"; its samples are in {path}"
        if env.is_main:
            details = {
                "iterations": [step.iteration for step in bad],
                "origin": None if origin is None else asdict(origin),
                "samples": _samples(first, config, env, data),
            }
            try:
                write_json(path, details)
            except OSError as error:  # a full disk: what ends the run is still to be told
                where = f"; its samples could not be written to {path} ({error.strerror})"
    return NotFiniteError(
        f"loss or gradient was not finite in {len(bad)} iterations in a row, {first.iteration} to "
        f"{bad[-1].iteration}. In iteration {first.iteration} {words}{where}. Nothing was saved "
        "since; go on with other settings, or pass over these data with --iterations-to-skip"
    )


def _samples(step: Outcome, config: Config, env: Environment, data: Batches) -> list[dict]:
    """Every sample of a step, with the rank and micro-batch that it went to."""
    size, ranks = config.training.micro_batch_size, env.mesh.dp.size
    return [
        {"data_parallel_rank": rank, "micro_batch": micro_batch, **sample_ids(data.dataset, number)}
        for rank in range(ranks)
        for micro_batch, numbers in enumerate(
            sample_numbers(step.first_sample, step.batch_size, size, rank, ranks)
        )
        for number in numbers
    ]


def write_json(path: Path, value: Any) -> None:
    """Write beside `path` and rename, so that it is whole or not there."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
