"""Peak memory of every pipeline stage, estimated from the configuration alone.

Weights, gradients and optimizer are counted from the parameters. Activations are what backward
needs of the fused operators, in elements for one token of one layer (h hidden, f width of the MLP,
q, k, v, o widths of the projections and of the mixer's output; all but h over the tensor ranks):

    two norms and their outputs              4 h   (over the tensor ranks under sequence parallel;
                                                    recomputed: 2 h)
    projection, q and k rotated in place     q + k + v
    attention and its statistics             o     (both branches 2 o, with a norm of the heads 3 o,
                                                    but 2 o where norms are recomputed; all
                                                    recomputed: o)
    gate and up, and their product           3 f   (without a gate 2 f; recomputed: f less)

Context parallelism keeps copies instead of the projection: q, keys and values of the whole
sequence, and one o more. Full recomputation keeps h for each run. A stage holds this for as many
micro-batches as its schedule has in flight. At the peak there are besides, on the last stage the
logits (their gradient is written over them; GPipe's has those of all micro-batches), else one run
in full where it is recomputed, with the gradients of an MLP. Copy engines add four messages of the
whole hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megadiff.config import DELTA_MIXERS, Config, ModelConfig, TokenMixer, data_parallel_size
from megadiff.models.attention import head_shape
from megadiff.models.build import Model, build_model
from megadiff.models.mixer import PAD
from megadiff.parallel.copy_engine import SLOTS
from megadiff.parallel.embedding import padded_vocab_size
from megadiff.parallel.mesh import Axis, ParallelMesh
from megadiff.parallel.parameter import record_of
from megadiff.parallel.recompute import Recompute


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds at its peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        parts = ("weights", "gradients", "optimizer", "activations")
        told = " + ".join(f"{part} {getattr(self, part) / unit:.2f}" for part in parts)
        return f"{self.total / unit:.2f} {name} ({told})"


def estimate_memory(config: Config, world_size: int) -> list[Memory]:
    """The peak of a rank of each pipeline stage, for a validated configuration."""
    p = config.parallel
    stages = []
    for rank in range(p.pipeline_model_parallel_size):
        mesh = ParallelMesh(
            tp=Axis(size=p.tensor_model_parallel_size),
            cp=Axis(size=p.context_parallel_size),
            pp=Axis(rank=rank, size=p.pipeline_model_parallel_size),
            sequence_parallel=p.sequence_parallel and p.tensor_model_parallel_size > 1,
        )
        dtype = getattr(torch, config.training.dtype)
        model = build_model(config, mesh, dtype=dtype, device="meta")
        stages.append(_of_stage(config, model, world_size))
    return stages


def _of_stage(config: Config, model: Model, world_size: int) -> Memory:
    o, p = config.optimizer, config.parallel
    weights = gradients = optimizer = largest = 0
    owners = data_parallel_size(config, world_size) * p.context_parallel_size
    owners = owners if o.use_distributed_optimizer else 1
    for parameter in model.parameters():
        n, width = parameter.numel(), parameter.element_size()
        wide = max(width, 4)
        weights += n * width
        gradients += n * (wide if o.accumulate_allreduce_grads_in_fp32 else width)
        matrix = any(s.group == "matrix" for s in record_of(parameter).sections)
        states = 1 if o.optimizer == "sgd" or (o.optimizer == "muon" and matrix) else 2
        state = states * wide
        if width == 2:
            state -= 2 * [o.exp_avg_dtype, o.exp_avg_sq_dtype].count("bf16")
            state += {"float32": 4, "kahan": 2, "stochastic": 0}[o.main_weights]
        optimizer += n * state // owners
        largest = max(largest, n * width)  # a gradient before it is added to its buffer
    activations = _activations(config, model, world_size) + largest
    if p.tp_comm_overlap:
        activations += SLOTS * message_bytes(config)
    return Memory(weights, gradients, optimizer, activations)


def message_bytes(config: Config) -> int:
    """The whole hidden state of a micro-batch, as tensor-parallel ranks gather and sum it."""
    m, p, t = config.model, config.parallel, config.training
    width = torch.finfo(getattr(torch, t.dtype)).bits // 8
    return t.micro_batch_size * t.seq_length // p.context_parallel_size * m.hidden_size * width


def _activations(config: Config, model: Model, world_size: int) -> int:
    m, p, t = config.model, config.parallel, config.training
    mesh, width = model.mesh, torch.finfo(getattr(torch, t.dtype)).bits // 8
    tokens = t.micro_batch_size * t.seq_length // mesh.cp.size
    hidden = tokens * m.hidden_size // (mesh.tp.size if mesh.sequence_parallel else 1)
    assert t.global_batch_size is not None
    per_rank = t.global_batch_size // data_parallel_size(config, world_size)
    micro_batches = per_rank // t.micro_batch_size
    kept, moment = [], 0
    for chunk in model.chunks:
        elements = 0
        for layers, again in chunk.recompute.runs(chunk.stage.layers):
            run = sum(
                layer_elements(m, m.mixer_of_layer(i), mesh, tokens, hidden, chunk.recompute)
                for i in layers
            )
            elements += hidden if again else run
            mlp = mlp_elements(m, mesh, tokens)
            moment = max(moment, (run if again else 0) + 2 * hidden + mlp)
        if chunk.final_norm is not None:
            divisible_by = m.make_vocab_size_divisible_by
            vocab = padded_vocab_size(m.vocab_size or 0, divisible_by, mesh.tp.size)
            whole = tokens * (m.hidden_size + vocab // mesh.tp.size)  # x of the product, logits
            if p.schedule == "gpipe" and mesh.pp.size > 1:  # whose backward comes after all others'
                elements += hidden + whole
            else:
                moment = max(moment, hidden + whole)
        kept.append(elements)
    total = in_flight(p.schedule, mesh.pp, kept, micro_batches) + moment
    if mesh.pp.size > 1:  # receive buffers of every micro-batch, forward and backward
        ends = sum(chunk.stage.first + chunk.stage.last for chunk in model.chunks)
        total += micro_batches * hidden * (2 * len(kept) - ends)
    return total * width


def in_flight(schedule: str, pp: Axis, runs: Sequence[int], micro_batches: int) -> int:
    """The most that a pipeline rank holds at a time of its `runs` of layers.

    `runs` are what each keeps for the backward of a micro-batch.
    """
    if pp.size == 1:
        return sum(runs)
    if schedule == "gpipe":
        return micro_batches * sum(runs)
    ahead = pp.size - pp.rank  # forwards before the first backward; from there on they alternate
    if schedule == "interleaved_1f1b":
        ahead = (len(runs) - 1) * pp.size + 2 * (pp.size - 1 - pp.rank) + 1
    count = min(micro_batches * len(runs), ahead + pp.size * len(runs))  # then all comes again
    turns = [i // pp.size % len(runs) for i in range(count)]
    held = most = sum(runs[turn] for turn in turns[:ahead])
    for begun, done in zip(turns[ahead:], turns, strict=False):
        held += runs[begun] - runs[-1 - done]
        most = max(most, held)
    return most


def layer_elements(
    m: ModelConfig,
    mixer: TokenMixer,
    mesh: ParallelMesh,
    tokens: int,
    hidden: int,
    recompute: Recompute,
) -> int:
    """Elements that one layer keeps for the backward of a micro-batch; see above.

    `tokens` are this rank's, `hidden` the elements of its hidden state.
    """
    tp = mesh.tp.size
    around = (2 if recompute.chooses("layernorm") else 4) * hidden
    around += mlp_elements(m, mesh, tokens, recompute)
    if mixer in DELTA_MIXERS:
        keys, values = (m.delta_heads * width // tp for width in m.delta_widths)
        # q and k projected, convolved and normalised; v projected and convolved; gate, output, norm
        return around + tokens * (6 * keys + 6 * values)
    branches, key_branches, d, d_v = head_shape(m, mixer)
    heads, groups = m.num_attention_heads // tp, max(1, m.query_groups // tp)
    q, k = branches * heads * d, key_branches * groups * d
    v, o = groups * d_v, heads * d_v
    if mixer == "diff_v2":  # lambda's columns, padded
        v += -(-heads // PAD) * PAD
    recomputed = recompute.chooses("core_attn")
    outputs = 1 if recomputed else branches
    normed = mixer == "diff_v1" and m.diff_head_norm != "none"
    if normed and not (recomputed or recompute.chooses("layernorm")):
        outputs = 3
    if mesh.cp.size > 1 and not recomputed:
        return around + tokens * (q + (k + v) * mesh.cp.size + (outputs + 1) * o)
    return around + tokens * (q + k + v + outputs * o)


def mlp_elements(
    m: ModelConfig, mesh: ParallelMesh, tokens: int, recompute: Recompute | None = None
) -> int:
    """What the MLP keeps between its products."""
    parts = 3 if m.swiglu else 2
    if recompute is not None and recompute.chooses("mlp_act"):
        parts -= 1
    return tokens * parts * m.ffn_size // mesh.tp.size
