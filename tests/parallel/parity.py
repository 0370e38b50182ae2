"""The parity matrix: which splits are run, and how a split is compared with one process.

A `Cell` names one value of every dimension. `matrix()` picks cells such that every pair of values
that can occur together does occur in some cell. `run_cell` trains a small model for a few steps,
as the training loop does, and returns what must not depend on the split.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config import (
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenMixer,
    TrainingConfig,
    validate,
)
from megadiff.data.loader import MicroBatch
from megadiff.models.build import Model
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.parameter import local_view, record_of
from megadiff.training import loop, metrics
from megadiff.training.engine import NativeEngine
from megadiff.training.setup import start
from megadiff.training.stop import StopRequests, agree
from tests.parallel.faults import inject

STEPS = 3
LENGTH = 16  # tokens of a sequence
GLOBAL_BATCH = 8  # sequences of a step


@dataclass(frozen=True)
class Cell:
    """One split of one model. `pipeline`: stages x virtual stages, schedule and layout."""

    mixer: str = "diff_v2"  # of every layer, or a hybrid's pattern
    style: str = "rms"  # rms: RMSNorm, SwiGLU, rotary; layer: LayerNorm, GELU, biases, learned
    groups: int = 4  # key/value groups, of 4 heads
    tied: bool = True
    packed: bool = False
    tensor: int = 1
    sequence: bool = False
    pipeline: str = "1"
    context: int = 1
    data: int = 1
    sharded: bool = False  # the optimizer's state
    micro_batches: int = 4  # of a data rank in a step
    recompute: str = "none"  # modules: all that selective recomputation can choose
    precision: str = "fp64"
    vocab: int = 53
    layers: int = 4
    device: str = "cpu"
    overlap: bool = False  # copy engines carry tensor parallelism's messages

    @property
    def world(self) -> int:
        return self.tensor * int(self.pipeline[0]) * self.context * self.data

    def __str__(self) -> str:
        """Short: the model, then what differs from a single process."""
        parts = [self.mixer, self.style, f"kv{self.groups}"]
        parts += ["tied" if self.tied else "untied"] + ["packed"] * self.packed
        parts += [f"tp{self.tensor}"] * (self.tensor > 1) + ["sp"] * self.sequence
        parts += [f"pp{self.pipeline}"] * (self.pipeline != "1")
        parts += [f"cp{self.context}"] * (self.context > 1) + [f"dp{self.data}"] * (self.data > 1)
        parts += ["sharded"] * self.sharded + [f"mb{self.micro_batches}"]
        parts += [self.recompute] * (self.recompute != "none")
        return "-".join(parts)


VALUES: dict[str, tuple[Any, ...]] = {
    "mixer": ("standard", "diff_v1", "diff_v2", "delta_net", "gated_delta_net", "2DG1"),
    "style": ("rms", "layer"),
    "groups": (4, 2, 1),
    "tied": (True, False),
    "packed": (False, True),
    "tensor": (1, 2, 4),
    "sequence": (False, True),
    "pipeline": ("1", "2gpipe", "2", "2list", "2balanced", "2x2", "4", "4x2"),
    "context": (1, 2),
    "data": (1, 2),
    "sharded": (False, True),
    "micro_batches": (1, 2, 4),
    "recompute": ("none", "selective", "modules", "uniform1", "uniform2", "block1"),
}

SPLIT = ("mixer", "tensor", "sequence", "pipeline", "context", "data", "sharded", "micro_batches")
"""The dimensions that decide whether a cell can run."""


def config_of(cell: Cell) -> Config:
    """The configuration of a cell; `validate` refuses what can not run."""
    stages, _, virtual = cell.pipeline.partition("x")
    pipeline, kind = int(stages[0]), stages[1:]
    layout = {"list": "1,3", "balanced": "balanced"}.get(kind, "even")
    layer_style = cell.style == "layer"
    hybrid = cell.mixer not in get_args(TokenMixer)
    chosen = {"none": None, "selective": "selective", "modules": "selective"}
    granularity = chosen.get(cell.recompute, "full")
    model = ModelConfig(
        num_layers=cell.layers,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=cell.groups,
        ffn_hidden_size=48,
        vocab_size=cell.vocab,
        make_vocab_size_divisible_by=4,
        init_method_std=0.1,
        normalization="LayerNorm" if layer_style else "RMSNorm",
        swiglu=not layer_style,
        mlp_bias=layer_style,
        position_embedding_type="learned_absolute" if layer_style else "rope",
        untie_embeddings_and_output_weights=not cell.tied,
        token_mixer="diff_v2" if hybrid else cell.mixer,  # type: ignore[arg-type]
        hybrid_layer_pattern=cell.mixer if hybrid else None,
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=cell.tensor,
        sequence_parallel=cell.sequence,
        tp_comm_overlap=cell.overlap,
        pipeline_model_parallel_size=pipeline,
        num_virtual_stages_per_pipeline_rank=int(virtual or 1),
        pipeline_model_parallel_layout=layout,
        pipeline_schedule="gpipe" if kind == "gpipe" else None,
        context_parallel_size=cell.context,
        recompute_granularity=granularity,  # type: ignore[arg-type]
        recompute_method=cell.recompute[:-1] if granularity == "full" else None,  # type: ignore
        recompute_num_layers=int(cell.recompute[-1]) if granularity == "full" else 1,
    )
    if cell.recompute == "modules":
        parallel.recompute_modules += ["layernorm", "mlp_act"]
    training = TrainingConfig(
        seq_length=LENGTH,
        micro_batch_size=GLOBAL_BATCH // (cell.data * cell.micro_batches),
        global_batch_size=GLOBAL_BATCH,
        train_iters=STEPS,
        fp64=cell.precision == "fp64",
        device=cell.device,
    )
    optimizer = OptimizerConfig(
        lr=1e-2,
        clip_grad=0.3,
        use_distributed_optimizer=cell.sharded,
        overlap_param_gather=cell.sharded,
    )
    return Config(model, parallel, training, optimizer)


def why_excluded(cell: Cell, processes: int = 4) -> str | None:
    """Why a cell is not run on at most `processes`, or None."""
    if cell.world > processes:
        return f"{cell.world} processes"
    if cell.sequence and cell.tensor == 1:
        return "sequence parallel without tensor parallel is nothing"
    if cell.world == 1:
        return "a single process"
    if cell.sharded and cell.data * cell.context == 1:
        return "nothing to shard over"
    try:
        validate(config_of(cell), cell.world)
    except ConfigError as error:
        return f"refused: {error}"
    return None


def pairs_of(cell: Cell) -> set[tuple]:
    """All pairs of (dimension, value) in a cell."""
    items = [(name, getattr(cell, name)) for name in VALUES]
    return set(combinations(items, 2))


@cache
def possible_pairs(processes: int = 4) -> tuple[set[tuple], dict[tuple, str]]:
    """Pairs that occur in some cell that can run, and the others with a reason.

    A pair is possible if it is with the plainest values elsewhere, or with a little more of what it
    needs (a data rank, a few micro-batches).
    """
    possible: set[tuple] = set()
    excluded: dict[tuple, str] = {}
    for (a, values_a), (b, values_b) in combinations(VALUES.items(), 2):
        for va, vb in product(values_a, values_b):
            reasons = []
            for cell in _around({a: va, b: vb}):
                reason = why_excluded(cell, processes)
                if reason is None:
                    possible.add(((a, va), (b, vb)))
                    break
                reasons.append(reason)
            else:
                excluded[(a, va), (b, vb)] = reasons[0]
    return possible, excluded


def _around(fixed: dict[str, Any]) -> Iterator[Cell]:
    """Cells with `fixed` values, from the plainest on."""
    for data, tensor, context, micro_batches in product((1, 2), (1, 2), (1, 2), (4, 2)):
        filling = {"data": data, "tensor": tensor, "context": context}
        filling["micro_batches"] = micro_batches
        yield _cell(filling | fixed)


def _cell(values: dict[str, Any]) -> Cell:
    return Cell(**values, layers=8 if values.get("pipeline") == "4x2" else 4)


@cache
def matrix(processes: int = 4, beyond: int = 1) -> list[Cell]:
    """Cells that together hold every pair that is possible on `processes` but not on `beyond`.

    Greedy, the best of 60 at a time; the same list every time.
    """
    generator = random.Random(0)
    missing = possible_pairs(processes)[0] - possible_pairs(beyond)[0]
    splits = [
        dict(zip(SPLIT, values, strict=True)) for values in product(*(VALUES[n] for n in SPLIT))
    ]
    splits = [split for split in splits if why_excluded(_cell(split), processes) is None]
    cells: list[Cell] = []
    while missing:
        pair = dict(min(missing, key=repr))
        fitting = [s for s in splits if all(s.get(n, v) == v for n, v in pair.items())]
        tries = []
        for _ in range(60):
            model = {n: generator.choice(VALUES[n]) for n in VALUES if n not in SPLIT}
            tries.append(_cell(model | generator.choice(fitting) | pair))
        cells.append(max(tries, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(cells[-1])
    return cells


def batch_of(cell: Cell, step: int) -> list[MicroBatch]:
    """The sequences of one global batch, one by one, the same for every split.

    Their masks are very uneven: the first sequence has one unmasked token, some have all.
    """
    generator = torch.Generator().manual_seed(100 + step)
    text = torch.randint(0, cell.vocab, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    batches = []
    for row in range(GLOBAL_BATCH):
        share = torch.rand((), generator=generator) if row % 3 else torch.ones(())
        mask = torch.rand(LENGTH, generator=generator) < share
        if row == 0:
            mask = torch.arange(LENGTH) == 5
        positions, cu_seqlens = torch.arange(LENGTH), None
        if cell.packed:
            cuts = torch.randperm(LENGTH - 1, generator=generator)[: 1 + row % 3] + 1
            bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([LENGTH])])
            lengths = bounds.diff()
            positions = positions - bounds[:-1].repeat_interleave(lengths)
            cu_seqlens = torch.cat([bounds, bounds[-1:].repeat(5 - len(bounds))]).int()
        batches.append(
            MicroBatch(
                tokens=text[row : row + 1, :-1],
                labels=text[row : row + 1, 1:],
                loss_mask=mask.float().unsqueeze(0),
                positions=positions.unsqueeze(0),
                cu_seqlens=cu_seqlens,
            )
        )
    return batches


def join(sequences: list[MicroBatch]) -> MicroBatch:
    """Several sequences as one micro-batch."""
    parts = {
        name: torch.cat([getattr(s, name) for s in sequences])
        for name in ("tokens", "labels", "loss_mask", "positions")
    }
    cu_seqlens = None
    if sequences[0].cu_seqlens is not None:
        given = [s.cu_seqlens[:-1] + i * LENGTH for i, s in enumerate(sequences)]  # type: ignore
        end = torch.tensor([len(sequences) * LENGTH], dtype=torch.int32)
        cu_seqlens = torch.cat([*given, end])
    return MicroBatch(cu_seqlens=cu_seqlens, **parts)


def micro_batches_of(cell: Cell, step: int, data_rank: int) -> list[MicroBatch]:
    """What one data-parallel rank gets in a step."""
    size = GLOBAL_BATCH // (cell.data * cell.micro_batches)
    sequences = batch_of(cell, step)
    per_round = size * cell.data
    starts = range(data_rank * size, GLOBAL_BATCH, per_round)
    return [join(sequences[start : start + size]) for start in starts]


@dataclass
class Outcome:
    """What a run must give on any split; tensors are this rank's parts, by global name."""

    losses: list[float]
    evaluation: float
    norms: list[float]
    gradients: dict[str, tuple[int, int, Tensor]]  # offset, dim, gradient of the first step
    weights: dict[str, tuple[int, int, Tensor]]  # after the last step


