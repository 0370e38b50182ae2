"""The plain DiffTransformer (nanowell/Differential-Transformer-PyTorch) as a preset of our decoder.

It is DIFF V1 with learned positions, lambda vectors of its own for each head, query heads of width
d = hidden / heads (so that q, k and v are twice as wide as the hidden state) and a SwiGLU of twice
the hidden size with biases.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megadiff.config import Config, ModelConfig
from megadiff.interop.checkpoint import global_shapes, misfits, write_checkpoint
from megadiff.interop.tensors import InteropError, Progress, Report, deferred, silent
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import local_view, record_of

_LAYER = {
    "mixer_norm.weight": "norm1.scale",
    "mixer.q.weight": "attn.W_q.weight",
    "mixer.k.weight": "attn.W_k.weight",
    "mixer.v.weight": "attn.W_v.weight",
    "mixer.o.weight": "attn.W_o.weight",
    "mixer.subln.weight": "attn.rms_scale",
    "mixer.lambda_q1": "attn.lambda_q1",
    "mixer.lambda_k1": "attn.lambda_k1",
    "mixer.lambda_q2": "attn.lambda_q2",
    "mixer.lambda_k2": "attn.lambda_k2",
    "mlp_norm.weight": "norm2.scale",
    "mlp.gate.weight": "ff.WG.weight",
    "mlp.gate.bias": "ff.WG.bias",
    "mlp.up.weight": "ff.W1.weight",
    "mlp.up.bias": "ff.W1.bias",
    "mlp.down.weight": "ff.W2.weight",
    "mlp.down.bias": "ff.W2.bias",
}
_TOP = {
    "embedding.weight": "token_emb.weight",
    "position_embedding.weight": "pos_emb.weight",
    "final_norm.weight": "norm.scale",
    "output.weight": "head.weight",
}


def plain_name(name: str) -> str:
    """The plain model's name of our global `name`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"layers.{layer}.{_LAYER[rest]}"


def plain_config(state: Mapping[str, Tensor]) -> ModelConfig:
    """The model that the plain `state_dict` is of, its sizes read off the shapes."""
    try:
        vocab_size, hidden = state["token_emb.weight"].shape
        heads, width = state["layers.0.attn.lambda_q1"].shape
        return ModelConfig(
            num_layers=sum(name.endswith("attn.W_q.weight") for name in state),
            hidden_size=hidden,
            num_attention_heads=heads,
            kv_channels=width,
            ffn_hidden_size=state["layers.0.ff.W1.weight"].shape[0],
            token_mixer="diff_v1",
            diff_lambda_per_head=True,
            mlp_bias=True,
            position_embedding_type="learned_absolute",
            max_position_embeddings=state["pos_emb.weight"].shape[0],
            untie_embeddings_and_output_weights=True,
            vocab_size=vocab_size,
        )
    except KeyError as error:
        raise ValueError(f"not a plain DiffTransformer: there is no {error.args[0]}") from None


@torch.no_grad()
def load_plain_state_dict(model: Decoder, state: Mapping[str, Tensor]) -> None:
    """Fill `model`, whole or this rank's part of it, from a plain `state_dict` under its names.

    Raises ValueError, before anything changes, for tensors that are missing, left over or of
    another shape.
    """
    wanted = {plain_name(name): shape for name, shape in global_shapes(model.config).items()}
    if problems := misfits(wanted, {name: tuple(t.shape) for name, t in state.items()}):
        raise ValueError(f"the plain state_dict does not fit: {problems}")
    for parameter in model.parameters():
        record = record_of(parameter)
        parameter.zero_()  # what no section covers is padding
        for section in record.sections:
            whole = state[plain_name(section.name)]
            part = whole.narrow(record.dim, section.offset, section.length)
            local_view(parameter, section, record.dim).copy_(part)


def import_plain(
    file: str | Path,
    root: str | Path,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> Report:
    """Write the plain `state_dict` in `file` (.safetensors, or .pt) as a checkpoint in `root`."""
    try:
        if Path(file).suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise InteropError(f"{file}: no state_dict can be read from it ({error})") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise InteropError(
            f"{file}: not a state_dict, which holds tensors by name and nothing else"
        )
    try:
        config = Config(model=plain_config(state))
    except ValueError as error:
        raise InteropError(f"{file}: {error}") from None
    config.training.seq_length = config.model.max_position_embeddings or 1
    names = {plain_name(name): name for name in global_shapes(config.model)}
    tensors = {names.get(name, name): deferred(tensor) for name, tensor in state.items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    path = write_checkpoint(root, config, tensors, progress(len(tensors)))
    return Report(path, ["the plain DiffTransformer"])
