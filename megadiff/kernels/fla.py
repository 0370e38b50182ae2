"""fla-core's GPU kernels, used only where they prove right on the card at hand.

Some pairs of Triton version and GPU make them return wrong gradients without a word (issues 984,
640 and pull request 1262 of fla-org/flash-linear-attention). So the first call with a new type and
shape runs a small case through the kernel and through this package's torch form; a kernel that errs
or refuses is not used. A line in the log says which form runs and why.
"""

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

Kernel = Callable[..., tuple[torch.Tensor, Any]]
"""Returns an output and a final state (None if not asked for); all arguments are positional."""

MINIMUM_VERSION = (0, 6)  # earlier ones err on Hopper and overflow 32-bit offsets
MAXIMUM_KEY_WIDTH = 256
# Norm of the difference over norm of the torch form's value: a few bfloat16 roundings of up to
# 2^-9, which partly average out. A wrong kernel is off by a large part of the norm.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for besides types and shapes."""

    packed: bool  # documents
    state: bool  # an initial state is given
    final: bool  # a final state is returned

    def __str__(self) -> str:
        words = {
            " of documents": self.packed,
            " behind states": self.state,
            " to states": self.final,
        }
        return "".join(word for word, said in words.items() if said)


@dataclass(frozen=True)
class Case:
    """Arguments of a kernel, by name and in order, and gradients of what it returns."""

    arguments: dict[str, Any]
    gradients: tuple[torch.Tensor, ...]


_BOUNDS = (0, 130, 130, 203, 260)  # documents of the test, one of them empty


@dataclass(frozen=True)
class DeltaRule:
    """The chunked delta rule, with the arguments of `chunk_delta_rule`."""

    dtype: torch.dtype | None  # of q, k and v; None where they differ
    heads: int
    key_width: int
    value_width: int
    gated: bool

    def __str__(self) -> str:
        return "gated delta rule" if self.gated else "delta rule"

    def load(self) -> Kernel:
        name = "gated_delta_rule" if self.gated else "delta_rule"
        kernel = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")

        def run(q, k, v, beta, g, scale, initial_state, cu_seqlens, final):  # type: ignore[no-untyped-def]
            tensors = {"q": q, "k": k, "v": v, "beta": beta} | ({"g": g} if self.gated else {})
            # An integer scale of 1 would be compiled in, which some ptxas miscompile.
            output, state = kernel(
                **_packed(tensors, cu_seqlens),
                scale=float(scale),
                initial_state=None if initial_state is None else initial_state.float(),
                output_final_state=final,
            )
            return output.view(v.shape), state

        return run

    def case(self, device: torch.device, variant: Variant) -> Case:
        """Several chunks, a ragged end, correlated keys."""
        normal = _generator()
        rows, sequences = ((1, 260), len(_BOUNDS) - 1) if variant.packed else ((2, 130), 2)
        keys, values = (*rows, self.heads, self.key_width), (*rows, self.heads, self.value_width)
        state = (sequences, self.heads, self.key_width, self.value_width)
        arguments = {
            "q": F.normalize(F.silu(normal(*keys)), dim=-1).to(device, self.dtype),
            "k": F.normalize(F.silu(normal(*keys)), dim=-1).to(device, self.dtype),
            "v": normal(*values).to(device, self.dtype),
            "beta": normal(*rows, self.heads).sigmoid().to(device),
            "g": -0.1 * normal(*rows, self.heads).exp().to(device) if self.gated else None,
            "scale": self.key_width**-0.5,
            "initial_state": normal(*state).to(device) if variant.state else None,
            "cu_seqlens": torch.tensor(_BOUNDS, device=device) if variant.packed else None,
            "output_final_state": variant.final,
        }
        gradients = [normal(*values).to(device, self.dtype), normal(*state).to(device)]
        return Case(arguments, tuple(gradients if variant.final else gradients[:1]))


