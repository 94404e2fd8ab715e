"""Which output columns a program of expand has: those of all modules of a group are counted in blocks of a segment."""

import triton
import triton.language as tl


@triton.jit
def find_columns(
    block,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """A block -> its module's place in the group, that one's width and first column in out, and its segment there."""
    BLOCKS_0: tl.constexpr = (WIDTH_0 + SEGMENT - 1) // SEGMENT
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (WIDTH_1 + SEGMENT - 1) // SEGMENT
    member = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    width = tl.where(member == 0, WIDTH_0, tl.where(member == 1, WIDTH_1, WIDTH_2))
    column_start = tl.where(member == 0, 0, tl.where(member == 1, WIDTH_0, WIDTH_0 + WIDTH_1))
    segment = block - tl.where(member == 0, 0, tl.where(member == 1, BLOCKS_0, BLOCKS_1))
    return member, width, column_start, segment
