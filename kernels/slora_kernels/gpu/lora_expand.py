"""Expand: adds scale * shrunk * B to the base GEMM's output, for all modules of a linear group in one launch.

A program handles one tile of tokens and one block of output columns. It reads the block's columns of transposed B from
the adapter's pages. Decode rows have a kernel of their own, which sums the planes of the shrink output.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.gpu.launch import Launch, dot_dtype
from slora_kernels.gpu.lora_columns import find_columns, load_b_rows
from slora_kernels.gpu.lora_expand_rows import _lora_expand_rows_kernel
from slora_kernels.gpu.lora_shrink import choose_block_tokens
from slora_kernels.gpu.lora_sizes import LoraSizes
from slora_kernels.layout import MAX_GROUP_MODULES, SEGMENT_BYTES, LoraSite

# Rows of B per `tl.dot`: the smallest K of a 16-bit tensor core instruction. Rank 8 wastes half of it.
BLOCK_RANK = 16


@triton.jit(do_not_specialize=["tiles", "weights", "first_module", "first_tile"])
def _lora_expand_kernel(
    out,
    shrunk,
    pages,
    tiles,
    weights,
    page_table,
    modules,
    scales,
    first_tile,
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
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    ADDS: tl.constexpr,
):
    tile, block = first_tile + tl.program_id(0), tl.program_id(1)
    member, width, column_start, index = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    slot = tl.load(tiles + tile * 3)
    place = slot * NUM_MODULES + first_module + member
    rank = tl.load(modules + place * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    if (size == 0) | (ADDS & (rank == 0)):
        return
    first_row = tl.load(modules + place * 3 + 1)
    first_segment = tl.load(modules + place * 3 + 2)
    row_segments = (width + SEGMENT - 1) // SEGMENT
    tokens = tl.arange(0, BLOCK_M)
    columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns[None, :] < width
    scale = tl.load(weights + tile) * tl.load(scales + place)
    # int64, because the head's output rows are as long as the vocabulary. A few thousand of them exceed an int32 index.
    target = out + (first + tokens).to(tl.int64)[:, None] * out_stride
    target += tl.multiple_of(column_start, ALIGNMENT) + columns[None, :]
    mask = (tokens[:, None] < size) & inside
    # The old output is loaded early, so that the load overlaps with the page lookups.
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    old = tl.load(target, mask=mask, other=0.0).to(tl.float32) if ADDS else zeros
    acc = zeros
    for start in range(0, rank, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        taken = (tokens[:, None] < size) & (rows[None, :] < rank)
        source = shrunk + (first + tokens)[:, None] * shrunk_stride + (first_row + rows)[None, :]
        y = tl.load(source, mask=taken, other=0.0)
        b = load_b_rows(
            pages,
            page_table + slot * table_stride,
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
        acc = tl.dot(
            y.to(tl.float32).to(DOT_DTYPE), b.to(tl.float32).to(DOT_DTYPE), acc, input_precision="ieee"
        )
    # Rounded first, so that the sum has the same bits if another kernel adds the delta.
    delta = (acc * scale).to(out.dtype.element_ty)
    tl.store(target, (old + delta.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


def bind_lora_expand(
    out: Tensor,
    shrunk: Tensor,
    pages: Tensor,
    tables: AdapterTables,
    site: LoraSite,
    tiles: LoraTiles,
    sizes: LoraSizes,
    *,
    adds: bool = True,
) -> list[Launch]:
    """Binds the kernels to shrunk [splits, T, columns] and to out [T, sum(site.widths)], which is changed in place.

    adds: False overwrites the rows of out that are in a tile. What is added is first rounded to the dtype of out, which
    is that of shrunk, or float32.

    Returns one launch for the tiles of decode rows, and one launch for all other tiles. A launch without tiles is left
    out.
    """
    widths, dtype = site.widths, shrunk.dtype
    padded = widths + (0,) * (MAX_GROUP_MODULES - len(widths))
    segment = SEGMENT_BYTES // dtype.itemsize
    page_segments = pages.shape[1] // SEGMENT_BYTES
    elements = pages.view(dtype)
    arguments = {
        "out": out,
        "shrunk": shrunk,
        "pages": elements,
        "tiles": tiles.tiles,
        "weights": tiles.weights,
        "page_table": tables.page_table,
        "modules": tables.modules,
        "scales": tables.scales,
        "first_module": site.first_module,
        "out_stride": out.stride(0),
        "page_stride": elements.stride(0),
        "table_stride": tables.page_table.stride(0),
        "shrunk_stride": shrunk.stride(1),
    }
    constants = {
        "WIDTH_0": padded[0],
        "WIDTH_1": padded[1],
        "WIDTH_2": padded[2],
        "ALIGNMENT": math.gcd(16, *widths),
        "NUM_MODULES": tables.modules.shape[1],
        "SEGMENT": segment,
        "PAGE_SEGMENTS": page_segments,
    }
    of_width = sizes.select_expand(sum(widths))
    num_rows = tiles.num_decodes
    launches = []
    if num_rows:
        rows = of_width.rows
        block = rows.block_segments * segment
        launches.append(
            Launch(
                _lora_expand_rows_kernel,
                (num_rows, sum(triton.cdiv(width, block) for width in widths)),
                arguments | {"num_tokens": shrunk.shape[1]},
                constants
                | {
                    "SPLITS": shrunk.shape[0],
                    "PLANES": triton.next_power_of_2(shrunk.shape[0]),
                    "TWO_PAGES": rows.block_rank * triton.cdiv(max(widths), segment) <= page_segments,
                    "BLOCK_R": rows.block_rank,
                    "BLOCK_N": block,
                    "ADDS": adds,
                },
                rows.num_warps,
            )
        )
    if num_others := tiles.tiles.shape[0] - num_rows:
        tile = of_width.tile(tiles.max_group_rank)
        block = tile.block_segments * segment
        products = {
            "TWO_PAGES": BLOCK_RANK * triton.cdiv(max(widths), segment) <= page_segments,
            "BLOCK_M": choose_block_tokens(tiles),
            "BLOCK_R": BLOCK_RANK,
            "BLOCK_N": block,
            "DOT_DTYPE": dot_dtype(dtype),
            "ADDS": adds,
        }
        launches.append(
            Launch(
                _lora_expand_kernel,
                (num_others, sum(triton.cdiv(width, block) for width in widths)),
                arguments | {"first_tile": num_rows},
                constants | products,
                tile.num_warps,
                tile.num_stages,
            )
        )
    return launches
