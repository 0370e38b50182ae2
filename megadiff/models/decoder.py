"""The decoder: embedding, blocks, final norm and output; whole, or one pipeline stage of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megadiff.config import DELTA_MIXERS, ModelConfig, TokenMixer
from megadiff.kernels import rotary_cos_sin
from megadiff.models.block import Block
from megadiff.models.geometry import Geometry
from megadiff.models.norm import Norm
from megadiff.parallel.collectives import copy_to_group, gather_sequence
from megadiff.parallel.context import make_context
from megadiff.parallel.embedding import (
    PositionEmbedding,
    vocab_parallel_embedding,
    vocab_parallel_weight,
)
from megadiff.parallel.loss import vocab_parallel_cross_entropy
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import Init
from megadiff.parallel.recompute import Recompute, recomputed


@dataclass(frozen=True)
class Stage:
    """The part of the decoder that a rank holds: global layers, and the two ends."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True


class Decoder(nn.Module):
    """Decoder-only language model; parameters are made on `device` and not initialised."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh | None = None,
        stage: Stage | None = None,
        *,
        max_positions: int = 0,
        recompute: Recompute | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the vocabulary's size is not set")
        mesh = mesh or ParallelMesh()
        stage = stage or Stage(range(config.num_layers))
        self.config, self.mesh, self.stage = config, mesh, stage
        self.vocab_size: int = config.vocab_size
        self.dtype = dtype
        mixers: set[TokenMixer] = {config.mixer_of_layer(layer) for layer in stage.layers}
        self.rotary_widths = sorted({config.head_width(m) for m in mixers.difference(DELTA_MIXERS)})
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        tied = not config.untie_embeddings_and_output_weights
        init = Init(config.init_method_std)

        vocab_matrix = partial(
            vocab_parallel_weight,
            shape=(self.vocab_size, config.hidden_size),
            tp=mesh.tp,
            divisible_by=config.make_vocab_size_divisible_by,
            init=init,
            tie="embedding" if tied else None,
            **factory,
        )
        self.embedding = self.output = self.position_embedding = self.final_norm = None
        if stage.first:
            self.embedding = vocab_matrix("embedding.weight")
            if config.position_embedding_type == "learned_absolute":
                shape = (config.max_position_embeddings or max_positions, config.hidden_size)
                self.position_embedding = PositionEmbedding(
                    shape, mesh, "position_embedding", init, **factory
                )
        blocks = {str(layer): Block(config, layer, mesh, **factory) for layer in stage.layers}
        self.layers = nn.ModuleDict(blocks)
        self.recompute = recompute or Recompute()
        norms_again = self.recompute.chooses("layernorm")
        for block in self.blocks:
            block.mixer.recompute = self.recompute.chooses("core_attn")
            block.mixer.recompute_norm = norms_again
            block.mixer_norm.recompute = block.mlp_norm.recompute = norms_again
            block.mlp.recompute = self.recompute.chooses("mlp_act")
        if stage.last:
            self.final_norm = Norm(config, mesh, "final_norm", **factory)
            if not tied:
                self.output = vocab_matrix("output.weight")
            else:
                self.output = self.embedding if stage.first else vocab_matrix("embedding.weight")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Tensor:
        """Run this stage.

        `x` is `[b, s]` token ids on the first stage, else the previous stage's output. `positions`
        `[b, s]`; `cu_seqlens` as in `Geometry`. Under context parallelism s is this rank's part of
        the sequence (`context_shard`) and `cu_seqlens` speaks of the whole. Returns the hidden
        state, or on the last stage the loss of every token `[b, s]` in at least float32 when
        `labels` are given, else the logits `[b, s, vocab / tp]` of this rank's columns.
        """
        geometry = self._geometry(positions, cu_seqlens)
        if self.embedding is not None:
            x = vocab_parallel_embedding(x, self.embedding, self.mesh)
            if self.position_embedding is not None:
                x = self.position_embedding(x, positions)
        if cache is not None:
            for block, layer_cache in zip(self.blocks, cache, strict=True):
                x = block(x, geometry, layer_cache)
        else:
            for blocks, again in self.recompute.runs(self.blocks):
                run = partial(recomputed, _run_blocks) if again else _run_blocks
                x = run(blocks, x, geometry)
        if self.final_norm is None or self.output is None:
            return x
        _, x = self.final_norm(x)
        whole = gather_sequence if self.mesh.sequence_parallel else copy_to_group
        logits = whole(x, self.mesh.tp) @ self.output.T
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels, self.vocab_size, self.mesh.tp)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of this stage, in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def new_cache(self, max_length: int) -> list[Any]:
        """One empty cache for each layer of this stage."""
        return [block.mixer.new_cache(max_length) for block in self.blocks]

    def mean_lambdas(self) -> dict[int, Tensor]:
        """Mean lambda of each differential layer of this stage in its last forward pass.

        A mean over this rank's heads (and for DIFF V2 over its tokens).
        """
        return {
            layer: block.mixer.mean_lambda
            for layer, block in zip(self.stage.layers, self.blocks, strict=True)
            if block.mixer.mean_lambda is not None
        }

    def _geometry(self, positions: Tensor, cu_seqlens: Tensor | None) -> Geometry:
        rotary = {}
        if self.config.position_embedding_type == "rope":
            at = positions.double() if self.dtype == torch.float64 else positions
            base = self.config.rotary_base
            factor = self.config.rope_scaling_factor if self.config.use_rope_scaling else None
            for width in self.rotary_widths:
                rotary[width] = rotary_cos_sin(at, width, base, factor)
        context = None
        if self.mesh.cp.size > 1:
            whole = positions.shape[1] * self.mesh.cp.size
            context = make_context(whole, self.mesh.cp, cu_seqlens)
        return Geometry(positions, cu_seqlens, rotary, context)


def _run_blocks(blocks: Sequence[Block], x: Tensor, geometry: Geometry) -> Tensor:
    for block in blocks:
        x = block(x, geometry)
    return x
