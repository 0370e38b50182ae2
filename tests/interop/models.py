"""Tiny models and their checkpoints for the tests of this folder."""

from dataclasses import replace
from pathlib import Path

import torch

from megadiff.checkpoint import directory as layout
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import save
from megadiff.config import Config, ModelConfig, to_dict
from megadiff.models.decoder import Decoder
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import initialize, record_of

TINY = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=61,
    norm_epsilon=1e-5,
    init_method_std=0.2,  # far from a uniform distribution of tokens, so that errors show
    make_vocab_size_divisible_by=8,
)
MODELS = {
    "standard": replace(TINY, token_mixer="standard"),
    "standard_scaled_rope_biases": replace(
        TINY,
        token_mixer="standard",
        rotary_interleaved=False,
        use_rope_scaling=True,
        rotary_base=5e5,
        mlp_bias=True,
        untie_embeddings_and_output_weights=True,
    ),
    "diff_v1_no_weight": replace(TINY, token_mixer="diff_v1", diff_head_norm="no_weight"),
    "diff_v1_weight": replace(
        TINY, token_mixer="diff_v1", untie_embeddings_and_output_weights=True
    ),
    "diff_v2": replace(TINY, token_mixer="diff_v2"),
    "diff_v2_wide_heads": replace(TINY, token_mixer="diff_v2", kv_channels=12),
    "hybrid": replace(TINY, hybrid_layer_pattern="*12"),
    "delta_hybrid": replace(TINY, hybrid_layer_pattern="DG2", delta_expand_v=2.0),
    "delta_options": replace(
        TINY,
        hybrid_layer_pattern="G1D",
        delta_num_heads=2,
        delta_expand_k=0.5,
        delta_use_gate=True,
        delta_use_beta=False,
        delta_allow_neg_eigval=True,
        delta_conv_size=3,
        delta_conv_bias=True,
        delta_qk_activation="elu",
        delta_qk_norm="sum",
    ),
    "delta_no_convolution": replace(
        TINY,
        hybrid_layer_pattern="GGD",
        delta_use_gate=False,
        delta_conv_size=0,
        delta_qk_activation="identity",
    ),
    "hybrid_no_norm_per_head": replace(
        TINY,
        hybrid_layer_pattern="211",
        kv_channels=8,
        diff_head_norm="none",
        diff_value_width="d",
        diff_lambda_per_head=True,
        diff_lambda_init=0.3,
        position_embedding_type="none",
    ),
}


def decoder(
    config: ModelConfig, mesh: ParallelMesh | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A model whose norms' weights are not just ones."""
    model = Decoder(config, mesh, max_positions=64, dtype=dtype)
    initialize(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            record = record_of(parameter)
            if record.sections and record.sections[0].name.endswith(
                ("norm.weight", "subln.weight")
            ):
                parameter.copy_(1 + 0.3 * torch.sin(torch.arange(len(parameter))))
    return model


def save_checkpoint(root: Path, model: Decoder) -> None:
    """The model as the checkpoint of step 7 in `root`; every rank of its mesh calls it."""
    config = Config(model=model.config)
    config.training.seq_length = 64
    config.training.bf16 = model.dtype == torch.bfloat16
    saving = layout.saving_path(root, 7)
    save(saving, module_tensors(model), {"config": to_dict(config)})
    if model.mesh.rank == 0:
        layout.publish(root, 7)
        layout.write_tracker(root, 7)


def tokens(batch: int = 2, length: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, TINY.vocab_size or 0, (batch, length), generator=generator)


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """`[batch, length, vocabulary]`."""
    with torch.no_grad():
        return model(ids, torch.arange(ids.shape[1]).expand(ids.shape))[..., : model.vocab_size]
