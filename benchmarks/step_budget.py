"""Where the time of a training step on one GPU goes, by class of kernel, against the floor.

The floor of a class is its arithmetic at the rate of a large matrix product, or the fewest bytes
that it must move at the rate of a large copy, both measured on one H200. In elements for one token
(h hidden, f MLP, q and k all query and key heads, all of 2 bytes), forward and backward:

    a norm with the sum before it    4 h + 4 h
    rotary                           2 (q + k) + 2 (q + k)
    SwiGLU                           3 f + 5 f
    cross entropy                    vocabulary + 2 x vocabulary
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megadiff.config import DELTA_MIXERS, Config
from megadiff.models.attention import head_shape
from megadiff.models.flops import ModelSize, mixing_flops

PRODUCTS, COPY = 790e12, 4.3e12  # FLOP/s, bytes/s
CLASSES = {  # the first pattern that a kernel's name matches
    "optimizer": r"adam|sgd|lpnorm|multi_tensor|foreach",
    "attention": r"flash|fmha|sdpa|cudnn|attention|forward_joint|forward_in_turn"
    r"|^forward$|backward_(keys|queries)|preprocess|branch|delta_rule",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitk|matmul",
    "norms": r"norm|^_forward$|^_backward$",
    "rotary": r"rotary",
    "SwiGLU": r"swiglu",
    "loss": r"_partials|_gradient",
    "copies between host and device": r"memcpy (htod|dtoh)",
    "casts, copies, sums": r"elementwise|copy|reduce|cat|memset|memcpy|fill",
}


@dataclass
class Budget:
    """Milliseconds of one step by class; idle is when no kernel runs."""

    milliseconds: dict[str, float]
    launches: dict[str, float]
    floor: dict[str, float]
    idle: float
    whole: float
    largest: list[tuple[str, float, float]]  # kernels: name, milliseconds, launches

    def __str__(self) -> str:
        lines = ["    class                              ms   share  kernels   floor ms"]
        for name, ms in sorted(self.milliseconds.items(), key=lambda item: -item[1]):
            floor = f"{self.floor[name]:9.1f}" if name in self.floor else ""
            lines.append(
                f"    {name:30} {ms:7.2f} {100 * ms / self.whole:6.1f}% "
                f"{self.launches[name]:8.0f}  {floor}"
            )
        lines.append(f"    {'idle':30} {self.idle:7.2f} {100 * self.idle / self.whole:6.1f}%")
        lines.append(
            f"    {'whole step':30} {self.whole:7.2f}{'':18}{sum(self.floor.values()):9.1f}"
        )
        lines += [f"      {ms:7.2f} ms {n:6.0f} x {name[:100]}" for name, ms, n in self.largest]
        return "\n".join(lines)


def budget_of_step(
    steps: Callable[[], None], number: int, config: Config, size: ModelSize
) -> Budget | None:
    """Run `steps`, which are `number` steps, under torch's profiler; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    activity = torch.profiler.ProfilerActivity
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        steps()
        torch.cuda.synchronize()
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events() or []
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    return count(kernels, number, floor(config, size))


def count(kernels: list[tuple[str, float, float]], steps: int, floor: dict[str, float]) -> Budget:
    """The budget of kernels given as (name, begin, end), in microseconds, of `steps` steps."""
    totals: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    single: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy, reached = 0.0, float("-inf")
    scale = 1e3 * steps
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        kind = class_of(name)
        totals[kind] += (end - begin) / scale
        launches[kind] += 1 / steps
        single[name][0] += (end - begin) / scale
        single[name][1] += 1 / steps
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    whole = (reached - min(begin for _, begin, _ in kernels)) / scale if kernels else 0.0
    largest = sorted(((n, ms, c) for n, (ms, c) in single.items()), key=lambda item: -item[1])
    return Budget(dict(totals), dict(launches), floor, whole - busy / scale, whole, largest[:40])


def class_of(kernel: str) -> str:
    matching = (n for n, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(matching, "other")


def floor(config: Config, size: ModelSize) -> dict[str, float]:
    """Milliseconds of each class at the card's ceilings; without recomputation."""
    m, t = config.model, config.training
    assert t.global_batch_size is not None and m.vocab_size is not None
    tokens = t.global_batch_size * t.seq_length
    mixers = [m.mixer_of_layer(layer) for layer in range(m.num_layers)]
    mixing = 3 * sum(mixing_flops(m, mixer, t.seq_length) for mixer in mixers)

    def bytes_ms(elements: float, width: int = 2) -> float:
        return 1e3 * width * elements / COPY

    turned = 0
    for mixer in mixers:
        if mixer not in DELTA_MIXERS:
            shape = head_shape(m, mixer)
            heads = shape.branches * m.num_attention_heads + shape.key_branches * m.query_groups
            turned += 4 * heads * shape.width
    o = config.optimizer
    # read and written: the moments and the weight (with float32 ones the parameter only written)
    update = sum(8 if kept == "fp32" else 4 for kept in (o.exp_avg_dtype, o.exp_avg_sq_dtype))
    update += {"float32": 10, "kahan": 8, "stochastic": 4}[o.main_weights]
    update += 4 if o.accumulate_allreduce_grads_in_fp32 else 2
    return {
        "matrix products": 1e3 * (size.training_flops_per_token - mixing) * tokens / PRODUCTS,
        "attention": 1e3 * mixing * tokens / PRODUCTS,
        "optimizer": bytes_ms(size.parameters, update),
        "norms": bytes_ms(tokens * (2 * m.num_layers + 1) * 8 * m.hidden_size),
        "rotary": bytes_ms(tokens * turned),
        "SwiGLU": bytes_ms(tokens * m.num_layers * 8 * m.ffn_size),
        "loss": bytes_ms(tokens * 3 * m.vocab_size),
    }
