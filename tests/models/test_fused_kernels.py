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
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=50, token_mixer=mixer
    )
    model = Decoder(config, recompute=Recompute(granularity), device=DEVICE)
    initialize(model, 1)
    results = []
    for on in (False, True):
        use_triton(monkeypatch, on)
        results.append(losses_and_gradients(model))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(
            fused, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max())
        )


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
