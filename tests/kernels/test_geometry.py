"""What cannot be visible is refused by name, and the edges of what can be."""

from typing import Any

import pytest
import torch

from megadiff.kernels import attention, diff_attention
from tests.kernels.cases import Case

PACKED = Case("packed", n_q=16, options={"cu_seqlens_q": [0, 16]})
DENSE = Case("dense")
both_backends = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_backends
@pytest.mark.parametrize(
    ("case", "options", "error", "message"),
    [
        (PACKED, {"cu_seqlens_q": integers(0, 9, 5, 16)}, ValueError, r"rise from 0 .*\[0, 9, 5"),
        (PACKED, {"cu_seqlens_q": integers(1, 9)}, ValueError, "rise from 0"),
        (PACKED, {"cu_seqlens_q": integers(0, 9, 17)}, ValueError, "at most the 16 tokens of q"),
        (
            PACKED,
            {"cu_seqlens_q": integers(0, 9), "cu_seqlens_k": integers(0, 17)},
            ValueError,
            "cu_seqlens_k must rise from 0 to at most the 16 tokens of k",
        ),
        (PACKED, {"cu_seqlens_q": torch.tensor([0.0, 16.0])}, TypeError, "int32 or int64, not tor"),
        (PACKED, {"cu_seqlens_q": integers()}, ValueError, "cu_seqlens_q is empty"),
        (PACKED, {"cu_seqlens_q": integers(0, 16)[None]}, ValueError, r"both be \[documents \+ 1"),
        (
            PACKED,
            {"cu_seqlens_q": torch.empty(2, dtype=torch.int32, device="meta")},
            ValueError,
            "cu_seqlens_q is on meta, and q is on cpu",
        ),
        (
            PACKED,
            {"cu_seqlens_q": integers(0, 9, 16), "max_seqlen_q": 8},
            ValueError,
            "max_seqlen_q is 8, and a document has 9 tokens",
        ),
        (
            PACKED,
            {"cu_seqlens_q": integers(0, 9, 16), "seqused_k": integers(9, 8)},
            ValueError,
            r"seqused_k \[9, 8\] exceeds the documents' keys \[9, 7\]",
        ),
        (DENSE, {"seqused_k": integers(8, 9)}, ValueError, r"\[8, 9\] exceeds the 8 keys"),
        (DENSE, {"seqused_k": torch.tensor([8.0, 2.0])}, TypeError, "seqused_k must be int32"),
        (DENSE, {"seqused_k": integers(8)}, ValueError, r"seqused_k must be \[2\]; got \(1,\)"),
        (DENSE, {"cu_seqlens_k": integers(0, 8)}, ValueError, "without cu_seqlens_q"),
        (DENSE, {"cu_seqlens_q": integers(0, 8)}, ValueError, "packed q must be"),
        (DENSE, {"window": (3,)}, ValueError, r"two integers \(left, right\), not \(3,\)"),
        (DENSE, {"window": 3}, ValueError, "two integers"),
        (DENSE, {"window": (2.5, 0)}, ValueError, "two integers"),
    ],
)
def test_refusals(
    case: Case, options: dict[str, Any], error: type[Exception], message: str, backend: str
) -> None:
    q, k, v, lam = case.inputs(torch.float32)
    with pytest.raises(error, match=message):
        diff_attention(q, k, v, lam, **options, backend=backend)
    with pytest.raises(error, match=message):
        attention(q, k, v.repeat_interleave(2, -2), **options, backend=backend)


@both_backends
def test_no_documents_no_rows_no_tokens(backend: str) -> None:
    """Everything is padding, or nothing is there."""
    q, k, v, lam = PACKED.inputs(torch.float32)
    out = diff_attention(q, k, v, lam, cu_seqlens_q=integers(0), norm_eps=1e-5, backend=backend)
    assert out.shape == (16, 2, 8) and not out.any()
    q, k, v, lam = DENSE.inputs(torch.float32)
    for tensors, shape in (
        ((q[:0], k[:0], v[:0]), (0, 8, 2, 8)),
        ((q[:, :0], k, v), (2, 0, 2, 8)),
        ((q, k[:, :0], v[:, :0]), (2, 8, 2, 8)),
    ):
        out = diff_attention(*tensors, lam, norm_eps=1e-5, backend=backend)
        assert out.shape == shape and not out.any()
    unused = diff_attention(q, k, v, lam, seqused_k=integers(-1, 0), backend=backend)
    assert not unused.any()
