"""Delta layers in transformers: caches, padding, beams, new models."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from megadiff.interop.hf import MegadiffConfig, MegadiffForCausalLM  # noqa: E402

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def make_model(mixers=("delta_net", "gated_delta_net", "diff_v2"), **options):
    torch.manual_seed(0)
    config = MegadiffConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(mixers),
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_mixers=list(mixers),
        delta_num_heads=4,
        delta_key_dim=8,
        delta_value_dim=16,
        initializer_range=0.2,
        pad_token_id=0,
        **options,
    )
    return MegadiffForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 61, (2, 70), generator=torch.Generator().manual_seed(1))


def cached(model, ids, pieces, mask=None):
    """Logits of `ids` in `pieces`, each behind the cache of those before."""
    cache, outputs, end = transformers.DynamicCache(config=model.config), [], 0
    for piece in ids.split(pieces, 1):
        end += piece.shape[1]
        options = {}
        if mask is not None:  # as `generate` does it
            at = (mask.cumsum(1) - 1).clamp(min=0)[:, end - piece.shape[1] : end]
            options = {"attention_mask": mask[:, :end], "position_ids": at}
        with torch.no_grad():
            out = model(piece, past_key_values=cache, use_cache=True, **options)
        outputs.append(out.logits)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("pieces", [[1] * 70, [66, 1, 3], [2, 64, 4]])
def test_cached_logits_equal_uncached_ones(model, ids, pieces):
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(cached(model, ids, pieces), whole, **EXACT)


def test_padding_leaves_no_trace(model, ids):
    """On the left with a cache, as in generation, and on the right without one, as in training."""
    with torch.no_grad():
        alone = model(ids[1:, :12], use_cache=False).logits[0]
        mask = torch.ones(2, 15, dtype=torch.long)
        mask[1, :3] = 0
        left = torch.cat([ids[:1, :15], torch.cat([ids[1:, 50:53], ids[1:, :12]], 1)])
        found = cached(model, left, [9, 5, 1], mask)[1, 3:]
        torch.testing.assert_close(found, alone, **EXACT)
        right = model(ids[:, :15], attention_mask=mask.flip(1), use_cache=False).logits[1, :12]
        torch.testing.assert_close(right, alone, **EXACT)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}])
def test_beams_are_the_same_with_and_without_a_cache(model, ids, options):
    options |= {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    found, right = (
        model.generate(ids[:, :9], attention_mask=mask, use_cache=use, **options)
        for use in (True, False)
    )
    assert torch.equal(found, right)


def test_a_model_of_delta_layers_alone_generates(ids):
    model = make_model(["gated_delta_net", "delta_net"], delta_conv_size=0)
    found, right = (
        model.generate(ids[:, :9], max_new_tokens=8, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(found, right)


def test_tokens_can_not_be_taken_back(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :-2], layer.values[:, :, :-2]
        with pytest.raises(ValueError, match="has seen 9 tokens, and the cache says 7"):
            model(ids[:, 9:10], past_key_values=cache, use_cache=True)


def test_new_models_start_with_the_decay_of_mamba_2():
    model = make_model(["gated_delta_net"] * 4)
    for layer in model.model.layers:
        decay = layer.self_attn
        assert ((decay.A_log.exp() >= 1) & (decay.A_log.exp() <= 16)).all()
        step = torch.nn.functional.softplus(decay.dt_bias)
        assert ((step > 9.9e-4) & (step < 0.101)).all()


def test_training_reaches_every_parameter(ids):
    model = make_model()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_state_is_float32_under_autocast(ids):
    """As transformers' Trainer runs a model in mixed precision."""
    model = make_model(["gated_delta_net"]).float()
    cache = transformers.DynamicCache(config=model.config)
    types = []
    hook = model.model.layers[0].self_attn.o_norm.register_forward_pre_hook(
        lambda _, inputs: types.append(inputs[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, past_key_values=cache, use_cache=True).loss
    loss.backward()
    hook.remove()
    assert types == [torch.float32] and cache.layers[0].delta_state[1].dtype == torch.float32


def test_saved_code_travels_along(model, ids, tmp_path, module_cache):
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", trust_remote_code=True, dtype=torch.float64
    )
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(again.eval()(ids, use_cache=False).logits, expected, **EXACT)
