"""A whole model gives the same losses and gradients with the Triton kernels as without them."""

import sys

import pytest
import torch
from torch import Tensor

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import initialize
from megadiff.parallel.recompute import Recompute

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def losses_and_gradients(model: Decoder) -> list[Tensor]:
    tokens = torch.arange(2 * 9, device=DEVICE).view(2, 9) * 7 % 50
    positions = torch.arange(8, device=DEVICE).expand(2, -1)
    losses = model(tokens[:, :-1], positions, tokens[:, 1:])
    return [losses, *torch.autograd.grad(losses.sum(), list(model.parameters()))]


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
@pytest.mark.parametrize("granularity", [None, "full"])
def test_model(mixer: TokenMixer, granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=50, token_mixer=mixer
    )
    model = Decoder(config, recompute=Recompute(granularity), device=DEVICE)
    initialize(model, 1)
    results = []
    for on in (False, True):
        for name in ("activation", "loss", "norm", "rotary"):
            module = sys.modules[f"megadiff.kernels.{name}"]
            monkeypatch.setattr(module, "on_triton", lambda x, on=on: on)
        results.append(losses_and_gradients(model))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(
            fused, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max())
        )
