"""Generation with a cache gives what the model gives without one."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.decoder import Decoder
from megadiff.models.generation import Sampling, draw, generate, next_token_probabilities
from megadiff.parallel.mesh import build_mesh
from megadiff.parallel.parameter import initialize
from tests.distributed import run_distributed

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    init_method_std=0.2,
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 8, 2, 8, 1]]


def build(config: ModelConfig, tensor: int = 1) -> Decoder:
    mesh = build_mesh(tensor=tensor)
    model = Decoder(config, mesh, max_positions=64, dtype=torch.float64)
    initialize(model, seed=0)
    return model.eval()


def logits_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocab]` without a cache."""
    with torch.no_grad():
        positions = torch.arange(len(tokens)).unsqueeze(0)
        return model(torch.tensor([tokens]), positions)[0, :, : model.vocab_size]


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
@pytest.mark.parametrize("mixer", get_args(TokenMixer))
def test_cached_logits_equal_uncached_ones(mixer: TokenMixer, positions: str) -> None:
    config = replace(CONFIG, token_mixer=mixer, position_embedding_type=positions)
    model = build(config)
    continuations = [[7, 7, 1], [9, 2, 4], [5, 0, 60]]
    longest = max(map(len, PROMPTS))
    cache = model.new_cache(longest + 3)
    padded = torch.tensor([p + [0] * (longest - len(p)) for p in PROMPTS])
    with torch.no_grad():
        where = torch.arange(longest).expand(3, -1)
        first = model(padded, where, cache=cache)[..., :61]
        later = [
            model(
                torch.tensor([[c[step]] for c in continuations]),
                torch.tensor([[len(p) + step] for p in PROMPTS]),
                cache=cache,
            )[..., :61]
            for step in range(3)
        ]
    for row, (prompt, continuation) in enumerate(zip(PROMPTS, continuations, strict=True)):
        expected = logits_of(model, prompt + continuation)
        torch.testing.assert_close(first[row, : len(prompt)], expected[: len(prompt)])
        for step in range(3):
            torch.testing.assert_close(later[step][row, 0], expected[len(prompt) + step])


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def columns(steps: list[list[int | None]]) -> list[list[int | None]]:
    return [list(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize("mixer", get_args(TokenMixer))
def test_greedy_generation_of_prompts_of_unequal_lengths(mixer: TokenMixer) -> None:
    model = build(replace(CONFIG, token_mixer=mixer))
    steps = list(generate(model, PROMPTS, 6, Sampling(temperature=0)))
    assert columns(steps) == [greedy(model, prompt, 6) for prompt in PROMPTS]


def test_no_token_is_computed_behind_the_last() -> None:
    model, calls = build(CONFIG), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert len(list(generate(model, PROMPTS, 3))) == len(calls) == 3
    assert list(generate(model, PROMPTS, 0)) == []


def test_a_sequence_ends_with_the_end_of_document_and_the_others_go_on() -> None:
    model = build(CONFIG)
    free = columns(list(generate(model, PROMPTS, 6, Sampling(temperature=0))))
    eod = free[0][2]
    ended = columns(list(generate(model, PROMPTS, 6, Sampling(temperature=0), eod)))
    for before, after in zip(free, ended, strict=True):
        end = before.index(eod) if eod in before else len(after)
        assert after[:end] == before[:end]
        assert after[end:] == [None] * (len(after) - end)


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    model = build(CONFIG)
    together = columns(list(generate(model, [PROMPTS[0], PROMPTS[1]], 8, Sampling(seed=5))))
    alone = columns(list(generate(model, [PROMPTS[0]], 8, Sampling(seed=5))))
    assert together[0] == alone[0]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(build(CONFIG), [[1], []], 1))


def _generate_split(tensor: int) -> list[list[int | None]]:
    return columns(list(generate(build(CONFIG, tensor), PROMPTS, 6, Sampling(seed=3))))


def test_tensor_parallel_ranks_generate_what_one_process_generates() -> None:
    alone = _generate_split(1)
    assert run_distributed(2, _generate_split, 2) == [alone, alone]


LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def test_top_k_keeps_the_likeliest() -> None:
    kept = next_token_probabilities(LOGITS, Sampling(top_k=2))
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0, 0]]).double())


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    kept = next_token_probabilities(LOGITS, Sampling(top_p=0.6))
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0, 0]]).double())
    only = next_token_probabilities(LOGITS, Sampling(top_p=0.4))
    torch.testing.assert_close(only, torch.tensor([[1.0, 0, 0, 0]]).double())


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    squared = next_token_probabilities(LOGITS, Sampling(temperature=0.5))
    expected = LOGITS.exp().double() ** 2
    torch.testing.assert_close(squared, expected / expected.sum())
    assert next_token_probabilities(LOGITS, Sampling(temperature=0)).tolist() == [[1, 0, 0, 0]]


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    probabilities = next_token_probabilities(LOGITS, Sampling()).expand(4000, -1)

    def draws() -> torch.Tensor:
        return torch.tensor(draw(probabilities, [torch.Generator().manual_seed(9)] * 4000))

    counts = torch.bincount(draws(), minlength=4) / 4000
    assert torch.equal(draws(), draws())
    torch.testing.assert_close(counts, LOGITS.exp()[0], atol=0.04, rtol=0)  # five deviations


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_impossible_sampling_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        Sampling(**wrong)
