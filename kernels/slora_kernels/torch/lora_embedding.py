"""The shrink of the input embedding in plain torch, for all tiles at once.

The input is one-hot, so x times A is a column of A.
"""

import torch
from torch import Tensor

from slora_kernels.batch import LoraStep
from slora_kernels.layout import SEGMENT_BYTES, LoraSite


def shrink_embedding(
    token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
) -> Tensor:
    """Gathers the columns of A at `token_ids` int64 [T]. Returns [T, max_group_rank] of `dtype`.

    Columns past a tile's rank and rows in no tile are 0.
    """
    slots, firsts, sizes = step.tiles.tiles.long().T
    device, max_rank = token_ids.device, step.tiles.max_group_rank
    tile = torch.repeat_interleave(torch.arange(len(slots), device=device), sizes)
    # Token indexes, tile by tile: the tile's first token plus the offset within the tile.
    tokens = firsts[tile] + torch.arange(len(tile), device=device) - (sizes.cumsum(0) - sizes)[tile]
    slot, ids = slots[tile], token_ids[tokens]
    ranks, first_segments = step.tables.groups[slot, site.group].long().T
    segment_size, page_segments = SEGMENT_BYTES // dtype.itemsize, pages.shape[1] // SEGMENT_BYTES
    row_segments = -(-site.in_width // segment_size)
    rows = torch.arange(max_rank, device=device)
    inside = rows < ranks[:, None]
    at = torch.where(inside, rows * row_segments + (first_segments + ids // segment_size)[:, None], 0)
    page = step.tables.page_table[slot[:, None], at // page_segments].long()
    number = at % page_segments * segment_size + (ids % segment_size)[:, None]
    shrunk = torch.zeros(token_ids.shape[0], max_rank, dtype=dtype, device=device)
    shrunk[tokens] = torch.where(inside, pages.view(dtype)[page, number], 0)
    return shrunk
