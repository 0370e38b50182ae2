"""The plain DiffTransformer's weights in our decoder: its logits, loss and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.config import load_config
from megadiff.interop.plain import load_plain_state_dict, plain_config, plain_name
from megadiff.models.decoder import Decoder
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from megadiff.parallel.parameter import initialize, local_view, record_of
from tests.distributed import run_distributed

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # the golden values are float32


def golden() -> dict[str, torch.Tensor]:
    values = np.load(ROOT / "tests" / "data" / "plain_model.npz")
    return {name: torch.from_numpy(values[name]) for name in values.files}


def state_dict(values: dict[str, torch.Tensor], kind: str = "param") -> dict[str, torch.Tensor]:
    prefix = f"{kind}/"
    return {n.removeprefix(prefix): t for n, t in values.items() if n.startswith(prefix)}


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def loss_and_gradient_errors(mesh: ParallelMesh) -> tuple[float, dict[str, float]]:
    """The loss, and by name the relative error of this rank's part of each gradient."""
    values = golden()
    state, gradients = state_dict(values), state_dict(values, "grad")
    model = Decoder(plain_config(state), mesh, dtype=torch.float64)
    load_plain_state_dict(model, state)
    tokens = values["input_ids"]
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    loss = model(tokens, positions, values["targets"]).mean()
    loss.backward()
    errors = {}
    for parameter in model.parameters():
        record = record_of(parameter)
        for section in record.sections:
            theirs = gradients[plain_name(section.name)]
            theirs = theirs.narrow(record.dim, section.offset, section.length)
            ours = local_view(parameter.grad, section, record.dim)
            errors[section.name] = relative_error(ours, theirs)
    return loss.item(), errors


def test_logits():
    values = golden()
    state = state_dict(values)
    model = Decoder(plain_config(state))
    load_plain_state_dict(model, state)
    tokens = values["input_ids"]
    logits = model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))
    assert relative_error(logits[..., : model.vocab_size], values["logits"]) < TOLERANCE


def test_loss_and_gradients():
    loss, errors = loss_and_gradient_errors(ParallelMesh())
    assert loss == pytest.approx(golden()["loss"].item(), rel=TOLERANCE)
    assert max(errors.values()) < TOLERANCE


def split_job():
    return loss_and_gradient_errors(build_mesh(tensor=2, kv_copies=1, sequence_parallel=False))


def test_a_split_model_has_the_same_gradients():
    for loss, errors in run_distributed(2, split_job):
        assert loss == pytest.approx(golden()["loss"].item(), rel=TOLERANCE)
        assert max(errors.values()) < TOLERANCE


def test_the_preset_is_this_architecture():
    preset = load_config(["--config", str(ROOT / "configs" / "plain_diff_transformer.yaml")]).model
    published = plain_config(state_dict(golden()))
    sizes = (
        "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size",
        "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    for name, value in vars(published).items():
        assert name in sizes or getattr(preset, name) == value, name
    assert preset.kv_channels == preset.hidden_size // preset.num_attention_heads
    assert preset.ffn_size == 2 * preset.hidden_size


def test_what_does_not_fit_is_named():
    state = state_dict(golden())
    model = Decoder(plain_config(state))
    initialize(model, seed=1)
    before = [p.clone() for p in model.parameters()]
    state["extra"] = state.pop("norm.scale")
    state["head.weight"] = state["head.weight"][:5]
    with pytest.raises(ValueError) as error:
        load_plain_state_dict(model, state)
    for part in ("missing: norm.scale", "unknown: extra", "head.weight is (5, 32)"):
        assert part in str(error.value)
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.raises(ValueError, match=r"there is no layers\.0\.attn\.lambda_q1"):
        plain_config({"token_emb.weight": torch.zeros(4, 4)})
