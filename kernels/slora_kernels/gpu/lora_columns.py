"""Finds what a LoRA program reads and writes: its output columns, and the pages that hold its part of an adapter.

Most programs read a part of an adapter that lies in one page or in two adjacent pages. They look up both page ids once.
Only models with small pages need a lookup for each segment.
"""

import triton
import triton.language as tl


@triton.jit
def find_columns(
    block,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Finds the module of a block of BLOCK_N columns, and the block's place in that module.

    Returns the module's index in the group, its width, its first column in out, and the index of the block among the
    module's blocks.
    """
    BLOCKS_0: tl.constexpr = (WIDTH_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (WIDTH_1 + BLOCK_N - 1) // BLOCK_N
    member = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    width = tl.where(member == 0, WIDTH_0, tl.where(member == 1, WIDTH_1, WIDTH_2))
    column_start = tl.where(member == 0, 0, tl.where(member == 1, WIDTH_0, WIDTH_0 + WIDTH_1))
    index = block - tl.where(member == 0, 0, tl.where(member == 1, BLOCKS_0, BLOCKS_1))
    return member, width, column_start, index


@triton.jit
def find_rows(
    table,
    row_starts,
    columns,
    first,
    last,
    page_stride,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
):
    """Finds where `columns` [N] of an adapter's rows lie: [R, N], in elements from the start of the pool.

    table: the adapter's page ids. row_starts: int32 [R], the first segment of each row.
    first, last: bounds of the segments that are read. With TWO_PAGES, these segments lie in one page or in two adjacent
    pages.
    """
    segments = row_starts[:, None] + (columns // SEGMENT)[None, :]
    if TWO_PAGES:
        near, far = first // PAGE_SEGMENTS, last // PAGE_SEGMENTS
        near_start = tl.load(table + near).to(tl.int64) * page_stride - near * (PAGE_SEGMENTS * SEGMENT)
        far_start = tl.load(table + far).to(tl.int64) * page_stride - far * (PAGE_SEGMENTS * SEGMENT)
        # A product, because behind `tl.where` triton 3.9 no longer sees that 16 bytes can be loaded at once.
        page_starts = near_start + (segments >= far * PAGE_SEGMENTS).to(tl.int64) * (far_start - near_start)
    else:
        index = segments // PAGE_SEGMENTS
        pages = tl.load(table + index, mask=segments <= last, other=0).to(tl.int64)
        page_starts = pages * page_stride - index * (PAGE_SEGMENTS * SEGMENT)
    return page_starts + row_starts[:, None] * SEGMENT + columns[None, :]


@triton.jit
def load_b_rows(
    pages,
    table,
    first_segment,
    start,
    rank,
    row_segments,
    columns,
    page_stride,
    width,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Loads `columns` [N] of BLOCK_R rows of transposed B from row `start` on. Values past rank and width are 0."""
    rows = start + tl.arange(0, BLOCK_R)
    place = find_rows(
        table,
        first_segment + rows * row_segments,
        columns,
        first_segment + start * row_segments,
        first_segment + tl.minimum(start + BLOCK_R, rank) * row_segments - 1,
        page_stride,
        SEGMENT,
        PAGE_SEGMENTS,
        TWO_PAGES,
    )
    return tl.load(pages + place, mask=(rows[:, None] < rank) & (columns[None, :] < width), other=0.0)
