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


def delta_rule_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    gated: bool,
    variant: Variant,
    reference: Kernel,
) -> Kernel | None:
    """fla-core's chunked delta rule with the arguments of `chunk_delta_rule`, if it is right for
    inputs like these; else None, and `reference` must run."""
    dtype = q.dtype if q.dtype == k.dtype == v.dtype else None
    shape = (q.shape[2], q.shape[3], v.shape[3])
    return _delta_rule_kernel(q.device, dtype, shape, gated, variant, _deterministic(), reference)


@functools.cache
def _delta_rule_kernel(
    device: torch.device,
    dtype: torch.dtype | None,
    shape: tuple[int, int, int],
    gated: bool,
    variant: Variant,
    deterministic: bool,
    reference: Kernel,
) -> Kernel | None:
    reason = _obstacle(device, dtype, deterministic)
    if not reason and shape[1] > MAXIMUM_KEY_WIDTH:
        reason = f"fla-core takes key widths up to {MAXIMUM_KEY_WIDTH}, not {shape[1]}"
    return choose(
        "gated delta rule" if gated else "delta rule",
        variant,
        device,
        reason,
        load=lambda: _load_delta_rule(gated),
        reference=reference,
        case=lambda: delta_rule_case(device, dtype or torch.bfloat16, shape, gated, variant),
    )


def short_convolution_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    variant: Variant,
    reference: Kernel,
) -> Kernel | None:
    """fla-core's causal convolution with the arguments of `torch_short_convolution`, if it is right
    for inputs like these; else None, and `reference` must run."""
    dtypes, shape = (x.dtype, weight.dtype), (weight.shape[0], weight.shape[2])
    return _short_convolution_kernel(
        x.device, dtypes, shape, bias is not None, silu, variant, _deterministic(), reference
    )


@functools.cache
def _short_convolution_kernel(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, int],
    bias: bool,
    silu: bool,
    variant: Variant,
    deterministic: bool,
    reference: Kernel,
) -> Kernel | None:
    return choose(
        "short convolution",
        variant,
        device,
        _obstacle(device, dtypes[0], deterministic),
        load=_load_short_convolution,
        reference=reference,
        case=lambda: short_convolution_case(device, dtypes, shape, bias, silu, variant),
    )


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _obstacle(device: torch.device, dtype: torch.dtype | None, deterministic: bool) -> str:
    """Why fla-core cannot run at all, or nothing."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if deterministic:
        return "deterministic algorithms are asked for and fla-core's kernels are not"
    if dtype not in (torch.bfloat16, torch.float16):
        return "fla-core takes inputs that are all bfloat16 or all float16"
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "fla-core is not installed (pip install 'megadiff[fla]')"
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        return f"fla-core {version} is older than {'.'.join(map(str, MINIMUM_VERSION))}"
    return ""


def choose(
    name: str,
    variant: Variant,
    device: torch.device,
    reason: str,
    load: Callable[[], Kernel],
    reference: Kernel,
    case: Callable[[], Case],
) -> Kernel | None:
    """The loaded kernel if `reason` not to use it is empty and it agrees with `reference`; logs."""
    if not reason:
        name += str(variant)
        try:
            kernel = load()
            with torch.inference_mode(False), torch.enable_grad():
                reason = disagreement(kernel, reference, case())
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


def _load_delta_rule(gated: bool) -> Kernel:
    module = importlib.import_module("fla.ops.gated_delta_rule" if gated else "fla.ops.delta_rule")
    kernel = module.chunk_gated_delta_rule if gated else module.chunk_delta_rule

    def run(q, k, v, beta, g, scale, initial_state, cu_seqlens, final):  # type: ignore[no-untyped-def]
        tensors = {"q": q, "k": k, "v": v, "beta": beta} | ({"g": g} if gated else {})
        tensors, varlen = _packed(tensors, cu_seqlens)
        # An integer scale of 1 would be compiled in, which some ptxas miscompile.
        output, state = kernel(
            **tensors,
            scale=float(scale),
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=final,
            **varlen,
        )
        return output.view(v.shape), state

    return run


def _load_short_convolution() -> Kernel:
    module = importlib.import_module("fla.modules.causal_conv1d")

    def run(x, weight, bias, initial_state, silu, cu_seqlens):  # type: ignore[no-untyped-def]
        tensors, varlen = _packed({"x": x}, cu_seqlens)
        output, state = module.causal_conv1d(
            **tensors,
            weight=weight[:, 0],
            bias=bias,
            activation="silu" if silu else None,
            # fla keeps one input more, which no output sees: [sequences, channels, width]
            initial_state=None if initial_state is None else F.pad(initial_state.mT, (1, 0)),
            output_final_state=True,
            **varlen,
        )
        return output.view(x.shape), state[..., 1:].mT

    return run


def _packed(
    tensors: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """fla's form of packed documents: one row, and a `cu_seqlens` of its own, because fla remembers
    what it derived from one by the tensor's identity."""
    if cu_seqlens is None:
        return tensors, {}
    rows = {name: x.flatten(0, 1)[None] for name, x in tensors.items()}
    return rows, {"cu_seqlens": cu_seqlens.to(torch.int64, copy=True)}


_BOUNDS = (0, 130, 130, 203, 260)  # documents of the test, one of them empty


def delta_rule_case(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    gated: bool,
    variant: Variant,
) -> Case:
    """Several chunks, a ragged end, correlated keys; `shape`: heads, key width, value width."""
    heads, key_width, value_width = shape
    normal = _generator()
    rows, sequences = ((1, 260), len(_BOUNDS) - 1) if variant.packed else ((2, 130), 2)
    state = (sequences, heads, key_width, value_width)
    arguments = {
        "q": F.normalize(F.silu(normal(*rows, heads, key_width)), dim=-1).to(device, dtype),
        "k": F.normalize(F.silu(normal(*rows, heads, key_width)), dim=-1).to(device, dtype),
        "v": normal(*rows, heads, value_width).to(device, dtype),
        "beta": normal(*rows, heads).sigmoid().to(device),
        "g": -0.1 * normal(*rows, heads).exp().to(device) if gated else None,
        "scale": key_width**-0.5,
        "initial_state": normal(*state).to(device) if variant.state else None,
        "cu_seqlens": torch.tensor(_BOUNDS, device=device) if variant.packed else None,
        "output_final_state": variant.final,
    }
    d_output, d_state = normal(*rows, heads, value_width).to(device, dtype), normal(*state)
    return Case(arguments, (d_output, d_state.to(device)) if variant.final else (d_output,))


def short_convolution_case(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, int],
    bias: bool,
    silu: bool,
    variant: Variant,
) -> Case:
    """`dtypes`: of x and of the weight; `shape`: channels, width."""
    channels, width = shape
    dtype, weight_dtype = dtypes
    normal = _generator()
    rows, sequences = ((1, 260), len(_BOUNDS) - 1) if variant.packed else ((2, 130), 2)
    state = (sequences, width - 1, channels)
    arguments = {
        "x": normal(*rows, channels).to(device, dtype),
        "weight": normal(channels, 1, width).to(device, weight_dtype),
        "bias": normal(channels).to(device, weight_dtype) if bias else None,
        "initial_state": normal(*state).to(device, dtype) if variant.state else None,
        "silu": silu,
        "cu_seqlens": torch.tensor(_BOUNDS, device=device) if variant.packed else None,
    }
    d_output, d_state = normal(*rows, channels), normal(*state)
    return Case(arguments, (d_output.to(device, dtype), d_state.to(device, dtype)))


def _generator() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda *size: torch.randn(size, generator=generator)
