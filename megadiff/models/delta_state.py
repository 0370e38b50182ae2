"""What a delta layer remembers of the tokens before, and its cache during generation."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """What the mixing of tokens starts from, of some heads."""

    qkv: Tensor  # [b, s, channels]
    beta: Tensor  # [b, s, heads], at least float32, as is g
    g: Tensor | None  # [b, s, heads], log of the decay

    def only(self, kept: Tensor) -> "Tokens":
        """The same, but tokens where `kept` `[b, s]` is false leave no trace in any state."""
        kept = kept.unsqueeze(-1)
        g = None if self.g is None else self.g * kept
        return Tokens(self.qkv * kept, self.beta * kept, g)


@dataclass(frozen=True)
class State:
    """What earlier tokens left behind, for each sequence; None is the state before any token."""

    inputs: Tensor | None = None  # [b, convolution size - 1, channels]
    memory: Tensor | None = None  # [b, heads, key width, value width], at least float32


Mix = Callable[[Tokens, State], tuple[Tensor, State]]
"""Mixes tokens behind a state; returns `[b, s, heads, value width]` and the state behind them."""


class DeltaCache:
    """The state of one layer during generation; its size does not depend on the length.

    It keeps the tokens of the last call, so that each sequence may go on from any of them: a prompt
    may be padded on the right. Tokens at negative positions are padding on the left.
    """

    def __init__(self) -> None:
        self.state = State()
        self._last: tuple[State, Tokens, Tensor] | None = None

    def advance(self, mix: Mix, tokens: Tokens, positions: Tensor) -> Tensor:
        """Mix `tokens` at `positions` `[b, n]` behind the state and move the state behind them."""
        self._settle(mix, positions[:, 0])
        tokens = tokens.only(positions >= 0)
        before = self.state
        o, self.state = mix(tokens, before)
        self._last = (before, tokens, positions)
        return o

    def _settle(self, mix: Mix, first: Tensor) -> None:
        """Undo the tokens of the last call at or behind the positions `first` `[b]`."""
        if self._last is None:
            return
        before, tokens, positions = self._last
        undone = positions[:, -1] + 1 - first
        least, most = (int(n) for n in undone.aminmax())
        count = positions.shape[1]
        if least < 0 or most > count:
            raise ValueError(
                "a delta layer goes on behind its last token, or steps back over tokens of the "
                f"last call: that one had {count} tokens, up to positions "
                f"{positions[:, -1].tolist()}, and this one starts at {first.tolist()}"
            )
        if most == 0:
            return
        kept = positions < first.unsqueeze(1)
        _, self.state = mix(tokens.only(kept), before)
        if self.state.inputs is not None:  # those behind the kept tokens, which come first
            inputs = before.inputs
            if inputs is None:
                inputs = torch.zeros_like(self.state.inputs)
            rows = torch.cat([inputs, tokens.qkv], 1)
            index = torch.arange(inputs.shape[1], device=kept.device) + kept.sum(1, keepdim=True)
            inputs = rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[2]))
            self.state = replace(self.state, inputs=inputs)
