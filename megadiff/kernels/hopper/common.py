"""Parts shared by the Hopper kernels of differential attention."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def accumulator_layout(width):
    """Of a `[64, width]` result of one warp group's matrix product."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16]
    )


@gluon.constexpr_function
def left_operand_layout(accumulator):
    """Of a left operand in registers, for a product with that accumulator."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.jit
def tile(tiles, i):
    """Tile i, `[rows, width]`, of a stack `[n, 1, rows, width]` as the copy engine fills it."""
    x = tiles.index(i)
    return x.reshape([x.shape[1], x.shape[2]])


@gluon.jit
def schedule(pid, blocks, heads, side, REVERSED: gl.constexpr):
    """1-D grid -> (block, head), `side` heads side by side: `diff_common.schedule`."""
    first = pid // (blocks * side) * side
    size = min(side, heads - first)
    inside = pid - first * blocks
    block = inside // size
    if REVERSED:
        block = blocks - 1 - block
    return block, first + inside % size


@gluon.jit
def statistics_start(n_q, index):
    """As `diff_common.statistics_start` of a batch that is not packed."""
    return index * ((n_q // 4 + 1) * 4)


@gluon.jit
def load_lambda(lam, tokens, inside, pair, pairs, PER_TOKEN: gl.constexpr, PER_HEAD: gl.constexpr):
    if PER_TOKEN:
        return gl.load(lam + tokens.to(gl.int64) * pairs + pair, mask=inside, other=0.0)
    if PER_HEAD:
        return gl.load(lam + pair) + tokens.to(gl.float32) * 0.0
    return gl.load(lam) + tokens.to(gl.float32) * 0.0


@gluon.jit
def ring(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers that each wait for `arrivals`."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def pack(x, y):
    """Two float32 tensors as one of pairs of bfloat16. (Plain conversions do not save registers:
    the assembler keeps each half in a register of its own.)"""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def times_first(pairs, factor):
    """x * factor of a packed (x, y)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; and.b32 x, $1, 0xffff0000; mul.f32 $0, x, $2; }", "=f,r,f",
        [pairs, factor], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def times_second(pairs, factor):
    """y * factor of a packed (x, y)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 y; shl.b32 y, $1, 16; mul.f32 $0, y, $2; }", "=f,r,f",
        [pairs, factor], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
