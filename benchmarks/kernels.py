"""Time the memory-bound kernels on one GPU, compiled and eager, with bandwidth.

python benchmarks/kernels.py
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

from megadiff.kernels import rms_norm, rotary_cos_sin, split_rotary, swiglu
from megadiff.parallel.loss import vocab_parallel_cross_entropy
from megadiff.parallel.mesh import Axis

TOKENS, HIDDEN, FFN, VOCABULARY = 16384, 3072, 8192, 50304


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def report(
    name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], bytes_both: int
) -> None:
    """bytes_both: the least that forward and backward must move."""
    for label in ("compiled", "eager"):
        with torch.compiler.set_stance("default" if label == "compiled" else "force_eager"):
            dy = torch.randn_like(function(*inputs))
            forward = do_bench(lambda: function(*inputs), return_mode="median")
            both = do_bench(
                lambda dy=dy: torch.autograd.grad(function(*inputs), inputs, dy),
                return_mode="median",
            )
        rate = bytes_both / both / 1e9
        print(
            f"{name:14s} {label:9s} forward {forward:.3f} ms, both {both:.3f} ms, {rate:.2f} TB/s"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    element = 2
    x, w = random(TOKENS, HIDDEN), random(HIDDEN)
    report("rms_norm", rms_norm, (x, w), 5 * x.numel() * element)
    gate_up = random(TOKENS, 2 * FFN)
    report("swiglu", swiglu, (gate_up,), 4 * gate_up.numel() * element)
    y = random(4, TOKENS // 4, 3 * 24 * 128)
    widths = [24 * 128] * 3
    cos, sin = rotary_cos_sin(torch.arange(TOKENS // 4, device="cuda"), 128)

    def rotated(y: Tensor) -> Tensor:
        return torch.cat(split_rotary(y.clone(), widths, cos, sin, True), -1)

    report("rotary (copy and cat)", rotated, (y,), 8 * y.numel() * element)
    logits = random(TOKENS, VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")

    def loss(x: Tensor) -> Tensor:  # its backward writes the gradient over x, as in training
        return vocab_parallel_cross_entropy(x, labels, VOCABULARY, Axis())

    report("cross_entropy", loss, (logits,), 3 * logits.numel() * element)


if __name__ == "__main__":
    main()
