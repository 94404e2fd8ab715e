"""The shrink of the input embedding. The input is one-hot, so x times A is a column of A.

A is stored row by row as [rank, vocabulary]. The elements of a token's column therefore lie far apart, and each of them
is a separate read. The shrink output has one plane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.lora_shrink import choose_block_tokens
from slora_kernels.layout import SEGMENT_BYTES, LoraSite

# Rows of A per program. Each element is a separate memory transaction, so a larger block would not save reads.
BLOCK_RANK = 32


@triton.jit(do_not_specialize=["token_ids", "tiles", "group"])
def _lora_shrink_embedding_kernel(
    token_ids,
    pages,
    shrunk,
    tiles,
    page_table,
    groups,
    group,
    page_stride,
    table_stride,
    shrunk_stride,
    ROW_SEGMENTS: tl.constexpr,
    NUM_SITES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    entry = groups + (slot * NUM_SITES + group) * 2
    rank = tl.load(entry)
    if block * BLOCK_R >= rank:
        return
    tokens = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (tokens[:, None] < size) & (rows[None, :] < rank)
    ids = tl.load(token_ids + first + tokens, mask=tokens < size, other=0).to(tl.int32)
    at = tl.load(entry + 1) + rows[None, :] * ROW_SEGMENTS + (ids // SEGMENT)[:, None]
    page = tl.load(page_table + slot * table_stride + at // PAGE_SEGMENTS, mask=mask, other=0)
    start = page.to(tl.int64) * page_stride + (at % PAGE_SEGMENTS) * SEGMENT + (ids % SEGMENT)[:, None]
    values = tl.load(pages + start, mask=mask, other=0.0)
    tl.store(shrunk + (first + tokens)[:, None] * shrunk_stride + rows[None, :], values, mask=mask)


def bind_lora_shrink_embedding(
    token_ids: Tensor,
    pages: Tensor,
    tables: AdapterTables,
    site: LoraSite,
    tiles: LoraTiles,
    dtype: torch.dtype,
) -> tuple[Launch, Tensor]:
    """Binds the kernel to token_ids int64 [T] and pages uint8 [num_pages, full_page_bytes] with elements of `dtype`.

    Returns the launch and the shrink output that it fills: `dtype`, [1, T, max_group_rank rounded up to 16]. Rows in no
    tile and columns past a tile's rank are not written.
    """
    columns = triton.cdiv(tiles.max_group_rank, 16) * 16
    shrunk = torch.empty(1, token_ids.shape[0], columns, dtype=dtype, device=token_ids.device)
    elements = pages.view(dtype)
    segment = SEGMENT_BYTES // dtype.itemsize
    return Launch(
        _lora_shrink_embedding_kernel,
        (tiles.tiles.shape[0], triton.cdiv(tiles.max_group_rank, BLOCK_RANK)),
        {
            "token_ids": token_ids,
            "pages": elements,
            "shrunk": shrunk,
            "tiles": tiles.tiles,
            "page_table": tables.page_table,
            "groups": tables.groups,
            "group": site.group,
            "page_stride": elements.stride(0),
            "table_stride": tables.page_table.stride(0),
            "shrunk_stride": columns,
        },
        {
            "ROW_SEGMENTS": triton.cdiv(site.in_width, segment),
            "NUM_SITES": tables.groups.shape[1],
            "SEGMENT": segment,
            "PAGE_SEGMENTS": pages.shape[1] // SEGMENT_BYTES,
            "BLOCK_M": choose_block_tokens(tiles),
            "BLOCK_R": BLOCK_RANK,
        },
    ), shrunk
