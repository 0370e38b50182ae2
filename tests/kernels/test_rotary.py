import math

import pytest
import torch

from megadiff.kernels import rotary, rotary_cos_sin
from megadiff.kernels.rotary import rotary_frequencies


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [8, 4])
def test_rotary_turns_pairs_as_complex_numbers(interleaved: bool, width: int) -> None:
    q = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    k = torch.randn(2, 5, 1, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 3, 1000], dtype=torch.float64)
    cos, sin = rotary_cos_sin(positions, width, 500.0)
    angle = positions[:, None] * torch.tensor(
        [500.0 ** (-2 * i / width) for i in range(width // 2)],
        dtype=torch.float64,
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    for x, y in zip((q, k), rotary(q, k, cos, sin, interleaved), strict=True):
        first = x[..., 0:width:2] if interleaved else x[..., : width // 2]
        second = x[..., 1:width:2] if interleaved else x[..., width // 2 : width]
        turned = torch.complex(first, second) * turn
        mine_first = y[..., 0:width:2] if interleaved else y[..., : width // 2]
        mine_second = y[..., 1:width:2] if interleaved else y[..., width // 2 : width]
        torch.testing.assert_close(torch.complex(mine_first, mine_second), turned)
        assert torch.equal(x[..., width:], y[..., width:])


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64).unbind(0)
    scores = []
    for at in (0, 1000, 100_000):
        cos, sin = rotary_cos_sin(torch.tensor([at + 7.0, at]).double(), 16)
        turned_q, turned_k = rotary(q, k, cos[:, None], sin[:, None])
        scores.append((turned_q[0] * turned_k[1]).sum())
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-9, atol=1e-9)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain, scaled = rotary_frequencies(64, 500_000.0), rotary_frequencies(64, 500_000.0, 32.0)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    between = ~short & ~long
    assert short.any() and long.any() and between.any()
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 32)
    smooth = (8192 / wavelength - 1) / (4 - 1)  # as in Llama's code
    expected = (1 - smooth) * plain / 32 + smooth * plain
    torch.testing.assert_close(scaled[between], expected[between])


def test_dtypes() -> None:
    cos, sin = rotary_cos_sin(torch.arange(4), 8)
    assert cos.dtype == sin.dtype == torch.float32
    q = torch.randn(1, 4, 2, 8).bfloat16()
    assert rotary(q, q, cos, sin)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="exceeds q's head width 4"):
        rotary(q[..., :4], q, cos, sin)
