"""Differential Transformers for Hugging Face transformers (5.x): a Llama whose layers mix tokens by
standard attention, DIFF V1 (arXiv 2410.05258), DIFF V2, or the delta rule (`MegadiffDeltaNet`).

This file and its neighbour need torch and transformers only, and travel with the models that they
are the code of.
Head i of a differential layer owns the query heads 2i and 2i + 1, its two branches; in DIFF V1 a
key/value group owns two key heads likewise. Rotary positions turn each branch within its own width,
by halves as in Llama.
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .modeling_megadiff_delta import MegadiffDeltaNet, MegadiffNorm

DELTA_MIXERS = ("delta_net", "gated_delta_net")
MIXERS = ("standard", "diff_v1", "diff_v2", *DELTA_MIXERS)


class MegadiffConfig(LlamaConfig):
    """LlamaConfig and the token mixers.

    `num_attention_heads` counts output heads: a differential layer has twice as many query heads.
    `num_key_value_heads` counts key/value groups.

    layer_mixers: one of `MIXERS` for each layer.
    diff_v1_head_dim: width of a query head of DIFF V1 layers; `head_dim` by default.
    diff_value_width: DIFF V1, width of a value head, "2d" or "d", d that of a query head.
    diff_head_norm: DIFF V1, per-head RMSNorm with a "weight", with "no_weight", or "none".
    diff_lambda_per_head: DIFF V1, lambda vectors of its own for each head.
    diff_lambda_init: DIFF V1, constant lambda_init; 0.8 - 0.6 exp(-0.3 layer) by default.
    diff_lambda_std: DIFF V1, standard deviation of new lambda vectors.
    delta_num_heads, delta_key_dim, delta_value_dim: heads of delta layers and their widths.
    delta_use_gate: gate on their output; only "gated_delta_net" has it by default.
    delta_use_beta: a learned writing strength, up to 1, with delta_allow_neg_eigval up to 2.
    delta_conv_size, delta_conv_bias: their short convolution; size 0 is none.
    delta_qk_activation: "silu", "relu", "elu" (+ 1) or "identity".
    delta_qk_norm: "l2" or "sum".
    rotary: whether attention has rotary positions; without them it has no positions.
    trained_rotary_interleaved: the weights came from a layout that rotates columns (2i, 2i + 1).
    """

    model_type = "megadiff"
    base_model_tp_plan = None
    base_model_pp_plan = None

    layer_mixers: list[str] | None = None
    diff_v1_head_dim: int | None = None
    diff_value_width: str = "2d"
    diff_head_norm: str = "weight"
    diff_lambda_per_head: bool = False
    diff_lambda_init: float | None = None
    diff_lambda_std: float = 0.1
    delta_num_heads: int | None = None
    delta_key_dim: int | None = None
    delta_value_dim: int | None = None
    delta_use_gate: bool | None = None
    delta_use_beta: bool = True
    delta_allow_neg_eigval: bool = False
    delta_conv_size: int = 4
    delta_conv_bias: bool = False
    delta_qk_activation: str = "silu"
    delta_qk_norm: str = "l2"
    rotary: bool = True
    trained_rotary_interleaved: bool = False

    def validate_architecture(self) -> None:
        """Called by transformers. Head widths need not divide the hidden size here."""
        mixers = self.layer_mixers
        if mixers is None:
            return
        if len(mixers) != self.num_hidden_layers or not set(mixers) <= set(MIXERS):
            raise ValueError(
                f"layer_mixers must name one of {', '.join(MIXERS)} for each of the "
                f"{self.num_hidden_layers} layers; got {mixers}"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError(
                f"{self.num_attention_heads} heads can not share {self.num_key_value_heads} groups"
            )

    def mixer(self, layer: int) -> str:
        return self.layer_mixers[layer] if self.layer_mixers is not None else "standard"

    def width(self, mixer: str) -> int:
        """Width of a query head."""
        if mixer == "diff_v1" and self.diff_v1_head_dim is not None:
            return self.diff_v1_head_dim
        assert self.head_dim is not None  # filled in by LlamaConfig
        return self.head_dim


def lambda_init_of_layer(layer: int) -> float:
    """DIFF Transformer, section 2.1, with 0-based layers."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class LlamaDiffAttention(nn.Module):
    """Standard or differential attention of a layer, through transformers' attention functions."""

    def __init__(self, config: MegadiffConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.mixer = config.mixer(layer_idx)
        v1, v2 = self.mixer == "diff_v1", self.mixer == "diff_v2"
        heads = config.num_attention_heads
        self.groups: int = config.num_key_value_heads or heads
        self.branches = 2 if v1 or v2 else 1
        self.key_branches = 2 if v1 else 1
        self.head_dim = config.width(self.mixer)
        self.value_dim = self.head_dim * (2 if v1 and config.diff_value_width == "2d" else 1)
        # Read by transformers' attention functions: query heads that share a key head.
        self.num_key_value_groups = heads // self.groups * (2 if v2 else 1)
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.branches * heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.key_branches * self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * self.value_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden, bias=False)
        if v2:
            self.lambda_proj = nn.Linear(hidden, heads, bias=False)
        if v1:
            constant = config.diff_lambda_init
            self.lambda_init = lambda_init_of_layer(layer_idx) if constant is None else constant
            shape = (heads, self.head_dim) if config.diff_lambda_per_head else (self.head_dim,)

            def vector() -> nn.Parameter:
                return nn.Parameter(torch.empty(shape).normal_(0, config.diff_lambda_std))

            self.lambda_q1, self.lambda_k1 = vector(), vector()
            self.lambda_q2, self.lambda_k2 = vector(), vector()
            self.subln = None
            if config.diff_head_norm != "none":
                weighted = config.diff_head_norm == "weight"
                self.subln = MegadiffNorm(self.value_dim, config.rms_norm_eps, weighted)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[int, tuple[Tensor, Tensor]] | None = None,
        attention_mask: Tensor | None = None,
        cache=None,
        past_key_values=None,  # the cache's name in transformers before 5.23
        token_mask: Tensor | None = None,  # for delta layers
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """`[batch, new tokens, hidden]` to the same, and the (differential) maps if they are made.

        The mask that transformers makes carries causality, padding and the cache's length; it is
        passed on alone.
        """
        cache = cache if cache is not None else past_key_values
        shape, d = hidden_states.shape[:-1], self.head_dim
        q = self.q_proj(hidden_states).view(*shape, -1, d).transpose(1, 2)
        k = self.k_proj(hidden_states).view(*shape, -1, d).transpose(1, 2)
        v = self.v_proj(hidden_states).view(*shape, -1, self.value_dim).transpose(1, 2)
        if position_embeddings is not None:
            cos, sin = position_embeddings[d]
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if cache is not None:
            # One cache head a group, which holds the keys of both branches side by side.
            k = k.unflatten(1, (self.groups, -1)).transpose(2, 3).flatten(3)
            where = {"cache_position": kwargs.get("cache_position")}  # read by transformers 5.0
            k, v = cache.update(k, v, self.layer_idx, where)
            k = k.unflatten(3, (-1, d)).transpose(2, 3).flatten(1, 2)
        if self.key_branches == 2:
            # Heads ordered (group, branch, head of the group): the branches have keys of their own.
            q = q.unflatten(1, (self.groups, -1, 2)).transpose(2, 3).flatten(1, 3)
            v = v.repeat_interleave(2, dim=1)
        name = self.config._attn_implementation or "eager"
        attend = eager_attention_forward
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        elif name != "eager":  # transformers 5.0
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        outputs, weights = [], None
        for part in v.split(d, dim=-1):  # kernels want values as wide as keys
            output, weights = attend(
                self, q, k, part, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
            )
            outputs.append(output)
        y = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]  # [b, n, heads, value_dim]
        if self.branches == 2:
            lam = self.lam(hidden_states)
            y = self.difference(y, lam)
            if weights is not None:
                weights = self.difference(weights.transpose(1, 2), lam).transpose(1, 2)
            if self.mixer == "diff_v1" and self.subln is not None:
                y = self.subln(y) * (1 - self.lambda_init)
        y = y.to(hidden_states.dtype).reshape(*shape, -1)
        return self.o_proj(y), weights

    def lam(self, hidden_states: Tensor) -> Tensor:
        """lambda in at least float32: a scalar, `[heads]` or `[batch, tokens, heads]`."""
        if self.mixer == "diff_v2":
            logits = self.lambda_proj(hidden_states)
            return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1 = self.lambda_q1.to(wide), self.lambda_k1.to(wide)
        q2, k2 = self.lambda_q2.to(wide), self.lambda_k2.to(wide)
        return torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + self.lambda_init

    def difference(self, x: Tensor, lam: Tensor) -> Tensor:
        """Branch 1 minus lambda x branch 2: `[b, n, query heads, ...]` to `[b, n, heads, ...]`."""
        if self.key_branches == 2:
            first, second = x.unflatten(2, (self.groups, 2, -1)).unbind(3)
            first, second = first.flatten(2, 3), second.flatten(2, 3)
        else:
            first, second = x.unflatten(2, (-1, 2)).unbind(3)
        lam = lam if lam.dim() == 0 else lam.unsqueeze(-1)
        return first.to(lam.dtype) - lam * second.to(lam.dtype)


