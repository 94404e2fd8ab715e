"""Shrink: x times A of each tile's adapter, read from its pages, for all modules of a linear group in one launch.

A program handles one tile of tokens, one block of A's rows and one share of the input width. Each share's result is
written to its own plane of the shrink output, and expand sums the planes in order. This needs no atomics and no cleared
buffer, and a request's result does not depend on the rest of the batch. Only decode rows are divided into shares.
Prefill chunks have enough tiles, and the matmul beside them takes long enough, so they fill the first plane alone. The
rank is read from the tables, so a rank-8 adapter is not padded to the rank of a rank-128 adapter in the same batch.

The planes are of the model's dtype, and each share's result is rounded to it once. A 16-bit plane halves the traffic
between shrink and expand compared with float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.gpu.launch import Launch, dot_dtype
from slora_kernels.gpu.lora_columns import find_rows
from slora_kernels.gpu.lora_sizes import LoraSizes
from slora_kernels.layout import SEGMENT_BYTES, LoraSite

# The smallest M of a tensor core instruction. Most tiles of a decode batch hold one or two tokens.
_SMALL_TILE_TOKENS = 16
# Tile size of prefill chunks. It is twice the small tile size, so A and B are read half as often. Both sizes are below
# 64 rows, where Hopper also uses mma.sync instead of wgmma. So a token gets the same bits with either size.
TILE_TOKENS = 32


@triton.jit(do_not_specialize=["tiles", "group", "num_tokens", "num_decodes"])
def _lora_shrink_kernel(
    x,
    pages,
    shrunk,
    tiles,
    page_table,
    groups,
    num_tokens,
    num_decodes,
    group,
    x_stride,
    page_stride,
    table_stride,
    shrunk_stride,
    WIDTH: tl.constexpr,
    NUM_SITES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    entry = groups + (slot * NUM_SITES + group) * 2
    rank = tl.load(entry)
    is_chunk = tile >= num_decodes
    if (block * BLOCK_R >= rank) | (size == 0) | (is_chunk & (split > 0)):
        return
    ROW_SEGMENTS: tl.constexpr = (WIDTH + SEGMENT - 1) // SEGMENT
    SHARE: tl.constexpr = (ROW_SEGMENTS + SPLITS - 1) // SPLITS
    tokens = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    first_segment = tl.load(entry + 1)
    row_starts = first_segment + rows * ROW_SEGMENTS
    lowest = first_segment + block * BLOCK_R * ROW_SEGMENTS
    highest = first_segment + tl.minimum(block * BLOCK_R + BLOCK_R, rank) * ROW_SEGMENTS - 1
    x_rows = x + (first + tokens)[:, None] * x_stride
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    end = tl.where(is_chunk, WIDTH, tl.minimum((split + 1) * SHARE * SEGMENT, WIDTH))
    for start in range(split * SHARE * SEGMENT, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = columns[None, :] < end
        values = tl.load(x_rows + columns[None, :], mask=(tokens[:, None] < size) & inside, other=0.0)
        place = find_rows(
            page_table + slot * table_stride,
            row_starts,
            columns,
            lowest,
            highest,
            page_stride,
            SEGMENT,
            PAGE_SEGMENTS,
            TWO_PAGES,
        )
        a = tl.load(pages + place, mask=(rows[:, None] < rank) & inside, other=0.0)
        left, right = values.to(tl.float32).to(DOT_DTYPE), a.to(tl.float32).to(DOT_DTYPE)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    target = shrunk + (split * num_tokens + first + tokens)[:, None] * shrunk_stride + rows[None, :]
    tl.store(target, acc.to(shrunk.dtype.element_ty), mask=(tokens[:, None] < size) & (rows[None, :] < rank))


def choose_block_tokens(tiles: LoraTiles) -> int:
    """Returns BLOCK_M, the number of rows of a program's `tl.dot`.

    It is the small tile size if no tile has more tokens than that, else the full tile size.
    """
    return _SMALL_TILE_TOKENS if tiles.max_tokens <= _SMALL_TILE_TOKENS else TILE_TOKENS


def bind_lora_shrink(
    x: Tensor,
    pages: Tensor,
    tables: AdapterTables,
    site: LoraSite,
    tiles: LoraTiles,
    sizes: LoraSizes,
) -> tuple[Launch, Tensor]:
    """Binds the kernel to x [T, in] of the model dtype and pages uint8 [num_pages, full_page_bytes].

    Returns the launch and the shrink output that it fills: x's dtype, [splits, T, max_group_rank rounded up to 16].
    Rows in no tile, columns past a tile's rank, and all planes but the first for prefill chunks are not written.
    """
    width, of_width = x.shape[1], sizes.select_shrink(x.shape[1])
    # Each share has at least one segment. The number of shares depends only on the width, so the batch does not change
    # a request's sums.
    splits = min(of_width.splits, triton.cdiv(width * x.element_size(), SEGMENT_BYTES))
    has_chunks = tiles.num_decodes < tiles.tiles.shape[0]
    tile = of_width.tile(tiles.max_group_rank, has_chunks=has_chunks)
    columns = triton.cdiv(tiles.max_group_rank, 16) * 16
    shrunk = torch.empty(splits, x.shape[0], columns, dtype=x.dtype, device=x.device)
    elements = pages.view(x.dtype)
    segment, page_segments = SEGMENT_BYTES // x.element_size(), pages.shape[1] // SEGMENT_BYTES
    return Launch(
        _lora_shrink_kernel,
        (tiles.tiles.shape[0], triton.cdiv(tiles.max_group_rank, tile.block_rank), splits),
        {
            "x": x,
            "pages": elements,
            "shrunk": shrunk,
            "tiles": tiles.tiles,
            "page_table": tables.page_table,
            "groups": tables.groups,
            "num_tokens": x.shape[0],
            "num_decodes": tiles.num_decodes,
            "group": site.group,
            "x_stride": x.stride(0),
            "page_stride": elements.stride(0),
            "table_stride": tables.page_table.stride(0),
            "shrunk_stride": columns,
        },
        {
            "WIDTH": width,
            "NUM_SITES": tables.groups.shape[1],
            "SEGMENT": segment,
            "PAGE_SEGMENTS": page_segments,
            "TWO_PAGES": tile.block_rank * triton.cdiv(width, segment) <= page_segments,
            "SPLITS": splits,
            "BLOCK_M": choose_block_tokens(tiles),
            "BLOCK_R": tile.block_rank,
            "BLOCK_K": tile.block_segments * segment,
            "DOT_DTYPE": dot_dtype(x.dtype),
        },
        tile.num_warps,
        tile.num_stages,
    ), shrunk
