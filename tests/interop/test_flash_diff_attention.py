"""FlashDiffAttention gives what the published module gives, dense and packed."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.checkpoint.state import module_tensors
from megadiff.config import ModelConfig
from megadiff.interop import FlashDiffAttention
from megadiff.interop.hf.names import to_hf
from megadiff.interop.tensors import deferred
from tests.interop.models import decoder, logits, tokens

DATA = Path(__file__).parents[1] / "data"
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
TOLERANCE = 1e-5  # the published module computes lambda and the norm in float32


def published(name: str) -> tuple[FlashDiffAttention, dict[str, torch.Tensor]]:
    values = np.load(DATA / f"flash_diff_attention_{name}.npz")
    golden = {key: torch.from_numpy(values[key]) for key in values.files}
    window = tuple(golden["window"].tolist())
    module = FlashDiffAttention(
        int(golden["head_dim"]), int(golden["depth"]), causal=True, window_size=window
    ).double()
    module.load_state_dict({key: golden[f"param/{key}"] for key in VECTORS})
    return module, golden


@pytest.mark.parametrize("name", ["varlen", "window"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_golden_values(name, packed):
    module, golden = published(name)
    q, k, v = (golden[key].requires_grad_() for key in ("q", "k", "v"))
    cu_seqlens = golden["cu_seqlens"]
    if packed:
        longest = int(cu_seqlens.diff().max())
        y = module(q, k, v, None, cu_seqlens, longest, cu_seqlens, longest)
    else:
        rows = [module(*(x[None, a:b] for x in (q, k, v))) for a, b in pairwise(cu_seqlens)]
        y = torch.cat(rows, 1)[0]
    y.backward(golden["dy"])
    pairs = {"y": y, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    pairs |= {f"grad/{key}": getattr(module, key).grad for key in VECTORS}
    for key, ours in pairs.items():
        assert (ours - golden[key]).norm() <= TOLERANCE * golden[key].norm(), key


def test_checkpoints_with_and_without_the_norm_weight_load():
    q = torch.randn(1, 3, 4, 8)
    bare, weighted = FlashDiffAttention(8, 0, causal=True), FlashDiffAttention(8, 0, causal=True)
    state = bare.state_dict()
    assert set(state) == set(VECTORS)
    scale = torch.rand(16)
    weighted.load_state_dict(state | {"subln.weight": scale})
    assert torch.equal(weighted.state_dict()["subln.weight"], scale)
    expected = bare(q, q, q).unflatten(-2, (-1, 2)) * scale.view(2, 8)
    torch.testing.assert_close(weighted(q, q, q), expected.flatten(-3, -2))
    weighted.load_state_dict(state)
    assert torch.equal(weighted(q, q, q), bare(q, q, q))


def test_causal_can_be_given_in_the_call():
    module, q = FlashDiffAttention(8, 1), torch.randn(1, 5, 2, 8)
    later = q.clone()
    later[:, 3:] += 1
    assert not torch.allclose(module(q, q, q)[:, :3], module(later, later, later)[:, :3])
    ours, theirs = (module(x, x, x, causal=True)[:, :3] for x in (q, later))
    assert torch.equal(ours, theirs)


def test_half_precision():
    module, q = FlashDiffAttention(8, 1), torch.randn(1, 5, 2, 8)
    y = module(q.bfloat16(), q.bfloat16(), q.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(q, q, q), rtol=0.05, atol=0.05)


def test_what_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="dropout"):
        FlashDiffAttention(8, 0, attention_dropout=0.1)
    with pytest.raises(ValueError, match="alibi"):
        FlashDiffAttention(8, 0, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="even number of heads of width 8; got 3 of width 8"):
        FlashDiffAttention(8, 0)(*(torch.randn(1, 2, 3, 8),) * 3)


def test_the_documented_hugging_face_model_is_our_model():
    """The example of the page runs, and with the weights of a DIFF V1 decoder gives its logits."""
    pytest.importorskip("transformers", minversion="5.0")
    page = (DATA.parents[1] / "docs" / "flash_diff_attention.md").read_text(encoding="utf-8")
    example = re.search(r"## Hugging Face.*?```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    code = example[1]
    for large, small in (("=512", "=64"), ("=1408", "=96"), ("layers=4", "layers=2")):
        assert large in code
        code = code.replace(large, f"{small}, vocab_size=61" if large == "=512" else small)
    names: dict = {}
    exec(code, names)
    theirs = names["model"]
    config = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=96,
        vocab_size=61,
        token_mixer="diff_v1",
        diff_head_norm="no_weight",
        rotary_interleaved=False,
        norm_epsilon=1e-5,
        untie_embeddings_and_output_weights=True,
    )
    theirs.config.rms_norm_eps = 1e-5
    for module in theirs.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    ours = decoder(config)
    tensors = {
        name: deferred(tensor.pieces[0].data) for name, tensor in module_tensors(ours).items()
    }
    state = {
        name.replace(".lambda_", ".differential.lambda_"): tensor.make()
        for name, tensor in to_hf(tensors, config, "megadiff").items()
    }
    theirs.load_state_dict(state)
    ids = tokens()
    torch.testing.assert_close(theirs(ids).logits, logits(ours, ids), rtol=1e-4, atol=1e-5)
