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
        # A product, because behind `tl.where` the compiler no longer sees that 16 bytes can be loaded at once.
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


@triton.jit
def multiply_b(
    shrunk,
    size,
    shrunk_stride,
    pages,
    table,
    first_segment,
    rank,
    columns,
    inside,
    page_stride,
    width,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The products of up to four tokens with columns of transposed B, float32, without tensor cores.

    shrunk: the first token's shrink output of the module. size: number of tokens, at most TOKENS, which is 1 or 4.
    columns, inside: the columns and which of them are needed, of any shape.

    Each sum goes over the rows of B in ascending order, one fused multiply-add after the other. A token therefore gets
    the same bits from every kernel, whatever the shape of its block, and next to any other tokens. The shrink output is
    read number by number: every thread needs each of them, and a vector would have to pass through shared memory.
    """
    row_segments = (width + SEGMENT - 1) // SEGMENT
    segments = first_segment + columns // SEGMENT
    acc_0 = tl.zeros(columns.shape, tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    for start in range(0, rank, BLOCK_R):
        if TWO_PAGES:
            near = (first_segment + start * row_segments) // PAGE_SEGMENTS
            far = (first_segment + tl.minimum(start + BLOCK_R, rank) * row_segments - 1) // PAGE_SEGMENTS
            near_start = tl.load(table + near).to(tl.int64) * page_stride - near * (PAGE_SEGMENTS * SEGMENT)
            far_start = tl.load(table + far).to(tl.int64) * page_stride - far * (PAGE_SEGMENTS * SEGMENT)
        for step in tl.static_range(BLOCK_R):
            row = start + step
            is_real = row < rank
            # A tensor, because the interpreter cannot combine a mask with a scalar.
            mask = inside & (columns * 0 + row < rank)
            at = segments + row * row_segments
            if TWO_PAGES:
                page_starts = near_start + (at >= far * PAGE_SEGMENTS).to(tl.int64) * (far_start - near_start)
            else:
                index = at // PAGE_SEGMENTS
                page_ids = tl.load(table + index, mask=mask, other=0).to(tl.int64)
                page_starts = page_ids * page_stride - index * (PAGE_SEGMENTS * SEGMENT)
            place = page_starts + (first_segment + row * row_segments) * SEGMENT + columns
            b = tl.load(pages + place, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(shrunk + row, mask=is_real, other=0.0)
            acc_0 = tl.fma(tl.broadcast_to(y, b.shape), b, acc_0)
            if TOKENS > 1:
                y = tl.load(shrunk + shrunk_stride + row, mask=is_real & (size > 1), other=0.0)
                acc_1 = tl.fma(tl.broadcast_to(y, b.shape), b, acc_1)
                y = tl.load(shrunk + 2 * shrunk_stride + row, mask=is_real & (size > 2), other=0.0)
                acc_2 = tl.fma(tl.broadcast_to(y, b.shape), b, acc_2)
                y = tl.load(shrunk + 3 * shrunk_stride + row, mask=is_real & (size > 3), other=0.0)
                acc_3 = tl.fma(tl.broadcast_to(y, b.shape), b, acc_3)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def add_scaled(old, acc, scale):
    """old + acc * scale, rounded once to the dtype of old. Returns float32. The same bits in every kernel."""
    total = tl.fma(acc, tl.broadcast_to(scale, acc.shape), old.to(tl.float32))
    return total.to(old.dtype).to(tl.float32)


@triton.jit
def find_module(modules, scales, slot, weight, module, NUM_MODULES: tl.constexpr):
    """Finds a module of an adapter. slot: -1 for a row of the base model.

    Returns the module's rank (0 if there is no adapter), its first row in the shrink output, the first segment of
    transposed B, and what the product is multiplied by.
    """
    place = slot * NUM_MODULES + module
    has_adapter = slot >= 0
    rank = tl.load(modules + place * 3, mask=has_adapter, other=0)
    first_row = tl.load(modules + place * 3 + 1, mask=has_adapter, other=0)
    first_segment = tl.load(modules + place * 3 + 2, mask=has_adapter, other=0)
    return rank, first_row, first_segment, weight * tl.load(scales + place, mask=has_adapter, other=0.0)
