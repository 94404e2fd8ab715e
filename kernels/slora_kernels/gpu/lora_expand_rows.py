"""Expand for decode rows: scale * shrunk * B token by token, without tensor cores.

A program handles one block of output columns, for all tokens of one tile. `multiply_b` computes the products.
"""

import triton
import triton.language as tl

from slora_kernels.gpu.lora_columns import add_scaled, find_columns, find_module, multiply_b

# The maximum number of tokens in a tile of decode rows. Many programs with few tokens keep a GPU busier than few
# programs with many tokens, but every tile reads A and B again, at least from the cache.
ROW_TILE_TOKENS = 4


@triton.jit(do_not_specialize=["first_module"])
def _lora_expand_rows_kernel(
    out,
    shrunk,
    pages,
    tiles,
    weights,
    page_table,
    modules,
    scales,
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
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    member, width, column_start, index = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    rank, first_row, first_segment, scale = find_module(
        modules, scales, slot, tl.load(weights + tile), first_module + member, NUM_MODULES
    )
    if (size == 0) | (rank == 0):
        return
    columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    # int64, because the head's output rows are as long as the vocabulary. A few thousand of them exceed an int32 index.
    target = out + first.to(tl.int64) * out_stride + tl.multiple_of(column_start, ALIGNMENT) + columns
    # Tensors, because the interpreter cannot combine a mask with a comparison of scalars.
    sizes = size + columns * 0
    inside_1, inside_2, inside_3 = inside & (sizes > 1), inside & (sizes > 2), inside & (sizes > 3)
    # All loads come before the first store, because the compiler cannot move a load before a store that may write to
    # the same address.
    old_0 = tl.load(target, mask=inside, other=0.0)
    old_1 = tl.load(target + out_stride, mask=inside_1, other=0.0)
    old_2 = tl.load(target + 2 * out_stride, mask=inside_2, other=0.0)
    old_3 = tl.load(target + 3 * out_stride, mask=inside_3, other=0.0)
    acc_0, acc_1, acc_2, acc_3 = multiply_b(
        shrunk + first * shrunk_stride + first_row,
        size,
        shrunk_stride,
        pages,
        page_table + slot * table_stride,
        first_segment,
        rank,
        columns,
        inside,
        page_stride,
        width,
        SEGMENT,
        PAGE_SEGMENTS,
        TWO_PAGES,
        BLOCK_R,
        4,
    )
    element = out.dtype.element_ty
    tl.store(target, add_scaled(old_0, acc_0, scale).to(element), mask=inside)
    tl.store(target + out_stride, add_scaled(old_1, acc_1, scale).to(element), mask=inside_1)
    tl.store(target + 2 * out_stride, add_scaled(old_2, acc_2, scale).to(element), mask=inside_2)
    tl.store(target + 3 * out_stride, add_scaled(old_3, acc_3, scale).to(element), mask=inside_3)
