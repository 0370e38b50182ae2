"""FlashDiffAttention: differential attention V1 behind the call of microsoft/unilm PR 1633.

The framework doubles its number of heads and leaves its projections and rotary positions alone; the
module pairs neighbouring heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megadiff.kernels import diff_attention
from megadiff.models.attention import lambda_init_of_layer

_EPSILON = 1e-5


class FlashDiffAttention(nn.Module):
    """Differential attention over `2h` heads of width `head_dim` (arXiv 2410.05258).

    Heads 2i and 2i + 1 of q and k are the two branches of pair i, and those of v the halves of its
    value. On any device and in any float type. Published checkpoints load with and without the
    norm's weight: one that has `subln.weight` brings the parameter with it, so load it before the
    optimizer is made.

    Args:
        head_dim: width of a head, at most what the kernels of the device take.
        depth: 0-based layer, from which lambda_init follows.
        causal: a query sees no key after itself; queries and keys are aligned at their ends.
        softmax_scale: of the scores; default `head_dim ** -0.5`.
        window_size: (left, right), keys seen before and after a query's own position; -1: no limit.
        deterministic: two runs are equal bit for bit.
        attention_dropout, alibi_slopes: accepted where off (0.0, None); ValueError otherwise.
    """

    def __init__(
        self,
        head_dim: int,
        depth: int,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if attention_dropout != 0.0:
            raise ValueError(
                f"attention_dropout is {attention_dropout}: dropout of attention maps is not "
                "offered, as the two branches have no common map to drop from; use 0.0"
            )
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes are not offered; use rotary positions and give None")
        self.head_dim, self.causal, self.softmax_scale = head_dim, causal, softmax_scale
        self.window_size, self.deterministic = window_size, deterministic
        self.lambda_init = lambda_init_of_layer(depth)

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(head_dim, dtype=torch.float32).normal_(0, 0.1))

        self.lambda_q1, self.lambda_k1 = vector(), vector()
        self.lambda_q2, self.lambda_k2 = vector(), vector()
        self.subln = nn.RMSNorm(2 * head_dim, eps=_EPSILON, elementwise_affine=False)
        self.register_load_state_dict_pre_hook(_take_norm_weight)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """q `[batch, seq, 2h, d]`; k, v `[batch, seq_k, 2 h_kv, d]`; out `[batch, seq, 2h, d]`.

        Packed, with `cu_seqlens` `[documents + 1]` int32: `[tokens, heads, d]`. `cu_seqlens_k`
        defaults to `cu_seqlens`. `causal` overrides the module's.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.shape[-1] != self.head_dim or x.shape[-2] % 2:
                raise ValueError(
                    f"{name} must have an even number of heads of width {self.head_dim}; got "
                    f"{x.shape[-2]} of width {x.shape[-1]}"
                )
        lam = (
            torch.exp((self.lambda_q1 * self.lambda_k1).sum())
            - torch.exp((self.lambda_q2 * self.lambda_k2).sum())
            + self.lambda_init
        )
        out = diff_attention(
            q,
            k,
            v.unflatten(-2, (-1, 2)).flatten(-2),
            lam,
            causal=self.causal if causal is None else causal,
            scale=self.softmax_scale,
            window=self.window_size,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen_k,
            norm_weight=self.subln.weight,
            norm_eps=_EPSILON,
            out_scale=1 - self.lambda_init,
            deterministic=self.deterministic,
        )
        return out.unflatten(-1, (2, -1)).flatten(-3, -2)


def _take_norm_weight(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make room for a norm's weight that is in the checkpoint; one that is not there is 1."""
    assert isinstance(module, FlashDiffAttention)
    name, vector = f"{prefix}subln.weight", module.lambda_q1
    if name in state and module.subln.weight is None:
        weight = torch.ones(2 * module.head_dim, dtype=vector.dtype, device=vector.device)
        module.subln.weight = nn.Parameter(weight)
    elif name not in state and module.subln.weight is not None:
        state[name] = torch.ones_like(module.subln.weight)
