"""Our global tensors and Hugging Face's, by name, both ways.

Most differ in their names only. Rows of q and k are permuted where one side rotates the columns
(2i, 2i + 1) and the other the two halves of a head, and DiffLlama stores all first branches before
all second ones (and so the halves of all values). DiffLlama's per-head norm has no weight: ours is
folded into the output projection.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megadiff.config import DELTA_MIXERS, ModelConfig
from megadiff.interop.checkpoint import global_shapes
from megadiff.interop.hf.architecture import Architecture
from megadiff.interop.hf.fla import MIXERS, fla_name
from megadiff.interop.tensors import Deferred

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mixer.subln.weight": "self_attn.subln.weight",
    "mixer.lambda.weight": "self_attn.lambda_proj.weight",
    "mixer.gate.weight": "self_attn.g_proj.weight",
    "mixer.beta.weight": "self_attn.b_proj.weight",
    "mixer.decay.weight": "self_attn.a_proj.weight",
    "mixer.o_norm.weight": "self_attn.o_norm.weight",
}


def hf_name(name: str, architecture: Architecture) -> str:
    """The name that our global `name` has in `architecture`."""
    if architecture in MIXERS:
        return fla_name(name)
    prefix = ""
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        prefix, name = f"model.layers.{match[1]}.", match[2]
    if name in _NAMES:
        return prefix + _NAMES[name]
    if match := re.fullmatch(r"mlp\.(gate|up|down)\.(weight|bias)", name):
        return f"{prefix}mlp.{match[1]}_proj.{match[2]}"
    if match := re.fullmatch(r"mixer\.([qkvo])\.weight", name):
        return f"{prefix}self_attn.{match[1]}_proj.weight"
    if match := re.fullmatch(r"mixer\.([qkv])_conv\.(weight|bias)", name):
        return f"{prefix}self_attn.{match[1]}_conv1d.{match[2]}"
    if match := re.fullmatch(r"mixer\.(lambda_[qk][12]|A_log|dt_bias)", name):
        return f"{prefix}self_attn.{match[1]}"
    raise KeyError(f"{prefix}{name} has no name in Hugging Face's models")


def _row_order(name: str, rows: int, m: ModelConfig, architecture: Architecture) -> Tensor | None:
    """Their rows as indices of ours, None where the order is the same."""
    match = re.fullmatch(r"layers\.(\d+)\.mixer\.([qkv])\.weight", name)
    if match is None:
        return None
    mixer, which = m.mixer_of_layer(int(match[1])), match[2]
    if mixer in DELTA_MIXERS:
        return None
    width = m.head_width(mixer)
    chunked = architecture == "diffllama"
    turned = which != "v" and m.rotary_interleaved and m.position_embedding_type == "rope"
    if not chunked and not turned:
        return None
    index = torch.arange(rows).view(-1, width)
    if chunked:
        index = torch.cat([index[0::2], index[1::2]])
    if turned:
        index = torch.cat([index[:, 0::2], index[:, 1::2]], 1)
    return index.flatten()


def folded(m: ModelConfig, architecture: Architecture) -> bool:
    """Whether the per-head norm's weight is folded into the output projection."""
    return architecture == "diffllama" and m.diff_head_norm == "weight"


def to_hf(
    tensors: Mapping[str, Deferred], m: ModelConfig, architecture: Architecture
) -> dict[str, Deferred]:
    """Our tensors as those of `architecture`."""
    theirs = {}
    for name, tensor in tensors.items():
        if name.endswith(".subln.weight") and folded(m, architecture):
            continue
        if name.endswith(".mixer.o.weight") and folded(m, architecture):
            tensor = _fold(tensor, tensors[name.replace(".o.", ".subln.")])
        order = _row_order(name, tensor.shape[0], m, architecture)
        theirs[hf_name(name, architecture)] = tensor if order is None else tensor.rows(order)
    return theirs


def _fold(output: Deferred, norm: Deferred) -> Deferred:
    """The output projection behind a norm without its weight: each head's columns times it."""

    def make() -> Tensor:
        weight, scale = output.make(), norm.make()
        wide = torch.promote_types(weight.dtype, scale.dtype)
        heads = weight.shape[1] // scale.shape[0]
        return (weight.to(wide) * scale.to(wide).repeat(heads)).to(weight.dtype)

    return Deferred(output.shape, output.dtype, make)


def from_hf(
    tensors: Mapping[str, Deferred], m: ModelConfig, architecture: Architecture
) -> dict[str, Deferred]:
    """The tensors of `architecture` as ours; what has no place keeps its name, to be complained of.

    A tied lm_head that is stored nevertheless is left out.
    """
    left = dict(tensors)
    if not m.untie_embeddings_and_output_weights:
        left.pop("lm_head.weight", None)
    ours = {}
    for name, shape in global_shapes(m).items():
        tensor = left.pop(hf_name(name, architecture), None)
        if tensor is None:
            continue
        order = _row_order(name, shape[0], m, architecture)
        if order is not None and tensor.shape == shape:
            tensor = tensor.rows(order.argsort())
        ours[name] = tensor
    # Llama files of old transformers hold the rotary frequencies, which follow from the options.
    left = {n: t for n, t in left.items() if not n.endswith("rotary_emb.inv_freq")}
    return ours | left
