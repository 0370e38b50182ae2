"""What a parameter is, said once when it is made.

A local tensor may hold several global ones (a fused projection holds q, k, v and lambda) and may
hold only a part of each. A `Section` describes one of them; the record of a parameter lists its
sections. Initialisation, gradient norm, optimizer groups, checkpoints and export all read it.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import nn

Group = Literal["matrix", "embedding", "vector", "lambda"]
"""Optimizer group. `matrix` and `embedding` decay; `vector` (norms, biases) and `lambda` (the
lambda vectors of DIFF V1) do not. Only `matrix` sections may go to a matrix optimizer (Muon)."""

_BLOCK = 1 << 16  # elements drawn per generator seed: about one seeding per 0.3 ms of drawing


@dataclass(frozen=True)
class Init:
    """Initial values: normal with `mean` and `std`; `std` 0 is the constant `mean`."""

    std: float = 0.0
    mean: float = 0.0
    uniform: bool = False  # uniform on [mean - std * sqrt(3), mean + std * sqrt(3)], same std
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the drawn values


def uniform(
    low: float, high: float, transform: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Init:
    """Initial values uniform on [low, high], or such values transformed."""
    return Init((high - low) / math.sqrt(12), (low + high) / 2, True, transform)


@dataclass(frozen=True)
class Section:
    """One global tensor, or a range of it, inside a local tensor.

    The section covers `[start, start + length)` of the local tensor along the record's dim and is
    `[offset, offset + length)` of the global tensor of `shape` along the same dim.
    """

    name: str  # global name, such as "layers.3.mixer.q.weight"
    shape: tuple[int, ...]  # global logical shape, without padding
    start: int
    length: int
    offset: int
    group: Group
    init: Init
    copies: int = 1  # tensor-parallel ranks that hold these same values
    copy_index: int = 0  # which of them this one is; copy 0 counts in norms and writes checkpoints


@dataclass(frozen=True)
class ParameterRecord:
    """The sections of one local tensor along `dim`; what no section covers is padding (zeros)."""

    sections: tuple[Section, ...]
    dim: int  # the dim along which sections lie and along which the tensor is sharded, if it is
    tie: str | None = None  # parameters of one tie group hold the same values on different stages


def make_parameter(
    local_shape: Sequence[int],
    sections: Sequence[Section],
    *,
    dim: int = 0,
    tie: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Parameter:
    """An uninitialised parameter that carries its record; `initialize` fills it."""
    for section in sections:
        expected = list(section.shape)
        expected[dim] = local_shape[dim]
        if list(local_shape) != expected:
            raise ValueError(
                f"{section.name}: local shape {tuple(local_shape)} does not fit the global shape "
                f"{section.shape} sharded on dim {dim}"
            )
    parameter = nn.Parameter(torch.empty(tuple(local_shape), dtype=dtype, device=device))
    record = ParameterRecord(tuple(sections), dim, tie)
    parameter.megadiff_record = record  # type: ignore[attr-defined]
    return parameter


def record_of(parameter: nn.Parameter) -> ParameterRecord:
    """The record that `make_parameter` gave to `parameter`."""
    return parameter.megadiff_record  # type: ignore[attr-defined]


def set_record(parameter: nn.Parameter, record: ParameterRecord) -> None:
    """Replace the record, as pipeline stages do for the second holder of a tied embedding."""
    parameter.megadiff_record = record  # type: ignore[attr-defined]


class GradientSum(Protocol):
    """Where the gradients of a parameter are summed, in a wider type than its own."""

    gradient: torch.Tensor
    added: bool  # the gradient that autograd is about to have is in the sum already

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Add a @ b, not rounded in between. What autograd gets instead has no meaning."""
        ...


def gradient_sum(parameter: torch.Tensor) -> Callable[[], GradientSum | None]:
    """Gives where products add to the gradient of `parameter`, as long as there is such a place."""
    return getattr(parameter, "megadiff_gradient_sum", lambda: None)


def local_view(tensor: torch.Tensor, section: Section, dim: int) -> torch.Tensor:
    """The part of a local `tensor` (a parameter, its gradient, a moment) that is `section`."""
    return tensor.narrow(dim, section.start, section.length)


def named_sections(module: nn.Module) -> Iterator[tuple[nn.Parameter, Section]]:
    """All sections of all parameters of `module`, each parameter once, in module order."""
    for parameter in module.parameters():
        for section in record_of(parameter).sections:
            yield parameter, section


def as_copy(record: ParameterRecord) -> ParameterRecord:
    """The record of a further holder of tied values: it counts in no norm and writes nothing."""
    sections = tuple(replace(s, copies=s.copies + 1, copy_index=s.copies) for s in record.sections)
    return replace(record, sections=sections)


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of `module`; a value depends on `seed`, its global name and index only.

    Every split of the model starts from the same weights. Meta parameters are left alone.
    """
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with ThreadPoolExecutor(min(max(cores, 1), 16)) as pool:  # drawing leaves Python to others
        for parameter in module.parameters():
            if parameter.is_meta:
                continue
            parameter.zero_()
            record = record_of(parameter)
            for section in record.sections:
                view = local_view(parameter, section, record.dim)
                if section.init.std == 0.0:
                    view.fill_(section.init.mean)
                else:
                    view.copy_(_global_slice(section, record.dim, seed, pool))


def generator_of(key: str) -> torch.Generator:
    """A generator whose numbers depend on `key` only."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(seed)


def _global_slice(section: Section, dim: int, seed: int, pool: Executor) -> torch.Tensor:
    """Rows `[offset, offset + length)` along `dim` of the section's global initial values, float32.

    The global tensor is drawn in blocks of whole rows (of dim 0), each from a generator of its own,
    so that a rank draws only the blocks that its rows touch.
    """
    shape = section.shape
    row = math.prod(shape[1:])
    rows_per_block = max(1, _BLOCK // max(row, 1))
    first, last = (section.offset, section.offset + section.length) if dim == 0 else (0, shape[0])

    def draw(block: int) -> torch.Tensor:
        begin = block * rows_per_block
        end = min(begin + rows_per_block, shape[0])
        generator = generator_of(f"{seed}/{section.name}/{block}")
        values = torch.empty((end - begin, *shape[1:]), dtype=torch.float32)
        if section.init.uniform:
            bound = section.init.std * math.sqrt(3)
            values.uniform_(
                section.init.mean - bound, section.init.mean + bound, generator=generator
            )
        else:
            values.normal_(section.init.mean, section.init.std, generator=generator)
        if section.init.transform is not None:
            values = section.init.transform(values)
        return values[max(first - begin, 0) : min(last, end) - begin]

    blocks = range(first // rows_per_block, -(-last // rows_per_block))
    parts = list(pool.map(draw, blocks) if len(blocks) > 1 else map(draw, blocks))
    full = torch.cat(parts)
    return full if dim == 0 else full.narrow(dim, section.offset, section.length)
