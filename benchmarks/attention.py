"""Time differential attention against its peers on one GPU.

    python benchmarks/attention.py --out results [--lengths 4096 8192] [--epilogue]

Every row computes the whole operator, both branches, the subtraction and all gradients including
lambda's, on the same inputs `[batch, seq, heads, width]` in bfloat16, causal. Milliseconds are
medians. TFLOP/s count useful work only, in units of N^2 / 2 * d * batch * pairs: V1 12 forward and
20 backward, V2 8 and 16, standard attention of the same width 8 and 20. Peers subtract (and
normalise) with a compiled torch function. Writes attention.json, attention.md and attention.png
into --out."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

from megadiff.kernels import attention, diff_attention

TOKENS = 16384
SHAPES = [  # version, d, pairs, groups
    ("V1", 128, 12, 12),
    ("V1", 64, 16, 16),
    ("V2", 128, 12, 3),
    ("V2", 64, 16, 4),
]
WORK = {"V1": (12, 20), "V2": (8, 16), "standard": (8, 20)}
EPS, FACTOR = 1e-5, 0.8


@dataclass(frozen=True)
class Row:
    version: str
    d: int
    pairs: int
    groups: int
    length: int
    epilogue: bool
    name: str
    forward: float | None = None  # milliseconds
    backward: float | None = None
    both: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    both_tflops: float | None = None
    error: str | None = None


def combine(first: Tensor, second: Tensor, lam: Tensor) -> Tensor:
    return (first.float() - lam.float().unsqueeze(-1) * second.float()).to(first.dtype)


def combine_and_normalise(first: Tensor, second: Tensor, lam: Tensor) -> Tensor:
    o = first.float() - lam.float().unsqueeze(-1) * second.float()
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * FACTOR
    return o.to(first.dtype)


torch._functorch.config.donated_buffer = False  # so that a backward can be timed repeatedly
_combine = torch.compile(combine, dynamic=True)
_combine_and_normalise = torch.compile(combine_and_normalise, dynamic=True)
_flex = torch.compile(flex_attention, dynamic=False)


def torch_call(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)


def flex_call(q: Tensor, k: Tensor, v: Tensor, block_mask) -> Tensor:
    return _flex(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def peer(
    call: Callable[..., Tensor],
    halves: bool,
    epilogue: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
) -> Tensor:
    """V1 (k has q's pairs of heads): a call per branch, or two with the halves of v. V2: one
    call."""
    if k.shape[2] == v.shape[2]:
        out = call(q, k, v)
        first, second = out[:, :, 0::2], out[:, :, 1::2]
    else:
        parts = v.chunk(2, -1) if halves else (v,)
        first, second = (
            torch.cat([call(q[:, :, i::2], k[:, :, i::2], x) for x in parts], -1)
            if halves
            else call(q[:, :, i::2], k[:, :, i::2], v)
            for i in (0, 1)
        )
    return (_combine_and_normalise if epilogue else _combine)(first, second, lam)


def standard(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """2h heads of width d, as a standard Transformer of the same width has them."""
    del lam
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention(q, k, v.unflatten(-1, (-1, q.shape[-1])).flatten(2, 3))


def operators(
    version: str, d: int, length: int, epilogue: bool
) -> dict[str, Callable[..., Tensor]]:
    extra = {"norm_eps": EPS, "out_scale": FACTOR} if epilogue else {}
    cudnn = partial(torch_call, backend=SDPBackend.CUDNN_ATTENTION)
    flash = partial(torch_call, backend=SDPBackend.FLASH_ATTENTION)
    rows: dict[str, Callable[..., Tensor]] = {
        "megadiff hopper": partial(diff_attention, backend="hopper", **extra),
        "megadiff triton": partial(diff_attention, backend="triton", **extra),
        "megadiff sdpa": partial(diff_attention, backend="sdpa", **extra),
    }
    if version == "V1":
        rows["two calls, cuDNN"] = partial(peer, cudnn, False, epilogue)
        rows["four calls, cuDNN"] = partial(peer, cudnn, True, epilogue)
        rows["four calls, FA2"] = partial(peer, flash, True, epilogue)
    else:
        rows["one call, cuDNN"] = partial(peer, cudnn, False, epilogue)
        rows["one call, FA2"] = partial(peer, flash, False, epilogue)
    if not epilogue:
        rows["standard, cuDNN"] = standard
        if length == 4096 and not (version == "V1" and d == 128):  # that backward does not compile
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device="cuda"
            )
            rows["flex attention"] = partial(
                peer, partial(flex_call, block_mask=mask), False, epilogue
            )
    return rows


def inputs(version: str, d: int, pairs: int, groups: int, length: int) -> list[Tensor]:
    batch = max(1, TOKENS // length)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    if version == "V1":
        lam = torch.full((pairs,), 0.4, device="cuda").requires_grad_()
        keys, width = 2 * groups, 2 * d
    else:
        lam = torch.rand(batch, length, pairs, device="cuda").requires_grad_()
        keys, width = groups, d
    return [
        random(batch, length, 2 * pairs, d),
        random(batch, length, keys, d),
        random(batch, length, groups, width),
        lam,
    ]


def milliseconds(function: Callable[[], object], repeat: int) -> float:
    return do_bench(function, warmup=10, rep=repeat, return_mode="median")


def measure(function: Callable[..., Tensor], tensors: list[Tensor], repeat: int) -> dict:
    out = function(*tensors)
    dy = torch.randn_like(out)
    used = tensors[:3] if function is standard else tensors
    return {
        "forward": milliseconds(lambda: function(*tensors), repeat),
        "backward": milliseconds(
            lambda: torch.autograd.grad(out, used, dy, retain_graph=True), repeat
        ),
        "both": milliseconds(lambda: torch.autograd.grad(function(*tensors), used, dy), repeat),
    }


def rows_of(
    version: str, d: int, pairs: int, groups: int, length: int, epilogue: bool, repeat: int
) -> Iterator[Row]:
    tensors = inputs(version, d, pairs, groups, length)
    unit = d * tensors[0].shape[0] * pairs * length**2 / 2 / 1e9
    for name, function in operators(version, d, length, epilogue).items():
        shape = (version, d, pairs, groups, length, epilogue, name)
        try:
            times = measure(function, tensors, repeat)
        except Exception as problem:  # a peer that cannot do this shape is a result
            yield Row(*shape, error=f"{type(problem).__name__}: {problem}"[:200])
            continue
        ahead, back = WORK["standard" if function is standard else version]
        work = {"forward": ahead, "backward": back, "both": ahead + back}
        rates = {f"{k}_tflops": work[k] * unit / ms for k, ms in times.items()}
        yield Row(*shape, **times, **rates)


def best_peer(rows: list[Row], row: Row) -> float | None:
    same = [
        x.both
        for x in rows
        if x.both is not None
        and (x.version, x.d, x.length, x.epilogue) == (row.version, row.d, row.length, row.epilogue)
        and not x.name.startswith(("megadiff", "standard"))
    ]
    return min(same, default=None)


def table(rows: list[Row], epilogue: bool) -> str:
    lines = [
        "| case | what | forward ms (TFLOP/s) | backward ms | both ms | best peer / this |",
        "|---|---|---|---|---|---|",
    ]
    for row in (x for x in rows if x.epilogue == epilogue):
        case = f"{row.version} d {row.d}, {row.pairs}/{row.groups}, {row.length}"
        if row.both is None:
            lines.append(f"| {case} | {row.name} | {row.error} | | | |")
            continue
        peer_ms = best_peer(rows, row)
        ratio = f"{peer_ms / row.both:.2f}" if peer_ms and row.name.startswith("megadiff") else ""
        lines.append(
            f"| {case} | {row.name} | {row.forward:.3f} ({row.forward_tflops:.0f}) | "
            f"{row.backward:.3f} ({row.backward_tflops:.0f}) | "
            f"{row.both:.3f} ({row.both_tflops:.0f}) | {ratio} |"
        )
    return "\n".join(lines)


def chart(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHAPES), figsize=(4.2 * len(SHAPES), 4), sharey=True)
    for axis, (version, d, pairs, groups) in zip(axes, SHAPES, strict=True):
        mine = [x for x in rows if (x.version, x.d, x.epilogue) == (version, d, False) and x.both]
        for name in dict.fromkeys(x.name for x in mine):
            points = [(x.length, x.both_tflops) for x in mine if x.name == name]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_title(f"{version}, width {d}, {pairs} pairs on {groups} groups")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("sequence")
        axis.legend(fontsize=7, ncols=2, loc="upper left")  # above all lines
    axes[0].set_ylim(0, 1.2 * max(x.both_tflops or 0 for x in rows))
    axes[0].set_ylabel("useful TFLOP/s, forward + backward")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--repeat", type=int, default=80, help="milliseconds per measurement")
    parser.add_argument("--epilogue", action="store_true", help="also with norm and factor")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "tokens": TOKENS,
    }
    rows: list[Row] = []
    cases = [
        (*shape, length, epilogue)
        for epilogue in ([False, True] if args.epilogue else [False])
        for shape in SHAPES
        for length in args.lengths
    ]
    for case in cases:
        for row in rows_of(*case, args.repeat):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
        # written after every case: an interrupted run keeps what it measured
        report = {"about": about, "rows": [asdict(row) for row in rows]}
        (args.out / "attention.json").write_text(json.dumps(report, indent=1))
    text = "\n\n".join(table(rows, x) for x in sorted({row.epilogue for row in rows}))
    (args.out / "attention.md").write_text(text + "\n")
    chart(rows, args.out / "attention.png")
    print(text)


if __name__ == "__main__":
    main()
