"""Scales and offsets of output columns: out = out * scale + weight * offset, for the rows of each tile.

A program handles one block of columns of one tile. It reads the scales and the offsets once and loops over the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.lora_columns import find_columns, find_rows
from slora_kernels.layout import AFFINE_BYTES, AFFINE_SEGMENT, SEGMENT_BYTES, LoraSite

# Columns per program: 16 bytes of scales for each of 128 threads.
BLOCK_COLUMNS = 512


@triton.jit(do_not_specialize=["tiles", "weights", "first_module"])
def _lora_affine_kernel(
    out,
    pages,
    tiles,
    weights,
    page_table,
    affine,
    first_module,
    out_stride,
    page_stride,
    table_stride,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    member, width, column_start, index = find_columns(block, WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    place = (slot * NUM_MODULES + first_module + member) * 4
    if (size == 0) | (tl.load(affine + place) == 0):
        return
    segment = tl.load(affine + place + 1)
    row_segments = (width + SEGMENT - 1) // SEGMENT
    columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    rows = find_rows(
        page_table + slot * table_stride,
        segment + tl.arange(0, 2) * row_segments,
        columns,
        segment,
        segment + 2 * row_segments - 1,
        page_stride,
        SEGMENT,
        PAGE_SEGMENTS,
        False,
    )
    both = tl.load(pages + rows, mask=inside[None, :], other=0.0)
    is_scale = (tl.arange(0, 2) == 0)[:, None]
    scales = tl.sum(tl.where(is_scale, both, 0.0), axis=0)
    offsets = tl.sum(tl.where(is_scale, 0.0, both), axis=0) * tl.load(weights + tile)
    # int64, because the head's output rows are as long as the vocabulary.
    target = out + first.to(tl.int64) * out_stride + column_start + columns
    for _ in range(size):
        old = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (old * scales + offsets).to(out.dtype.element_ty), mask=inside)
        target += out_stride


def bind_lora_affine(
    out: Tensor, pages: Tensor, tables: AdapterTables, site: LoraSite, tiles: LoraTiles
) -> Launch:
    """Binds the kernel to out [T, sum(site.widths)], which it changes in place."""
    widths = (*site.widths, 0, 0)[:3]
    floats = pages.view(torch.float32)
    return Launch(
        _lora_affine_kernel,
        (len(tiles.tiles), sum(triton.cdiv(width, BLOCK_COLUMNS) for width in widths)),
        {
            "out": out,
            "pages": floats,
            "tiles": tiles.tiles,
            "weights": tiles.weights,
            "page_table": tables.page_table,
            "affine": tables.affine,
            "first_module": site.first_module,
            "out_stride": out.stride(0),
            "page_stride": floats.stride(0),
            "table_stride": tables.page_table.stride(0),
        },
        {
            "WIDTH_0": widths[0],
            "WIDTH_1": widths[1],
            "WIDTH_2": widths[2],
            "NUM_MODULES": tables.affine.shape[1],
            "SEGMENT": AFFINE_SEGMENT,
            "PAGE_SEGMENTS": floats.shape[1] * AFFINE_BYTES // SEGMENT_BYTES,
            "BLOCK_N": BLOCK_COLUMNS,
        },
    )
