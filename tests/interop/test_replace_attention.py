"""A Hugging Face Llama made differential in place; the published layer's faults stay away."""

import pytest
import torch

from megadiff.interop.tensors import InteropError

transformers = pytest.importorskip("transformers", minversion="5.0")

from megadiff.interop.hf import (  # noqa: E402
    LlamaDiffAttention,
    MegadiffForCausalLM,
    replace_attention_layers,
)

VARIANTS = ("v1_split", "v1_doubled", "v2")
EXACT = ("v1_doubled", "v2")
LLAMA32_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(groups: int = 2, **options) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=59,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=groups,
        max_position_embeddings=131072,
        rope_parameters=LLAMA32_ROPE,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompts(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 59, (batch, length), generator=torch.Generator().manual_seed(1))


def differential(variant: str, **options) -> MegadiffForCausalLM:
    return replace_attention_layers(llama(), variant=variant, **options)


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
@pytest.mark.parametrize("variant", EXACT)
def test_an_exact_start_has_the_logits_of_the_original(variant, groups):
    model, ids = llama(groups).double(), prompts()
    before = model(ids).logits
    after = replace_attention_layers(model, variant=variant, exact=True)(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", EXACT)
def test_the_second_branch_grows_from_an_exact_start(variant):
    """lambda has a gradient at once, and after one step the branches are no longer equal."""
    model, ids = differential(variant, exact=True).double(), prompts()
    attention = model.model.layers[0].self_attn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        names = ("lambda_proj.weight",) if variant == "v2" else ("lambda_q1", "lambda_k2")
        for name in names:
            assert attention.get_parameter(name).grad.norm() > 0
        optimizer.step()
    first, second = attention.q_proj.weight.unflatten(0, (-1, 2, 8)).unbind(1)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_random_start_keeps_what_fits(variant):
    old = llama()
    weights = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    new = replace_attention_layers(old, variant=variant).state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    if variant == "v1_split":
        assert all(torch.equal(new[key], tensor) for key, tensor in weights.items())
        return
    kept = new[name].unflatten(0, (-1, 2, 8))[:, 0].flatten(0, 1)
    assert torch.equal(kept, weights[name])
    unchanged = ["v", "o"] if variant == "v1_doubled" else ["k", "v", "o"]
    for which in unchanged:
        key = name.replace("q_proj", f"{which}_proj")
        assert torch.equal(new[key], weights[key])


def test_what_can_not_be_exact_is_refused_and_nothing_changes():
    model = llama()
    with pytest.raises(InteropError, match="v1_split has no exact start"):
        replace_attention_layers(model, variant="v1_split", exact=True)
    with pytest.raises(InteropError, match="norm destroys"):
        replace_attention_layers(model, variant="v1_doubled", exact=True, head_norm="weight")
    assert type(model) is transformers.LlamaForCausalLM
    with pytest.raises(InteropError, match="attention_bias"):
        replace_attention_layers(llama(attention_bias=True))
    with pytest.raises(InteropError, match="LlamaForCausalLM is needed"):
        replace_attention_layers(replace_attention_layers(model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_depend_on_the_distance_only(variant):
    """Rotary positions turn each branch within its own width."""
    model, ids = differential(variant).double(), prompts()
    at = torch.arange(ids.shape[1]).unsqueeze(0)
    near = model(ids, position_ids=at).logits
    far = model(ids, position_ids=at + 1000).logits
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-4)  # float32 angles


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_scale_is_that_of_the_branch(variant):
    """Maps of the first layer are softmax(q k^T / sqrt(d)), scaled once, of rotated branches."""
    model, ids = differential(variant).double(), prompts(1)
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    attention = layer.self_attn
    d = attention.head_dim
    cos, sin = model.model.rotary_emb(x, torch.arange(9).unsqueeze(0))[d]

    def heads(projection: torch.nn.Module) -> torch.Tensor:
        y = projection(x).unflatten(-1, (-1, d)).transpose(1, 2)
        half = torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1)
        return y * cos + half * sin

    q, k = heads(attention.q_proj), heads(attention.k_proj)
    if variant == "v2":
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    else:  # pair i reads the two key heads of its group
        k = k.unflatten(1, (-1, 2)).repeat_interleave(3, 1).flatten(1, 2)
    scores = (q @ k.mT) * d**-0.5
    later = torch.ones(9, 9).triu(1).bool()
    maps = scores.masked_fill(later, -torch.inf).softmax(-1)
    lam = attention.lam(x)
    lam = lam.transpose(1, 2).unsqueeze(-1) if lam.dim() == 3 else lam
    torch.testing.assert_close(
        output.attentions[0], maps[:, 0::2] - lam * maps[:, 1::2], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padding_and_causality(variant, implementation):
    model = differential(variant)
    model.set_attn_implementation(implementation)
    short, long = prompts(1, 5), prompts(1, 9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1)
    batch = torch.cat([padded, long])
    mask = (torch.arange(9) >= torch.tensor([[4], [0]])).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = model(batch, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(together[0, 4:], model(short).logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1], model(long).logits[0], rtol=1e-4, atol=1e-4)
    changed = long.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 59
    assert torch.equal(model(changed).logits[0, :6], model(long).logits[0, :6])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_is_right_for_one_and_many_new_tokens(variant, cache):
    model, ids = differential(variant).double(), prompts(2, 12)
    whole = model(ids).logits
    if cache == "dynamic":
        store = transformers.DynamicCache(config=model.config)
    else:
        store = transformers.StaticCache(config=model.config, max_cache_len=16)
    parts, begin = [], 0
    for count in (5, 4, 1, 1, 1):
        part = ids[:, begin : begin + count]
        at = torch.arange(begin, begin + count).expand(2, -1)
        parts.append(model(part, position_ids=at, past_key_values=store, use_cache=True).logits)
        begin += count
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generate_of_a_left_padded_batch_equals_prompts_alone(variant):
    model = differential(variant)
    short, long = prompts(1, 4), prompts(1, 7)
    batch = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    options = {"max_new_tokens": 8, "do_sample": False}
    together = model.generate(batch, attention_mask=(batch > 0).long(), **options)
    for row, prompt in zip(together, (short, long), strict=True):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(row[7:], alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_models_come_back(tmp_path, variant, module_cache):
    model, ids = differential(variant), prompts()
    model.save_pretrained(tmp_path / "saved")
    back = MegadiffForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(back(ids).logits, model(ids).logits)
    anywhere = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", trust_remote_code=True
    )
    assert torch.equal(anywhere(ids).logits, model(ids).logits)


def test_trainer_lowers_the_loss(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = differential("v2", exact=True), prompts(8)
    before = model(ids, labels=ids).loss
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert model.eval()(ids, labels=ids).loss < before - 0.5


def test_a_subclass_of_the_layer_can_be_given():
    class Counted(LlamaDiffAttention):
        calls = 0

        def forward(self, *args, **kwargs):
            Counted.calls += 1
            return super().forward(*args, **kwargs)

    model = replace_attention_layers(llama(), Counted, variant="v2", exact=True)
    model(prompts())
    assert Counted.calls == 2
