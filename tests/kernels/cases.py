"""Inputs for the attention tests, and the definition written out as loops."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of diff_attention; lengths are tokens for packed cases."""

    name: str
    n_q: int = 8
    n_k: int | None = None
    batch: int = 2
    pairs: int = 2
    groups: int = 2
    own_keys: bool = True
    d: int = 4
    d_v: int = 8
    lam: str = "heads"  # scalar, heads, tokens
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.options

    def inputs(
        self, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh random q, k, v, lam that need gradients."""
        generator = torch.Generator().manual_seed(seed)
        n_k = self.n_q if self.n_k is None else self.n_k
        rows = () if self.packed else (self.batch,)

        def random(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(device, dtype).requires_grad_()

        key_heads = 2 * self.groups if self.own_keys else self.groups
        lam_shape = {
            "scalar": (),
            "heads": (self.pairs,),
            "tokens": (*rows, self.n_q, self.pairs),
        }[self.lam]
        return (
            random(*rows, self.n_q, 2 * self.pairs, self.d),
            random(*rows, n_k, key_heads, self.d),
            random(*rows, n_k, self.groups, self.d_v),
            random(*lam_shape),
        )

    def call_options(self, device: str = "cpu") -> dict[str, Any]:
        """The options with lists turned into int32 tensors."""
        return {
            name: torch.tensor(value, dtype=torch.int32, device=device)
            if isinstance(value, list)
            else value
            for name, value in self.options.items()
        }


V2 = {"own_keys": False, "d_v": 4, "lam": "tokens"}
CASES = [
    Case("v1"),
    Case("v1_scalar_lambda_not_causal", lam="scalar", options={"causal": False}),
    Case("v1_groups", pairs=6, groups=2),
    Case("v1_one_group_odd_length", n_q=7, pairs=3, groups=1, lam="tokens"),
    Case("v1_narrow_values", d=8, d_v=8),
    Case("v2", **V2),
    Case("v2_groups", pairs=6, groups=3, **V2),
    Case("v2_one_group", pairs=3, groups=1, **V2),
    Case("v2_one_token", n_q=1, pairs=2, groups=1, **V2),
    Case("scale", options={"scale": 1.7}),
    Case("window", n_q=11, options={"window": (3, 0)}),
    Case("window_both_sides", n_q=11, options={"window": (2, 3), "causal": False}),
    Case("window_left_only", n_q=9, options={"window": (2, -1), "causal": False}),
    Case("window_of_one", n_q=5, options={"window": (0, 0)}, **V2),
    Case("more_keys", n_q=3, n_k=10),
    Case("more_keys_not_causal", n_q=3, n_k=10, options={"causal": False}),
    Case("more_queries", n_q=10, n_k=4),
    Case("more_queries_window", n_q=10, n_k=4, options={"window": (2, 0)}, **V2),
    Case("decode", n_q=1, n_k=9, pairs=4, groups=2, **V2),
    Case(
        "decode_seqused", n_q=1, n_k=9, batch=4, options={"seqused_k": [9, 4, 1, 0]}, lam="tokens"
    ),
    Case("prefill_seqused", n_q=3, n_k=9, options={"seqused_k": [7, 2]}, **V2),
    Case("seqused_window", n_q=2, n_k=9, options={"seqused_k": [7, 5], "window": (2, 0)}),
    Case("packed", n_q=13, options={"cu_seqlens_q": [0, 5, 6, 13]}),
    Case("packed_not_causal", n_q=13, options={"cu_seqlens_q": [0, 5, 13], "causal": False}),
    Case(
        "packed_empty_and_padding",
        n_q=16,
        pairs=4,
        options={"cu_seqlens_q": [0, 0, 5, 5, 12, 12], "max_seqlen_q": 7},
        lam="tokens",
    ),
    Case("packed_window_v2", n_q=13, options={"cu_seqlens_q": [0, 9, 13], "window": (3, 0)}, **V2),
    Case(
        "packed_two_lengths",
        n_q=9,
        n_k=14,
        options={
            "cu_seqlens_q": [0, 4, 4, 7, 9],
            "cu_seqlens_k": [0, 3, 6, 12, 12],
            "max_seqlen_q": 4,
            "max_seqlen_k": 6,
        },
    ),
    Case(
        "packed_seqused",
        n_q=4,
        n_k=14,
        options={
            "cu_seqlens_q": [0, 1, 2, 4],
            "cu_seqlens_k": [0, 4, 9, 14],
            "seqused_k": [2, 5, 1],
            "max_seqlen_q": 2,
            "max_seqlen_k": 5,
        },
        **V2,
    ),
]


def sees(case: Case, row: int, i: int, j: int) -> bool:
    """Whether query i of batch row `row`  sees key j, decided one pair at a time."""
    o = case.options
    n_k = case.n_q if case.n_k is None else case.n_k
    if case.packed:
        cu_q, cu_k = o["cu_seqlens_q"], o.get("cu_seqlens_k", o["cu_seqlens_q"])
        documents = range(len(cu_q) - 1)
        mine = [x for x in documents if cu_q[x] <= i < cu_q[x + 1]]
        keys = [x for x in documents if cu_k[x] <= j < cu_k[x + 1]]
        if not mine or mine != keys:
            return False
        x = mine[0]
        i, j, length = i - cu_q[x], j - cu_k[x], cu_q[x + 1] - cu_q[x]
        used = o["seqused_k"][x] if "seqused_k" in o else cu_k[x + 1] - cu_k[x]
    else:
        length, used = case.n_q, o["seqused_k"][row] if "seqused_k" in o else n_k
    if j >= used:
        return False
    position = i + used - length
    left, right = o.get("window", (-1, -1))
    if o.get("causal", True):
        right = 0
    return (left < 0 or j >= position - left) and (right < 0 or j <= position + right)


def by_loops(case: Case, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """The definition, one output vector at a time."""
    if case.packed:
        q, k, v = q[None], k[None], v[None]
        lam = lam[None] if lam.dim() == 2 else lam
    scale = case.options.get("scale", 1 / math.sqrt(case.d))
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for pair in range(case.pairs):
                group = pair // (case.pairs // case.groups)
                keys = [j for j in range(k.shape[1]) if sees(case, b, i, j)]
                if not keys:
                    rows.append(torch.zeros(case.d_v, dtype=q.dtype))
                    continue
                branches = []
                for branch in (0, 1):
                    head = 2 * group + branch if case.own_keys else group
                    scores = torch.stack(
                        [scale * (q[b, i, 2 * pair + branch] @ k[b, j, head]) for j in keys]
                    )
                    p = scores.exp() / scores.exp().sum()
                    branches.append(sum(w * v[b, j, group] for w, j in zip(p, keys, strict=True)))
                this = lam if lam.dim() == 0 else lam[pair] if lam.dim() == 1 else lam[b, i, pair]
                rows.append(branches[0] - this * branches[1])
    out = torch.stack(rows).view(q.shape[0], q.shape[1], case.pairs, case.d_v)
    return out[0] if case.packed else out
