from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megadiff.config import OptimizerConfig
from megadiff.optim.muon import is_muon_matrix, orthogonalize
from megadiff.optim.optimizer import Optimizer
from megadiff.parallel.parameter import Init, Section, initialize, make_parameter
from tests.distributed import run_distributed
from tests.optim.test_model_splits import Split, assert_equal_training, train

CONFIG = OptimizerConfig(optimizer="muon", clip_grad=0.5, lambda_lr_multiplier=3.0)


def matrix_parameter(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    section = Section("w", (rows, columns), 0, rows, 0, "matrix", Init())
    weight = make_parameter((rows, columns), [section], dtype=dtype, device="cpu")
    nn.init.zeros_(weight)
    return weight


def by_singular_values(x: Tensor, steps: int = 5) -> Tensor:
    """The same iteration on the singular values alone: U p(p(..p(s / |s|))) V^T."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_iteration_acts_on_singular_values(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = orthogonalize(x, 5)
    torch.testing.assert_close(y, by_singular_values(x), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.3 and values.max() < 1.25


def test_only_whole_matrices_are_orthogonalised() -> None:
    def section(group, *shape: int) -> Section:
        return Section("x", shape, 0, shape[0], 0, group, Init())

    assert is_muon_matrix(section("matrix", 4, 6))
    assert not is_muon_matrix(section("matrix", 4, 1, 3))  # a convolution
    assert not is_muon_matrix(section("embedding", 4, 6))
    assert not is_muon_matrix(section("lambda", 4, 6))


def test_steps_follow_the_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = matrix_parameter(6, 9, torch.float64)
    with torch.no_grad():
        weight.copy_(torch.randn(6, 9, generator=generator))
    optimizer = Optimizer(nn.ParameterList([weight]), replace(CONFIG, clip_grad=0.0))
    expected, momentum = weight.detach().clone(), torch.zeros(6, 9, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step(0.02)
        momentum = 0.95 * momentum + 0.05 * gradient
        update = by_singular_values(0.05 * gradient + 0.95 * momentum)
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * 0.2 * 3 * update
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


def test_sections_of_a_fused_weight_are_orthogonalised_apart() -> None:
    sections = [
        Section("q", (4, 6), 0, 4, 0, "matrix", Init(1.0)),
        Section("k", (5, 6), 4, 5, 0, "matrix", Init(1.0)),
    ]
    fused = make_parameter((9, 6), sections, dtype=torch.float64, device="cpu")
    modules = nn.ParameterList([fused])
    initialize(modules, 1)
    before, gradient = fused.detach().clone(), torch.randn(9, 6, dtype=torch.float64)
    optimizer = Optimizer(modules, replace(CONFIG, clip_grad=0.0, weight_decay=0.0))
    optimizer.zero_grad()
    (fused * gradient).sum().backward()
    optimizer.step(0.02)
    update = torch.cat([by_singular_values(part) for part in gradient.split([4, 5])])
    expected = before - 0.02 * 0.2 * 6**0.5 * update
    torch.testing.assert_close(fused.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("world", "split", "sharded"),
    [
        (4, Split(tensor=2), True),
        (4, Split(tensor=2, alignment=64, bucket_size=10**6), False),
        (4, Split(tensor=4), False),  # two copies of each key/value group
        (3, Split(alignment=64), True),
    ],
)
def test_any_split_equals_one_process(world: int, split: Split, sharded: bool) -> None:
    alone = train(Split(), CONFIG, torch.float64)
    config = replace(CONFIG, use_distributed_optimizer=sharded)
    results = run_distributed(world, train, split, config, torch.float64)
    assert_equal_training(results, alone, 1e-9)


def test_muon_moves_a_matrix_by_about_as_much_as_adam() -> None:
    """An update of 0.2 sqrt(max side) times an orthogonal matrix has an RMS of about 0.2."""
    weight = matrix_parameter(64, 256, torch.float32)
    optimizer = Optimizer(nn.ParameterList([weight]), CONFIG)
    optimizer.zero_grad()
    (weight * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step(1.0)
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)