@dataclass(frozen=True)
class ShortConvolution:
    """The causal convolution, with the arguments of `torch_short_convolution`."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    channels: int
    width: int
    bias: bool
    silu: bool

    def __str__(self) -> str:
        return "short convolution"

    def load(self) -> Kernel:
        module = importlib.import_module("fla.modules.causal_conv1d")

        def run(x, weight, bias, initial_state, silu, cu_seqlens):  # type: ignore[no-untyped-def]
            output, state = module.causal_conv1d(
                **_packed({"x": x}, cu_seqlens),
                weight=weight[:, 0],
                bias=bias,
                activation="silu" if silu else None,
                # fla keeps one input more, which no output sees: [sequences, channels, width]
                initial_state=None if initial_state is None else F.pad(initial_state.mT, (1, 0)),
                output_final_state=True,
            )
            return output.view(x.shape), state[..., 1:].mT

        return run

    def case(self, device: torch.device, variant: Variant) -> Case:
        normal = _generator()
        rows, sequences = ((1, 260), len(_BOUNDS) - 1) if variant.packed else ((2, 130), 2)
        tokens, state = (*rows, self.channels), (sequences, self.width - 1, self.channels)
        weight, bias = normal(self.channels, 1, self.width), normal(self.channels)
        arguments = {
            "x": normal(*tokens).to(device, self.dtype),
            "weight": weight.to(device, self.weight_dtype),
            "bias": bias.to(device, self.weight_dtype) if self.bias else None,
            "initial_state": normal(*state).to(device, self.dtype) if variant.state else None,
            "silu": self.silu,
            "cu_seqlens": torch.tensor(_BOUNDS, device=device) if variant.packed else None,
        }
        gradients = (normal(*tokens), normal(*state))
        return Case(arguments, tuple(x.to(device, self.dtype) for x in gradients))


def kernel_for(
    operator: DeltaRule | ShortConvolution,
    variant: Variant,
    device: torch.device,
    reference: Kernel,
) -> Kernel | None:
    """fla-core's kernel, with the arguments of `reference`, if it is right for inputs like these;
    else None, and `reference` must run."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _kernel_for(operator, variant, device, reference, deterministic)


@functools.cache
def _kernel_for(
    operator: DeltaRule | ShortConvolution,
    variant: Variant,
    device: torch.device,
    reference: Kernel,
    deterministic: bool,
) -> Kernel | None:
    name, reason = str(operator), _obstacle(operator, device, deterministic)
    if not reason:
        name += str(variant)
        try:
            kernel = operator.load()
            with torch.inference_mode(False), torch.enable_grad():
                reason = disagreement(kernel, reference, operator.case(device, variant))
        except Exception as error:  # whatever a compiler or a version check raises
            reason = f"fla-core failed: {type(error).__name__}: {error}".splitlines()[0]
        else:
            if not reason:
                version = importlib.metadata.version("fla-core")
                _say(logging.INFO, f"{name}: fla-core {version}, tested on {device}")
                return kernel
    level = logging.WARNING if device.type == "cuda" else logging.INFO
    _say(level, f"{name}: torch, because {reason}")
    return None


def _obstacle(
    operator: DeltaRule | ShortConvolution, device: torch.device, deterministic: bool
) -> str:
    """Why fla-core cannot run at all, or nothing."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if deterministic:
        return "deterministic algorithms are asked for and fla-core's kernels are not"
    if operator.dtype not in (torch.bfloat16, torch.float16):
        return "fla-core takes inputs that are all bfloat16 or all float16"
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "fla-core is not installed (pip install 'megadiff[fla]')"
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        return f"fla-core {version} is older than {'.'.join(map(str, MINIMUM_VERSION))}"
    if isinstance(operator, DeltaRule) and operator.key_width > MAXIMUM_KEY_WIDTH:
        return f"fla-core takes key widths up to {MAXIMUM_KEY_WIDTH}, not {operator.key_width}"
    return ""


@functools.cache
def _say(level: int, text: str) -> None:
    """Log `text` once."""
    logger.log(level, text)


def disagreement(kernel: Kernel, reference: Kernel, case: Case) -> str:
    """Where `kernel` differs from `reference` in a result or a gradient, or nothing."""
    found, right = _results(kernel, case), _results(reference, case)
    for name, expected in right.items():
        error = (found[name].double() - expected.double()).norm() / expected.double().norm()
        if not error <= TOLERANCE:  # a NaN is wrong too
            return f"fla-core is wrong on this device: {name} is off by {error:.2g} of its norm"
    return ""


def _results(kernel: Kernel, case: Case) -> dict[str, torch.Tensor]:
    arguments = {
        name: value.clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in case.arguments.items()
    }
    output, state = kernel(*arguments.values())
    returned = {"the output": output} | ({} if state is None else {"the final state": state})
    torch.autograd.backward(tuple(returned.values()), case.gradients)
    results = {name: value.detach() for name, value in returned.items()}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.grad is not None:
            results[f"the gradient of {name}"] = value.grad
    return results


def _packed(
    tensors: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """fla's form of packed documents: one row, and a `cu_seqlens` of its own, because fla remembers
    what it derived from one by the tensor's identity."""
    if cu_seqlens is None:
        return tensors
    rows = {name: x.flatten(0, 1)[None] for name, x in tensors.items()}
    return rows | {"cu_seqlens": cu_seqlens.to(torch.int64, copy=True)}


def _generator() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda *size: torch.randn(size, generator=generator)
