"""Expand for decode rows: adds scale * shrunk * B token by token, without tensor cores.

A program handles one block of output columns, for the tokens of one tile in turn, and keeps the first rows of B in
registers. Products and sums are float32. The order of addition depends only on the width, so a token's result does
not depend on the other tokens of its tile.

The rows of B are spread over registers and not over warps, so that no sum needs shared memory. A warp covers up
to 256 columns. On an H200 at rank 16, 64 tokens of 64 adapters and 28,672 columns take 23 us. The kernel for prefill
chunks takes 109 us, because most of its 16 rows per tile are padding.
"""

import triton
import triton.language as tl

from slora_kernels.gpu.lora_columns import find_columns, load_b_rows

# The maximum number of tokens in a tile of decode rows. Many programs with few tokens keep a GPU busier than few
# programs with many tokens, but every tile reads A and B again, at least from the cache. Measured on an H200 with 64
# rows of 1 and 8 adapters, for shrink and expand together: at rank 16, tiles of 4 tokens were fastest. At rank 64,
# tiles of 16 tokens took 1.5 times as long as tiles of 4.
ROW_TILE_TOKENS = 4


@triton.jit
def _sum_planes(source, rows, rank, planes, SPLITS: tl.constexpr):
    """The shrink output of one token for `rows` [R], summed over its planes. source: pointers [PLANES, R]."""
    shares = tl.load(source, mask=(rows < rank)[None, :] & (planes < SPLITS), other=0.0)
    return tl.sum(shares.to(tl.float32), axis=0)


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
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    member, width, column_start, index = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    slot = tl.load(tiles + tile * 3)
    place = slot * NUM_MODULES + first_module + member
    rank = tl.load(modules + place * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    if (rank == 0) | (size == 0):
        return
    first_row = tl.load(modules + place * 3 + 1)
    first_segment = tl.load(modules + place * 3 + 2)
    row_segments = (width + SEGMENT - 1) // SEGMENT
    scale = tl.load(weights + tile) * tl.load(scales + place)
    columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    planes = tl.arange(0, PLANES)[:, None]
    plane_starts = shrunk + planes * (num_tokens * shrunk_stride)
    rows = tl.arange(0, BLOCK_R)
    table = page_table + slot * table_stride
    b = load_b_rows(
        pages,
        table,
        first_segment,
        0,
        rank,
        row_segments,
        columns,
        page_stride,
        width,
        SEGMENT,
        PAGE_SEGMENTS,
        TWO_PAGES,
        BLOCK_R,
    )
    for number in range(size):
        token = first + number
        # int64, because the head's output rows are as long as the vocabulary. A few thousand of them exceed an int32
        # index.
        target = out + token.to(tl.int64) * out_stride + tl.multiple_of(column_start, ALIGNMENT) + columns
        old = tl.load(target, mask=inside, other=0.0)
        source = plane_starts + (token * shrunk_stride + first_row + rows)[None, :]
        y = _sum_planes(source, rows, rank, planes, SPLITS)
        acc = tl.sum(y[:, None] * b.to(tl.float32), axis=0)
        for start in range(BLOCK_R, rank, BLOCK_R):
            source = plane_starts + (token * shrunk_stride + first_row + start + rows)[None, :]
            y = _sum_planes(source, start + rows, rank, planes, SPLITS)
            b_rest = load_b_rows(
                pages,
                table,
                first_segment,
                start,
                rank,
                row_segments,
                columns,
                page_stride,
                width,
                SEGMENT,
                PAGE_SEGMENTS,
                TWO_PAGES,
                BLOCK_R,
            )
            acc += tl.sum(y[:, None] * b_rest.to(tl.float32), axis=0)
        tl.store(target, (old.to(tl.float32) + acc * scale).to(out.dtype.element_ty), mask=inside)
