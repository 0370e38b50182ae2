"""What a model's attention looks at: maps of both branches, their scores, hidden states.

For prompts and short texts: the maps are held in memory, layer by layer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megadiff.kernels.reference import wide
from megadiff.models.attention import DiffAttentionV1, DiffAttentionV2, StandardAttention
from megadiff.models.decoder import Decoder
from megadiff.models.geometry import Geometry

Attention = StandardAttention | DiffAttentionV1 | DiffAttentionV2


@dataclass(frozen=True)
class Maps:
    """Causal attention of one layer over one sequence of `n` tokens, in at least float32.

    scores: `[query heads, n, n]`, q k^T / sqrt(d); -inf where a query does not see the key.
    first, second: softmaxes of the branches, `[heads, n, n]`; second is None without branches.
    lam: lambda, `[heads, n]` by query; None without branches.
    """

    scores: Tensor
    first: Tensor
    second: Tensor | None = None
    lam: Tensor | None = None

    @property
    def difference(self) -> Tensor:
        """What multiplies the values: branch 1 minus lambda times branch 2, `[heads, n, n]`."""
        if self.second is None or self.lam is None:
            return self.first
        return self.first - self.lam.unsqueeze(-1) * self.second


def attention_maps(mixer: Attention, x: Tensor, geometry: Geometry) -> Maps:
    """The maps of a mixer (standard, DIFF V1 or V2) for its input `x` `[1, n, hidden]`."""
    q, k, v, *logits = mixer.heads(x, geometry)
    q, k = (t[0].to(wide(t.dtype)) for t in (q, k))  # [n, heads, width]
    branches = 2 if isinstance(mixer, (DiffAttentionV1, DiffAttentionV2)) else 1
    heads, of_group = q.shape[1] // branches, k.unflatten(1, (v.shape[2], -1))
    k = of_group.repeat_interleave(q.shape[1] // k.shape[1], 1).flatten(1, 2)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    maps = scores.softmax(-1)
    if branches == 1:
        return Maps(scores, maps)
    if isinstance(mixer, DiffAttentionV2):
        lam = torch.sigmoid(logits[0][0].to(q.dtype)).T
    else:
        assert isinstance(mixer, DiffAttentionV1)
        lam = mixer.lambda_and_norm()[0].to(q.dtype)
        lam = lam.expand(heads).unsqueeze(1).expand(heads, x.shape[1])
    return Maps(scores, maps[0::2], maps[1::2], lam)


Look = Callable[[int, Maps | None, Tensor], None]
"""Called for each layer with its index, its maps and its output `[n, hidden]`."""


@torch.no_grad()
def observe(model: Decoder, tokens: list[int], look: Look) -> Tensor:
    """Run one sequence and show `look` each layer; the logits `[n, vocab]`.

    Maps are None for layers without attention. Raises ValueError for a model that is split.
    """
    if model.mesh.world_size > 1:
        raise ValueError("analysis wants the whole model in one process")
    maps: dict[int, Maps | None] = {}

    def before(layer: int, mixer: Any, arguments: tuple[Any, ...]) -> None:
        attends = isinstance(mixer, Attention)
        maps[layer] = attention_maps(mixer, *arguments[:2]) if attends else None

    def after(layer: int, block: Any, arguments: Any, output: Tensor) -> None:
        look(layer, maps.pop(layer), output[0])

    with ExitStack() as hooks:
        for layer, block in zip(model.stage.layers, model.blocks, strict=True):
            for hook in (
                block.mixer.register_forward_pre_hook(partial(before, layer)),
                block.register_forward_hook(partial(after, layer)),
            ):
                hooks.enter_context(hook)
        device = next(model.parameters()).device
        ids = torch.tensor([tokens], device=device)
        logits = model(ids, torch.arange(len(tokens), device=device).unsqueeze(0))
    return logits[0, :, : model.vocab_size]


def span_attention(maps: Maps, span: range) -> tuple[float, float]:
    """Attention of the last token to `span` and to all other tokens, mean over heads.

    Of the difference, normalised by the sum of its absolute values, so that models with and without
    branches compare; negative entries count as they are.
    """
    row = maps.difference[:, -1]
    row = row / row.abs().sum(-1, keepdim=True)
    inside = row[:, span.start : span.stop].sum(-1)
    return inside.mean().item(), (row.sum(-1) - inside).mean().item()


RANKS = (1, 2, 3, 10, 100)


class Outliers:
    """Largest absolute values over many tensors, and the mean of their medians."""

    def __init__(self) -> None:
        self.largest = torch.zeros(0)
        self.medians: list[float] = []

    def add(self, values: Tensor) -> None:
        """Count the finite entries of `values`."""
        values = values[values.isfinite()].abs().flatten().float().cpu()
        self.largest = torch.cat([self.largest, values]).topk(
            min(max(RANKS), len(self.largest) + len(values))
        )[0]
        self.medians.append(values.median().item())

    def summary(self) -> dict[str, float]:
        """Top-1, -2, -3, -10 and -100 (as far as there are as many) and the median."""
        top = {f"top-{n}": self.largest[n - 1].item() for n in RANKS if n <= len(self.largest)}
        return top | {"median": sum(self.medians) / max(len(self.medians), 1)}
