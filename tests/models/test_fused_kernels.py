"""A whole model gives the same losses and gradients with the Triton kernels as without them."""

import sys

import pytest
import torch
from torch import Tensor

from megadiff.config import ModelConfig, TokenMixer
from megadiff.models.decoder import Decoder
from megadiff.models.memory import layer_elements
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import initialize
from megadiff.parallel.recompute import Recompute

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def losses_and_gradients(model: Decoder) -> list[Tensor]:
    tokens = torch.arange(2 * 9, device=DEVICE).view(2, 9) * 7 % 50
    positions = torch.arange(8, device=DEVICE).expand(2, -1)
    losses = model(tokens[:, :-1], positions, tokens[:, 1:])
    return [losses, *torch.autograd.grad(losses.sum(), list(model.parameters()))]


def use_triton(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    for name in ("activation", "loss", "norm", "rotary"):
        module = sys.modules[f"megadiff.kernels.{name}"]
        monkeypatch.setattr(module, "on_triton", lambda x: on)


@pytest.mark.parametrize("mixer", ["standard", "diff_v1", "diff_v2"])
@pytest.mark.parametrize("granularity", [None, "full"])
def test_model(mixer: TokenMixer, granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is measured: errors of the plain form in float32 against float64, at weights that
    differ by some roundings. One draw may be small by chance (the gradients of lambda's vectors are
    sums that nearly cancel), so the largest of six counts, and the fused form has three times it.
    """
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=50, token_mixer=mixer
    )
    eps = torch.finfo(torch.float32).eps

    def results(dtype: torch.dtype, seed: int, fused: bool = False) -> list[Tensor]:
        use_triton(monkeypatch, fused)
        model = Decoder(config, recompute=Recompute(granularity), dtype=dtype, device=DEVICE)
        initialize(model, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                moved = 1 + 8 * eps * torch.rand(weight.shape, generator=generator)
                weight.copy_(weight.float() * moved.to(DEVICE))  # the same in both types
        return [x.detach() for x in losses_and_gradients(model)]

    def errors(seed: int, fused: bool = False) -> list[float]:
        pairs = zip(results(torch.float32, seed, fused), results(torch.float64, seed), strict=True)
        return [float((x - truth).abs().max()) for x, truth in pairs]

    plain = [max(column) for column in zip(*(errors(seed) for seed in range(6)), strict=True)]
    for error, of_plain in zip(errors(0, fused=True), plain, strict=True):
        assert error <= 3 * of_plain


NONE, CHEAP = Recompute(), Recompute("selective", modules=("layernorm", "mlp_act"))
ALL = Recompute("selective", modules=("layernorm", "mlp_act", "core_attn"))


@pytest.mark.parametrize("recompute", [NONE, CHEAP, ALL])
@pytest.mark.parametrize(
    ("mixer", "heads", "groups"),
    [("standard", 8, 2), ("diff_v1", 4, 2), ("diff_v2", 8, 2)],
)
def test_fused_kernels_keep_what_is_estimated(
    mixer: TokenMixer, heads: int, groups: int, recompute: Recompute, monkeypatch
) -> None:
    """Of 16-bit values, each storage once; float32 statistics are small."""
    use_triton(monkeypatch, True)
    monkeypatch.setattr(sys.modules["megadiff.kernels.attention"], "_choose", lambda *_: "triton")
    m = ModelConfig(
        num_layers=2, hidden_size=128, num_attention_heads=heads, num_query_groups=groups,
        kv_channels=16, vocab_size=128, token_mixer=mixer,
    )  # fmt: skip
    model = Decoder(m, recompute=recompute, dtype=torch.bfloat16, device=DEVICE)
    initialize(model, 1)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if t.dtype == torch.bfloat16 and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return t

    tokens = torch.arange(32, device=DEVICE).view(2, 16)
    positions = torch.arange(16, device=DEVICE).expand(2, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(tokens, positions, tokens)
    hidden = 32 * m.hidden_size
    layer = layer_elements(m, mixer, ParallelMesh(), 32, hidden, recompute)
    # behind the layers: what the last norm reads and writes, and the logits
    elements = m.num_layers * layer + 2 * hidden + 32 * 128
    assert sum(storage.nbytes() for storage in kept.values()) == 2 * elements
