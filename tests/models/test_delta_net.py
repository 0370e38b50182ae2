"""The delta layers: the published layer's values, and none of its defects."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megadiff.config import Config, ConfigError, ModelConfig, validate
from megadiff.kernels.delta_rule_reference import delta_rule_reference
from megadiff.models.decoder import Decoder, Stage
from megadiff.models.delta_net import DeltaNet, GatedDeltaNet
from megadiff.models.geometry import Geometry
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import initialize, local_view, record_of

DATA = Path(__file__).parents[1] / "data"
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SMALL = ModelConfig(num_layers=4, hidden_size=24, num_attention_heads=4, vocab_size=50)


def make_mixer(config: ModelConfig = SMALL, *, gated: bool = False, dtype=torch.float64, seed=3):
    kind = GatedDeltaNet if gated else DeltaNet
    mixer = kind(config, 0, ParallelMesh(), "mixer", dtype=dtype, device="cpu")
    initialize(mixer, seed)
    with torch.no_grad():  # larger than at the start of training, so that every part counts
        mixer.projection.weight.mul_(20)
        mixer.out.weight.mul_(20)
    return mixer


def plain(x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Geometry:
    return Geometry(torch.arange(x.shape[1]).expand(x.shape[:2]), cu_seqlens, {})


def sections_of(mixer: torch.nn.Module, of_gradient: bool = False) -> dict[str, torch.Tensor]:
    """Weights (or gradients) of a mixer by section name, without the mixer's own."""
    return {
        section.name.removeprefix("mixer."): local_view(
            parameter.grad if of_gradient else parameter.data, section, record_of(parameter).dim
        )
        for parameter in mixer.parameters()
        for section in record_of(parameter).sections
    }


PUBLISHED = {
    "q.weight": "q_proj",
    "k.weight": "k_proj",
    "v.weight": "v_proj",
    "gate.weight": "g_proj",
    "beta.weight": "b_proj",
    "q_conv.weight": "q_conv",
    "k_conv.weight": "k_conv",
    "v_conv.weight": "v_conv",
    "o_norm.weight": "o_norm",
    "o.weight": "o_proj",
}


@pytest.mark.parametrize("file", ["delta_net_layer", "delta_net_layer_gated"])
def test_published_layer(file):
    golden = np.load(DATA / f"{file}.npz")
    tensors = {key: torch.from_numpy(golden[key]) for key in golden.files}
    config = replace(
        SMALL,
        hidden_size=golden["x"].shape[-1],
        delta_num_heads=int(golden["num_heads"]),
        delta_expand_k=float(golden["expand_k"]),
        delta_expand_v=float(golden["expand_v"]),
        delta_use_gate=bool(golden["use_gate"]),
        delta_allow_neg_eigval=bool(golden["allow_neg_eigval"]),
        norm_epsilon=float(golden["norm_eps"]),
    )
    mixer = make_mixer(config)
    for name, value in sections_of(mixer).items():
        value.copy_(tensors[f"param/{PUBLISHED[name]}"])
    x = tensors["x"].requires_grad_()
    y = mixer(x, plain(x))
    y.backward(tensors["dy"])
    cache = mixer.new_cache(x.shape[1])
    mixer(x, plain(x), cache)

    found = {"y": y, "dx": x.grad, "final_state": cache.state.memory}
    expected = {name: tensors[name] for name in found}
    for name, gradient in sections_of(mixer, of_gradient=True).items():
        found[name], expected[name] = gradient, tensors[f"grad/{PUBLISHED[name]}"]
    assert len(found) == 3 + sum(key.startswith("grad/") for key in tensors)
    for name in found:
        assert (found[name] - expected[name]).norm() < 1e-9 * expected[name].norm(), name


def test_gated_layer_is_its_formula():
    """arXiv 2412.06464: the state decays by exp(-exp(A_log) softplus(a + dt_bias)) in each step."""
    mixer = make_mixer(gated=True)
    w = sections_of(mixer)
    x = torch.randn(2, 9, 24, dtype=torch.float64)

    def heads(name: str) -> torch.Tensor:
        y = F.pad((x @ w[f"{name}.weight"].T).mT, (3, 0))
        return F.silu(F.conv1d(y, w[f"{name}_conv.weight"], groups=24)).mT.unflatten(-1, (4, 6))

    q, k, v = heads("q"), heads("k"), heads("v")
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    beta = torch.sigmoid(x @ w["beta.weight"].T)
    g = -w["A_log"].exp() * F.softplus(x @ w["decay.weight"].T + w["dt_bias"])
    o, _ = delta_rule_reference(q, k, v, beta, g)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["o_norm.weight"]
    o = o * F.silu((x @ w["gate.weight"].T).unflatten(-1, (4, 6)))
    torch.testing.assert_close(mixer(x, plain(x)), o.flatten(2) @ w["o.weight"].T, **EXACT)


