"""Compile a `Launch` for Hopper without a GPU, and read what the assembler says about it."""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megadiff.kernels import diff_launch, diff_triton

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Report:
    registers: int
    stack: int  # bytes per thread; spilled registers lie there
    shared: int  # bytes
    wgmma: int  # Hopper matrix instructions


def _type(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if hasattr(value, "block_shape"):  # a descriptor of Triton, or of Gluon, which has a layout
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(launch: Any) -> Report:
    """What `launch.run()` would compile on an H200, from the same arguments."""
    kernel = launch.kernel
    names = kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        if name in launch.constants:
            signature[name] = "constexpr"
            constants[(i,)] = launch.constants[name]
            continue
        value = launch.arguments[name]
        signature[name] = _type(value)
        if value is None:
            constants[(i,)] = None
        elif isinstance(value, torch.Tensor):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    compiled = triton.compile(
        source(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            command = [str(tools / "cuobjdump"), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
        assert usage is not None
        wgmma = dump("-sass").count("HGMMA")
    return Report(int(usage[1]), int(usage[2]), compiled.metadata.shared, wgmma)


def launches(
    d: int, d_v: int, own_keys: bool, norm: bool, packed: bool, hopper: bool = False
) -> list[Any]:
    """All launches of a forward and a backward, on tensors that are never read."""
    pairs, groups, tokens, dtype = 4, 2, 256, torch.bfloat16
    q = torch.empty(1, tokens, 2 * pairs, d, dtype=dtype)
    k = torch.empty(1, tokens, groups * (2 if own_keys else 1), d, dtype=dtype)
    v = torch.empty(1, tokens, groups, d_v, dtype=dtype)
    lam = torch.empty(()) if own_keys else torch.empty(1, tokens, pairs)
    cu = torch.empty(3, dtype=torch.int32) if packed else None
    if packed:
        q, k, v, lam = q[0], k[0], v[0], lam[0] if lam.dim() else lam
    weight = torch.empty(d_v, dtype=dtype) if norm else None
    eps = 1e-5 if norm else None
    left = 64 if packed else -1
    call = diff_launch.Call(
        lam, cu, cu, None, tokens, tokens, left, 0, d**-0.5, weight, eps, 0.7, d_v
    )
    y, out, second, lse, rstd = diff_triton.forward_outputs(q, v, cu, eps, hopper, True)
    first = out if norm else y
    delta = torch.empty(pairs, 2 if own_keys else 3, lse.shape[1])
    flat = (y, first, second)
    g = flat[0] if norm else None
    sequences = 2 if packed else 1
    module = diff_launch
    if hopper:
        from megadiff.kernels.hopper import launch as module
    return [
        module.forward_launch(q, k, v, call, first, second, y if norm else None, lse, rstd, True),
        diff_launch.preprocess_launch(
            *flat, rstd, call, sequences, g, delta, torch.empty(tokens, pairs), torch.empty(1)
        ),
        *module.backward_launches(q, k, v, call, flat[0], lse, delta, q, k, v),
    ]


def main() -> None:
    """Arguments: d, d_v, own_keys, norm, packed, hopper; one line of JSON per kernel."""
    d, d_v, own_keys, norm, packed, hopper = (int(x) for x in sys.argv[1:])
    for launch in launches(d, d_v, bool(own_keys), bool(norm), bool(packed), bool(hopper)):
        report = asdict(compile_launch(launch))
        kernel = {"kernel": launch.kernel.__name__, "gluon": launch.kernel.is_gluon()}
        print(json.dumps(kernel | report), flush=True)


if __name__ == "__main__":
    main()
