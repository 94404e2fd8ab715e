"""Maps a program of expand to its output columns. All modules of a group are cut into blocks of one segment each."""

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
    """Returns the module and the columns of a block.

    They are the module's index in the group, its width, its first column in out, and the block's segment index within
    it.
    """
    BLOCKS_0: tl.constexpr = (WIDTH_0 + SEGMENT - 1) // SEGMENT
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (WIDTH_1 + SEGMENT - 1) // SEGMENT
    member = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    width = tl.where(member == 0, WIDTH_0, tl.where(member == 1, WIDTH_1, WIDTH_2))
    column_start = tl.where(member == 0, 0, tl.where(member == 1, WIDTH_0, WIDTH_0 + WIDTH_1))
    segment = block - tl.where(member == 0, 0, tl.where(member == 1, BLOCKS_0, BLOCKS_1))
    return member, width, column_start, segment