def test_initial_decay_is_that_of_mamba_2():
    config = replace(SMALL, hidden_size=2048, delta_num_heads=2048)
    mixer = GatedDeltaNet(config, 0, ParallelMesh(), "m", dtype=torch.float32, device="cpu")
    initialize(mixer, 1)
    a, step = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert 1 <= a.min() < 1.1 and 15.9 < a.max() <= 16.001
    assert 0.00099 < step.min() < 0.0011 and 0.095 < step.max() < 0.1001
    assert a.mean() == pytest.approx(8.5, abs=0.3)  # uniform
    assert step.log().mean() == pytest.approx(np.log(0.01), abs=0.1)  # log-uniform


OPTIONS = {
    "plain": {},
    "gate": {"delta_use_gate": True},
    "no gate": {"delta_use_gate": False},
    "no beta": {"delta_use_beta": False},
    "negative eigenvalues": {"delta_allow_neg_eigval": True},
    "no convolution": {"delta_conv_size": 0},
    "wide convolution with bias": {"delta_conv_size": 7, "delta_conv_bias": True},
    "width 1": {"delta_conv_size": 1},
    "expansion": {"delta_expand_k": 0.5, "delta_expand_v": 2.0, "delta_num_heads": 2},
    "relu, sum": {"delta_qk_activation": "relu", "delta_qk_norm": "sum"},
    "elu, sum": {"delta_qk_activation": "elu", "delta_qk_norm": "sum"},
    "identity": {"delta_qk_activation": "identity"},
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_is_causal_packs_and_caches(options, gated):
    """Documents equal themselves alone, and any segmentation with a cache equals the whole."""
    mixer = make_mixer(replace(SMALL, **OPTIONS[options]), gated=gated)
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    whole = mixer(x, plain(x))
    for pieces in ([1] * 20, [2, 3, 15], [13, 1, 6]):
        cache, outputs = mixer.new_cache(20), []
        for begin, end in pairwise(np.cumsum([0, *pieces])):
            positions = torch.arange(begin, end).expand(2, -1)
            outputs.append(mixer(x[:, begin:end], Geometry(positions, None, {}), cache))
        torch.testing.assert_close(torch.cat(outputs, 1), whole, **EXACT)

    bounds = [0, 3, 3, 20, 21, 40, 40]
    packed = mixer(x, plain(x, torch.tensor(bounds, dtype=torch.int32))).flatten(0, 1)
    for begin, end in pairwise(bounds):
        if begin < end:
            document = x.flatten(0, 1)[begin:end].unsqueeze(0)
            alone = mixer(document, plain(document))[0]
            torch.testing.assert_close(packed[begin:end], alone, **EXACT)


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in ("plain", "no gate")])
def test_every_option_changes_the_layer(option):
    """None is accepted and ignored."""
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    changed = make_mixer(replace(SMALL, **OPTIONS[option]))(x, plain(x))
    assert not torch.allclose(changed, make_mixer()(x, plain(x)), rtol=1e-3)


def test_convolution_bias_is_used():
    mixer = make_mixer(replace(SMALL, delta_conv_bias=True))
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    before = mixer(x, plain(x))
    with torch.no_grad():
        mixer.conv_bias.add_(1)
    assert not torch.allclose(mixer(x, plain(x)), before)


def test_rows_of_zeros_stay_finite():
    """relu may leave nothing of a query or a key; dividing by its sum gave NaN."""
    mixer = make_mixer(replace(SMALL, delta_qk_activation="relu", delta_qk_norm="sum"))
    with torch.no_grad():
        sections_of(mixer)["q_conv.weight"].zero_()
        sections_of(mixer)["k_conv.weight"].zero_()
    x = torch.randn(1, 12, 24, dtype=torch.float64, requires_grad=True)
    y = mixer(x, plain(x))
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


def test_norm_weight_and_decay_are_float32_in_a_bfloat16_model():
    """In bfloat16 an update below 2^-9 of the value would be lost."""
    mixer = make_mixer(gated=True, dtype=torch.bfloat16)
    for parameter in (mixer.o_norm, mixer.A_log, mixer.dt_bias):
        assert parameter.dtype == torch.float32
    assert mixer.projection.weight.dtype == mixer.conv_weight.dtype == torch.bfloat16
    x = torch.randn(1, 12, 24).bfloat16()
    cache = mixer.new_cache(12)
    assert mixer(x, plain(x), cache).dtype == torch.bfloat16
    assert cache.state.memory.dtype == torch.float32


@pytest.mark.parametrize("gated", [False, True])
def test_left_padding_leaves_no_trace(gated):
    """Padding at negative positions, then steps of several tokens and of one."""
    mixer = make_mixer(replace(SMALL, delta_conv_bias=True), gated=gated)
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    pads = torch.tensor([0, 5])
    positions = torch.arange(12) - pads.unsqueeze(1)
    alone = [mixer(x[i : i + 1, n:], plain(x[:1, n:]))[0] for i, n in enumerate(pads.tolist())]
    untouched, cache, outputs = x.clone(), mixer.new_cache(12), []
    for begin, end in ((0, 7), (7, 10), (10, 11), (11, 12)):
        geometry = Geometry(positions[:, begin:end], None, {})
        outputs.append(mixer(x[:, begin:end], geometry, cache))
    padded = torch.cat(outputs, 1)
    for row, n in enumerate(pads.tolist()):
        torch.testing.assert_close(padded[row, n:], alone[row], **EXACT)
    assert torch.equal(x, untouched)


