"""Expand for decode rows: scale * shrunk * B token by token, without tensor cores.

A program handles one block of output columns, for all tokens of one tile. Products and sums are float32. The order of
addition depends only on the width, so a token's result does not depend on the other tokens of its tile.

The rows of B are spread over registers and not over warps, so that no sum needs shared memory. A warp covers up
to 256 columns. On an H200 at rank 16, 64 tokens of 64 adapters and 28,672 columns take 23 us. The kernel for prefill
chunks takes 109 us, because most of its 16 rows per tile are padding.

The shrink outputs of all tokens are loaded before the first store: the compiler does not move a load before a store
that may write the same address, so a loop over tokens waited for memory once per token.
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
def _sum_planes(shares):
    """The shrink output of one token, [PLANES, R] -> [R]."""
    return tl.sum(shares.to(tl.float32), axis=0)


@triton.jit
def _add_block(acc_0, acc_1, acc_2, acc_3, source, real, sizes, b, shrunk_stride):
    """Adds the product of some rows of B with each token of a tile to its sum. source, real: [PLANES, R]."""
    shares_0 = tl.load(source, mask=real, other=0.0)
    shares_1 = tl.load(source + shrunk_stride, mask=real & (sizes > 1), other=0.0)
    shares_2 = tl.load(source + 2 * shrunk_stride, mask=real & (sizes > 2), other=0.0)
    shares_3 = tl.load(source + 3 * shrunk_stride, mask=real & (sizes > 3), other=0.0)
    values = b.to(tl.float32)
    acc_0 += tl.sum(_sum_planes(shares_0)[:, None] * values, axis=0)
    acc_1 += tl.sum(_sum_planes(shares_1)[:, None] * values, axis=0)
    acc_2 += tl.sum(_sum_planes(shares_2)[:, None] * values, axis=0)
    acc_3 += tl.sum(_sum_planes(shares_3)[:, None] * values, axis=0)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def _load_row(target, columns, inside, BLOCK_N: tl.constexpr, ADDS: tl.constexpr):
    """The old output of one token, or zeros if the kernel does not add to it."""
    old = (
        tl.load(target + columns, mask=inside, other=0.0).to(tl.float32)
        if ADDS
        else tl.zeros((BLOCK_N,), tl.float32)
    )
    return old


@triton.jit
def _add_rounded(old, delta, element: tl.constexpr):
    """Rounds the delta first, so that the sum has the same bits if another kernel adds it."""
    return (old + delta.to(element).to(tl.float32)).to(element)


@triton.jit(do_not_specialize=["tiles", "weights", "first_module", "num_tokens"])
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
    ADDS: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    member, width, column_start, index = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    place = slot * NUM_MODULES + first_module + member
    rank = tl.load(modules + place * 3)
    if (size == 0) | (ADDS & (rank == 0)):
        return
    first_row = tl.load(modules + place * 3 + 1)
    first_segment = tl.load(modules + place * 3 + 2)
    row_segments = (width + SEGMENT - 1) // SEGMENT
    scale = tl.load(weights + tile) * tl.load(scales + place)
    columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    planes = tl.arange(0, PLANES)[:, None]
    # Tensors, because the interpreter cannot combine a mask with a comparison of scalars.
    sizes, row_sizes = size + planes * 0, size + columns * 0
    rows = tl.arange(0, BLOCK_R)
    sources = (
        shrunk + planes * (num_tokens * shrunk_stride) + first * shrunk_stride + (first_row + rows)[None, :]
    )
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
    # int64, because the head's output rows are as long as the vocabulary. A few thousand of them exceed an int32 index.
    target = out + first.to(tl.int64) * out_stride + tl.multiple_of(column_start, ALIGNMENT)
    acc_0 = tl.zeros((BLOCK_N,), tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    real = (rows < rank)[None, :] & (planes < SPLITS)
    acc_0, acc_1, acc_2, acc_3 = _add_block(
        acc_0, acc_1, acc_2, acc_3, sources, real, sizes, b, shrunk_stride
    )
    for start in range(BLOCK_R, rank, BLOCK_R):
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
        real = (start + rows < rank)[None, :] & (planes < SPLITS)
        acc_0, acc_1, acc_2, acc_3 = _add_block(
            acc_0, acc_1, acc_2, acc_3, sources + start, real, sizes, b_rest, shrunk_stride
        )
    old_0 = _load_row(target, columns, inside, BLOCK_N, ADDS)
    old_1 = _load_row(target + out_stride, columns, inside & (row_sizes > 1), BLOCK_N, ADDS)
    old_2 = _load_row(target + 2 * out_stride, columns, inside & (row_sizes > 2), BLOCK_N, ADDS)
    old_3 = _load_row(target + 3 * out_stride, columns, inside & (row_sizes > 3), BLOCK_N, ADDS)
    element: tl.constexpr = out.dtype.element_ty
    rows_1, rows_2, rows_3 = target + out_stride, target + 2 * out_stride, target + 3 * out_stride
    tl.store(target + columns, _add_rounded(old_0, acc_0 * scale, element), mask=inside)
    tl.store(rows_1 + columns, _add_rounded(old_1, acc_1 * scale, element), mask=inside & (row_sizes > 1))
    tl.store(rows_2 + columns, _add_rounded(old_2, acc_2 * scale, element), mask=inside & (row_sizes > 2))
    tl.store(rows_3 + columns, _add_rounded(old_3, acc_3 * scale, element), mask=inside & (row_sizes > 3))
