"""Continue token sequences with a decoder and its caches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.config import ConfigError
from megadiff.kernels.reference import wide
from megadiff.models.decoder import Decoder
from megadiff.parallel.collectives import gather_sequence


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0 for all
    top_p: float = 1.0  # only the likeliest tokens that together have probability p
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature {self.temperature} and top_k {self.top_k} must not be negative, and "
                f"top_p {self.top_p} must lie above 0 and up to 1"
            )


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eod: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """One new token of every sequence at a time, None for those that have ended with `eod`.

    `prompts` are token ids, at least one each, of any lengths. A sequence draws from a generator of
    its own, so that it does not depend on the others. All tensor-parallel ranks yield the same.
    `vocab_size` keeps to the ids below it, where the model has more than the tokenizer.
    """
    sampling = sampling or Sampling()
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    cache = model.new_cache(longest + max_new_tokens)
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    # Prompts are padded on the right: a token sees none behind itself, and what the padding left in
    # the cache is overwritten by new tokens before they see it.
    tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    ends = torch.tensor([len(p) for p in prompts], device=device)
    logits = model(tokens, positions, cache=cache)
    last = logits.gather(1, (ends - 1).view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))[:, 0]
    finished = [False] * len(prompts)
    for left in reversed(range(max_new_tokens)):
        logits = gather_vocabulary(last, model)[:, :vocab_size]
        probabilities = next_token_probabilities(logits, sampling)
        chosen = draw(probabilities, generators)
        finished = [f or token == eod for f, token in zip(finished, chosen, strict=True)]
        yield [None if f else token for f, token in zip(finished, chosen, strict=True)]
        if all(finished) or not left:
            return
        tokens = torch.tensor(chosen, device=device).unsqueeze(1)
        last = model(tokens, ends.unsqueeze(1), cache=cache)[:, 0]
        ends = ends + 1


def gather_vocabulary(logits: Tensor, model: Decoder) -> Tensor:
    """`[b, vocab / tp]` of each rank as `[b, vocab]` everywhere, at least float32, unpadded."""
    logits = gather_sequence(logits.to(wide(logits.dtype)), model.mesh.tp)  # along dim 1
    return logits[:, : model.vocab_size]


def next_token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[b, vocab]` in float64 on the CPU, where every device and split draws alike."""
    logits = logits.double().cpu()
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """A token of each row, by the row's own generator."""
    cumulative = probabilities.cumsum(-1)
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
    target = uniform * cumulative[:, -1]
    chosen = torch.searchsorted(cumulative, target.unsqueeze(1), right=True)[:, 0]
    return chosen.clamp(max=probabilities.shape[-1] - 1).tolist()
