"""Finds the output columns of an expand program. The columns of all modules are cut into blocks of one segment each."""

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
    """Finds the module of a block, and the block's place in it.

    Returns the module's index in the group, its width, its first column in out, and the index of the block's segment
    among the module's segments.
    """
    BLOCKS_0: tl.constexpr = (WIDTH_0 + SEGMENT - 1) // SEGMENT
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (WIDTH_1 + SEGMENT - 1) // SEGMENT
    member = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    width = tl.where(member == 0, WIDTH_0, tl.where(member == 1, WIDTH_1, WIDTH_2))
    column_start = tl.where(member == 0, 0, tl.where(member == 1, WIDTH_0, WIDTH_0 + WIDTH_1))
    segment = block - tl.where(member == 0, 0, tl.where(member == 1, BLOCKS_0, BLOCKS_1))
    return member, width, column_start, segment
