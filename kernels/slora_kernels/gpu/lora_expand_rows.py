"""Expand for decode rows: adds scale * shrunk * B for one token after the other, without tensor cores.

A program handles one segment of output columns, for the tokens of one tile in turn. Products and sums are float32. The
order of addition depends only on the width, so a token's bits do not depend on the other tokens of its tile. After the
first token of a tile, the rows of B are in the cache.

This kernel suits tiles of few tokens. Compared with `_lora_expand_kernel` on sm_90 at rank 16, a tile of one token
takes a third of the instructions, and a tile of eight tokens takes twice as many. The size table therefore decides
which kernel computes decode rows (`lora_sizes`). `bind_lora_expand` launches both.
"""

import triton
import triton.language as tl

from slora_kernels.gpu.lora_columns import find_columns

# The most tokens per tile of decode rows. Many programs with few tokens keep a GPU busier than few programs with many.
ROW_TILE_TOKENS = 16


@triton.jit(do_not_specialize=["first_module", "num_tokens"])
def _lora_expand_rows_kernel(
    out,
    shrunk,
    pages,
    tiles,
    weights,
    page_table,
    modules,
    scales,
    num_tokens,
    first_module,
    out_stride,
    page_stride,
    table_stride,
    shrunk_stride,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    member, width, column_start, segment = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, SEGMENT)
    slot = tl.load(tiles + tile * 3)
    place = slot * NUM_MODULES + first_module + member
    rank = tl.load(modules + place * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    if (rank == 0) | (size == 0):
        return
    first_row = tl.load(modules + place * 3 + 1)
    first_segment = tl.load(modules + place * 3 + 2) + segment
    row_segments = (width + SEGMENT - 1) // SEGMENT
    scale = tl.load(weights + tile) * tl.load(scales + place)
    lanes = tl.arange(0, SEGMENT)
    inside = segment * SEGMENT + lanes < width
    columns = tl.multiple_of(column_start + segment * SEGMENT, ALIGNMENT) + lanes
    planes = tl.arange(0, PLANES)[:, None]
    plane_starts = shrunk + planes * (num_tokens * shrunk_stride)
    for index in range(size):
        token = first + index
        # int64, because the head's output rows are as long as the vocabulary. A few thousand of them exceed an int32
        # index.
        target = out + token.to(tl.int64) * out_stride + columns
        old = tl.load(target, mask=inside, other=0.0)
        acc = tl.zeros((SEGMENT,), tl.float32)
        for start in range(0, rank, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            source = plane_starts + (token * shrunk_stride + first_row + rows)[None, :]
            shares = tl.load(source, mask=(rows < rank)[None, :] & (planes < SPLITS), other=0.0)
            y = tl.sum(shares.to(tl.float32), axis=0)
            at = first_segment + rows * row_segments
            page = tl.load(page_table + slot * table_stride + at // PAGE_SEGMENTS, mask=rows < rank, other=0)
            base = page.to(tl.int64) * page_stride + (at % PAGE_SEGMENTS) * SEGMENT
            filled = (rows[:, None] < rank) & inside[None, :]
            b = tl.load(pages + base[:, None] + lanes[None, :], mask=filled, other=0.0)
            acc += tl.sum(y[:, None] * b.to(tl.float32), axis=0)
        tl.store(target, (old.to(tl.float32) + acc * scale).to(out.dtype.element_ty), mask=inside)