def run_cell(cell: Cell, fault: str | None = None) -> Outcome:
    """Train `STEPS` steps on this rank of an initialised group (or alone). `fault` breaks it."""
    if fault is not None:
        inject(fault)
    config = config_of(cell)
    validate(config, cell.world)
    env = start(config)
    engine = NativeEngine(config, env)
    requests = StopRequests(exit_duration=None)

    def tokens(batches: list[MicroBatch]) -> int:
        return agree(loop.unmasked(batches), requests, env).tokens

    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batches = micro_batches_of(cell, step, env.mesh.dp.rank)
        share = engine.forward_backward(batches, tokens(batches))
        losses.append(metrics.sum_over_data(share, env).item())
        if step == 0:
            gradients = _summed_gradients(engine.model, engine.optimizer)
        norms.append(engine.step(config.optimizer.lr, 0.1).grad_norm.item())
    engine.optimizer.wait_for_parameters()
    batches = micro_batches_of(cell, STEPS, env.mesh.dp.rank)
    total = metrics.sum_over_data(engine.evaluate(batches), env).item()
    weights = {p: p.detach().clone() for p in engine.model.parameters()}
    return Outcome(
        losses, total / tokens(batches), norms, gradients, _by_name(engine.model, weights)
    )


def _summed_gradients(model: Model, optimizer: Optimizer) -> dict[str, tuple[int, int, Tensor]]:
    """Whole gradients of this rank's parameters, also where each data rank owns a range of them."""
    optimizer.buckets.finish()
    gradients = {}
    for bucket in optimizer.buckets.buckets:
        whole = bucket.gradients.clone()
        if optimizer.buckets.sharded:
            whole.zero_()
            whole[bucket.shard_start : bucket.shard_end] = bucket.own_gradients
            dist.all_reduce(whole, group=optimizer.buckets.group)
        for slot in bucket.slots:
            part = whole[slot.start : slot.end].view(slot.parameter.shape)
            gradients[slot.parameter] = part
    return _by_name(model, gradients)