class MegadiffRotary(nn.Module):
    """cos and sin by width of the query heads, None for a model without positions."""

    def __init__(self, config: MegadiffConfig) -> None:
        super().__init__()
        mixers = {config.mixer(layer) for layer in range(config.num_hidden_layers)}
        mixers -= {*DELTA_MIXERS}
        self.by_width = nn.ModuleDict()
        for width in sorted({config.width(mixer) for mixer in mixers}) if config.rotary else []:
            narrowed = copy.deepcopy(config)
            narrowed.head_dim = width
            self.by_width[str(width)] = LlamaRotaryEmbedding(narrowed)

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[int, tuple[Tensor, Tensor]] | None:
        turns = {int(width): rotary(x, position_ids) for width, rotary in self.by_width.items()}
        return turns or None


class MegadiffDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: MegadiffConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        delta = config.mixer(layer_idx) in DELTA_MIXERS
        self.self_attn = (MegadiffDeltaNet if delta else LlamaDiffAttention)(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MegadiffPreTrainedModel(LlamaPreTrainedModel):
    config_class = MegadiffConfig
    config: MegadiffConfig
    _no_split_modules = ["MegadiffDecoderLayer"]  # noqa: RUF012  as transformers has it
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": MegadiffDecoderLayer,
        "attentions": LlamaDiffAttention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamaDiffAttention) and module.mixer == "diff_v1":
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                init.normal_(getattr(module, name), 0, self.config.diff_lambda_std)
        elif isinstance(module, MegadiffNorm) and module.weight is not None:
            init.ones_(module.weight)
        elif isinstance(module, MegadiffDeltaNet):
            for name, values in module.initial_values().items():
                init.copy_(getattr(module, name), values)


class MegadiffModel(MegadiffPreTrainedModel, LlamaModel):
    """LlamaModel with the mixers of its configuration."""

    def __init__(self, config: MegadiffConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            MegadiffDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MegadiffRotary(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        """As LlamaModel. Delta layers get the mask of tokens, attention the one made from it."""
        if attention_mask is not None and attention_mask.dim() == 2:
            kwargs["token_mask"] = attention_mask
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


class MegadiffForCausalLM(MegadiffPreTrainedModel, LlamaForCausalLM):
    """LlamaForCausalLM with the mixers of its configuration."""

    _tp_plan = None
    _pp_plan = None

    def __init__(self, config: MegadiffConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = MegadiffModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        mixers = {config.mixer(layer) for layer in range(config.num_hidden_layers)}
        self._is_stateful = not mixers.isdisjoint(DELTA_MIXERS)  # can not take tokens back
        self.post_init()


# `save_pretrained` copies this file beside the weights and names it in config.json.
MegadiffConfig.register_for_auto_class()
MegadiffForCausalLM.register_for_auto_class("AutoModelForCausalLM")