def test_padding_on_the_left_can_be_documents_of_its_own():
    """The same without a cache: what is before the first token is another document."""
    mixer = make_mixer()
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    packed = mixer(x, plain(x, torch.tensor([0, 0, 12, 17, 24])))
    alone = mixer(x[1:, 5:], plain(x[1:, 5:]))
    torch.testing.assert_close(packed[1:, 5:], alone, **EXACT)


def test_cache_steps_back_over_the_padding_of_the_last_call_only():
    mixer = make_mixer(gated=True)
    x = torch.randn(3, 12, 24, dtype=torch.float64)
    whole = mixer(x, plain(x))
    cache = mixer.new_cache(12)
    mixer(x[:, :2], plain(x[:, :2]), cache)
    mixer(x[:, 2:8], Geometry(torch.arange(2, 8).expand(3, -1), None, {}), cache)
    starts = torch.tensor([8, 5, 2])  # all, some and none of the last six tokens count
    positions = starts.unsqueeze(1) + torch.arange(4)
    rest = torch.stack([x[i, n : n + 4] for i, n in enumerate(starts)])
    y = mixer(rest, Geometry(positions, None, {}), cache)
    for i, n in enumerate(starts):
        torch.testing.assert_close(y[i], whole[i, n : n + 4], **EXACT)
    for position in (1, 13):
        at = Geometry(torch.full((3, 1), position), None, {})
        with pytest.raises(ValueError, match="steps back over tokens of the last call"):
            mixer(x[:, :1], at, cache)


def test_hybrid_types_follow_the_global_layer():
    config = replace(SMALL, num_layers=8, hybrid_layer_pattern="DG21")
    names = ["DeltaNet", "GatedDeltaNet", "DiffAttentionV2", "DiffAttentionV1"]
    whole = Decoder(config)
    assert [type(block.mixer).__name__ for block in whole.blocks] == names * 2
    stage = Decoder(config, stage=Stage(range(5, 8), first=False))
    assert [type(block.mixer).__name__ for block in stage.blocks] == names[1:]
    assert stage.blocks[2].mixer.lambda_init == pytest.approx(0.8 - 0.6 * np.exp(-0.3 * 7))


@torch.no_grad()
def test_a_hybrid_takes_padding_on_the_left_in_pieces():
    """Attention and delta layers over one cache; the first piece of a row is padding alone."""
    config = replace(SMALL, hidden_size=32, hybrid_layer_pattern="DG21", init_method_std=0.1)
    model = Decoder(config, dtype=torch.float64)
    initialize(model, 3)
    ids, pads = torch.randint(0, 50, (2, 12)), [0, 5]
    positions = torch.arange(12) - torch.tensor(pads).unsqueeze(1)
    cache, pieces = model.new_cache(12), ((0, 3), (3, 7), (7, 8), (8, 12))
    logits = [model(ids[:, a:b], positions[:, a:b], cache=cache) for a, b in pieces]
    for row, n in enumerate(pads):
        alone = model(ids[row : row + 1, n:], torch.arange(12 - n).unsqueeze(0))[0]
        torch.testing.assert_close(torch.cat(logits, 1)[row, n:], alone, **EXACT)


def refusal(**options) -> str:
    config = Config(model=replace(SMALL, num_layers=4, **options))
    config.training.train_iters = 1
    with pytest.raises(ConfigError) as error:
        validate(config, world_size=1)
    return str(error.value)


def test_configuration_is_refused_with_the_numbers():
    assert "0.7 x --hidden-size 24" in refusal(token_mixer="delta_net", delta_expand_k=0.7)
    assert "not a multiple of the 5 heads" in refusal(
        token_mixer="gated_delta_net", delta_num_heads=5
    )
    assert "--delta-conv-size is 0" in refusal(
        token_mixer="delta_net", delta_conv_size=0, delta_conv_bias=True
    )
    assert "must not be negative" in refusal(hybrid_layer_pattern="DDD2", delta_qk_norm="sum")
    # set, but without any layer that would read it
    assert "--delta-expand-v is set, but no layer" in refusal(delta_expand_v=2.0)
    assert "may only hold * 1 2 D G" in refusal(hybrid_layer_pattern="DDX2")


def test_tensor_and_context_size_must_divide_the_delta_heads():
    config = Config(model=replace(SMALL, hybrid_layer_pattern="D2", delta_num_heads=6))
    config.training.train_iters = 1
    config.parallel.tensor_model_parallel_size = 2
    config.parallel.context_parallel_size = 2
    with pytest.raises(ConfigError, match=r"6 heads are not a multiple of .* 2 x .* 2 = 4"):
        validate(config, world_size=4)
