"""The DIFF V1 and V2 layers give what the published layers give, forward and backward."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.config import ModelConfig
from megadiff.models.attention import DiffAttentionV1, DiffAttentionV2
from megadiff.models.geometry import Geometry
from megadiff.parallel.mesh import ParallelMesh
from megadiff.parallel.parameter import local_view, record_of

DATA = Path(__file__).parents[1] / "data"

# Our section names and the published parameter names.
V1 = {
    "q.weight": "q_proj.weight",
    "k.weight": "k_proj.weight",
    "v.weight": "v_proj.weight",
    "o.weight": "out_proj.weight",
    "subln.weight": "subln.weight",
} | {f"lambda_{v}": f"lambda_{v}" for v in ("q1", "k1", "q2", "k2")}
V2 = {
    "q.weight": "q_proj.weight",
    "k.weight": "k_proj.weight",
    "v.weight": "v_proj.weight",
    "o.weight": "o_proj.weight",
    "lambda.weight": "lambda_proj.weight",
}


def check_layer(mixer: torch.nn.Module, names: dict[str, str], golden, tolerance: float) -> None:
    tensors = {key: torch.from_numpy(golden[key]) for key in golden.files}
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
            record = record_of(parameter)
            for section in record.sections:
                published = tensors[f"param/{names[section.name.removeprefix('mixer.')]}"]
                local_view(parameter, section, record.dim).copy_(published)
    x = tensors["x"].requires_grad_()
    positions = torch.arange(x.shape[1]).expand(x.shape[:2])
    cos, sin = (tensors[k].expand(x.shape[0], -1, -1) for k in ("cos", "sin"))
    geometry = Geometry(positions, None, {2 * cos.shape[-1]: (cos, sin)})
    y = mixer(x, geometry)
    y.backward(tensors["dy"])

    def close(ours: torch.Tensor, published: torch.Tensor) -> None:
        error = (ours - published).norm() / published.norm()
        assert error < tolerance

    close(y, tensors["y"])
    close(x.grad, tensors["dx"])
    for parameter in mixer.parameters():
        record = record_of(parameter)
        for section in record.sections:
            name = names[section.name.removeprefix("mixer.")]
            close(local_view(parameter.grad, section, record.dim), tensors[f"grad/{name}"])


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_diff_v1_layer(kind):
    golden = np.load(DATA / f"v1_layer_{kind}.npz")
    config = ModelConfig(
        hidden_size=int(golden["embed_dim"]),
        num_attention_heads=int(golden["num_heads"]),
        num_query_groups=int(golden["num_kv_heads"]),
    )
    depth = int(golden["depth"])
    mixer = DiffAttentionV1(
        config, depth, ParallelMesh(), "mixer", dtype=torch.float64, device="cpu"
    )
    # The published layer computes lambda and the norm in float32.
    check_layer(mixer, V1, golden, tolerance=1e-5)


def test_diff_v2_layer():
    golden = np.load(DATA / "v2_layer_gqa.npz")
    config = ModelConfig(
        hidden_size=int(golden["d_model"]),
        num_attention_heads=int(golden["num_heads"]),
        num_query_groups=int(golden["num_kv_heads"]),
        kv_channels=int(golden["head_dim"]),
    )
    mixer = DiffAttentionV2(config, 0, ParallelMesh(), "mixer", dtype=torch.float64, device="cpu")
    check_layer(mixer, V2, golden, tolerance=1e-10)