def _by_name(model: Model, tensors: dict[Any, Tensor]) -> dict[str, tuple[int, int, Tensor]]:
    parts = {}
    for parameter in model.parameters():
        record = record_of(parameter)
        for s in record.sections:
            parts[s.name] = (s.offset, record.dim, local_view(tensors[parameter], s, record.dim))
    return parts


def differences(ours: Outcome, whole: Outcome) -> dict[str, float]:
    """Relative differences of a rank's outcome from the single process's, by what they are of.

    Infinity where something is not a number, which would be smaller than no other difference.
    """
    found = {}
    for name in ("losses", "norms", "evaluation"):
        a, b = (torch.tensor(getattr(o, name), dtype=torch.float64) for o in (ours, whole))
        found[name] = ((a - b) / b).abs()
    for kind in ("gradients", "weights"):
        expected = getattr(whole, kind)
        for name, (offset, dim, part) in getattr(ours, kind).items():
            full = expected[name][2].double()
            wanted = full.narrow(dim, offset, part.shape[dim])
            found[f"{kind} of {name}"] = (part - wanted).norm() / full.norm()
    return {name: e.nan_to_num(nan=torch.inf).max().item() for name, e in found.items()}


def report() -> str:
    """The cells, and the pairs of values that no cell holds with the reason."""
    cells, slow = matrix(), matrix(8, beyond=4)
    possible, excluded = possible_pairs(8)
    covered = set().union(*map(pairs_of, [*cells, *slow])) & possible
    lines = [f"{cell.world} processes  {cell}" for cell in cells]
    lines += [f"{cell.world} processes, slow  {cell}" for cell in slow]
    lines.append(
        f"{len(cells)} cells, and {len(slow)} slow ones, hold {len(covered)} of {len(possible)} "
        "possible pairs"
    )
    for ((a, va), (b, vb)), reason in excluded.items():
        lines.append(f"excluded: {a} {va} with {b} {vb}: {reason}")
    return "\n".join(lines)
