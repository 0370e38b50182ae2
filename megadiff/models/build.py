"""The model of a run: the decoder, or the stages of it that a rank holds."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config import Config, ModelConfig, TokenMixer, stage_sizes
from megadiff.models.block import Block
from megadiff.models.decoder import Decoder, Stage
from megadiff.models.flops import mixing_flops
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import as_copy, record_of, set_record
from megadiff.parallel.pipeline import balanced_sizes
from megadiff.parallel.recompute import Recompute


class Model(nn.ModuleList):
    """This rank's runs of layers in order: one, or one for each virtual stage."""

    def __init__(self, chunks: Sequence[Decoder], mesh: ParallelMesh) -> None:
        super().__init__(chunks)
        self.config, self.mesh = chunks[0].config, mesh

    @property
    def chunks(self) -> list[Decoder]:
        return [cast(Decoder, chunk) for chunk in self]

    def tied_parameters(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Parameters with a copy on another stage, and the group of ranks that hold one."""
        group = self.mesh.ends.group
        if group is None:
            return []
        ends = [p for c in self.chunks for p in (c.embedding, c.output) if p is not None]
        return [(p, group) for p in ends if record_of(p).tie is not None]

    def mean_lambdas(self) -> dict[int, Tensor]:
        """See `Decoder.mean_lambdas`."""
        return {k: v for chunk in self.chunks for k, v in chunk.mean_lambdas().items()}


def build_model(
    config: Config, mesh: ParallelMesh, *, dtype: torch.dtype, device: torch.device | str
) -> Model:
    """This rank's part of the decoder; parameters are not initialised.

    Where input and output embeddings are tied and lie on different stages, the last stage's is
    marked as a copy; `tied_parameters` says whose gradients to sum.
    """
    layers = stage_layers(config)
    recompute = Recompute(
        config.parallel.recompute_granularity,
        config.parallel.recompute_method,
        config.parallel.recompute_num_layers,
        tuple(config.parallel.recompute_modules),
    )
    chunks = []
    for number in range(mesh.pp.rank, len(layers), mesh.pp.size):
        stage = Stage(layers[number], number == 0, number == len(layers) - 1)
        chunk = Decoder(
            config.model,
            mesh,
            stage,
            max_positions=config.training.seq_length,
            recompute=recompute,
            dtype=dtype,
            device=device,
        )
        if chunk.output is not None and chunk.embedding is None:
            record = record_of(chunk.output)
            if record.tie is not None:
                set_record(chunk.output, as_copy(record))
        chunks.append(chunk)
    return Model(chunks, mesh)


def stage_layers(config: Config) -> list[range]:
    """The global layers of every pipeline stage, in the order of the stages."""
    parallel, model = config.parallel, config.model
    stages = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    if parallel.pipeline_model_parallel_layout == "balanced":
        costs = layer_costs(model, config.training.seq_length)
        output = 2.0 * model.hidden_size * (model.vocab_size or 0)
        sizes = balanced_sizes(costs, stages, first=0.0, last=output)
    else:
        sizes = stage_sizes(model.num_layers, parallel)
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def layer_costs(config: ModelConfig, seq_length: int) -> list[float]:
    """Relative costs of the layers: operations of the forward for one token.

    Those of mixing count twice: attention kernels reach half the rate of matrix products
    (docs/performance.md).
    """
    costs: dict[TokenMixer, float] = {}
    for layer in range(config.num_layers):
        mixer = config.mixer_of_layer(layer)
        if mixer not in costs:
            block = Block(config, layer, ParallelMesh(), dtype=torch.float32, device="meta")
            weights = sum(parameter.numel() for parameter in block.parameters())
            costs[mixer] = 2.0 * weights + 2.0 * mixing_flops(config, mixer, seq_length)
    return [costs[config.mixer_of_layer(layer)] for layer in range(config.num_layers)]
