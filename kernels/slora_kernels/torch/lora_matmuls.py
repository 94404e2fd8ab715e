"""LoRA as torch matmuls, tile by tile: one matmul shrinks all modules of a site, and one per module expands.

The rows of A and B are first gathered from the pages. This is fastest for long tiles, where the matmuls cost far more
than the copies and calls. The shrink output is rounded to the model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraStep, LoraTiles
from slora_kernels.layout import SEGMENT_BYTES, LoraSite
from slora_kernels.ops import Kernels, ShrinkOutput
from slora_kernels.torch.row_blocks import multiply_rows


@dataclass(frozen=True, slots=True)
class HostLoraTile:
    """One LoRA tile and the rows of its slot in `AdapterTables`, as Python numbers."""

    first: int
    tokens: int
    weight: float
    pages: list[int]
    groups: list[list[int]]
    modules: list[list[int]]
    scales: list[float]
    affine: list[list[int]]


def plan_tiles(tiles: LoraTiles, tables: AdapterTables) -> list[HostLoraTile]:
    """Copies the table rows of each tile to the host, once per step for all sites."""
    work = tiles.tiles.tolist()
    slots = tiles.tiles[:, 0].long()
    columns = zip(
        work,
        tiles.weights.tolist(),
        tables.page_table[slots].tolist(),
        tables.groups[slots].tolist(),
        tables.modules[slots].tolist(),
        tables.scales[slots].tolist(),
        tables.affine[slots].tolist(),
        strict=True,
    )
    return [HostLoraTile(tile[1], tile[2], *rest) for tile, *rest in columns]


def read_rows(
    pages: Tensor, page_ids: list[int], segment: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Rows [rows, width] of a packed adapter: a view if one page holds them all, otherwise a copy."""
    page_bytes = pages.shape[1]
    row_bytes = -(-width * dtype.itemsize // SEGMENT_BYTES) * SEGMENT_BYTES
    start = segment * SEGMENT_BYTES
    end = start + rows * row_bytes
    pieces = []
    while start < end:
        page, at = divmod(start, page_bytes)
        size = min(page_bytes - at, end - start)
        pieces.append(pages[page_ids[page], at : at + size])
        start += size
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return joined.view(dtype).view(rows, -1)[:, :width]


def write_rows(pages: Tensor, page_ids: list[int], segment: int, rows: Tensor) -> None:
    """Overwrites the rows of a packed adapter that begin at `segment`. See `read_rows`."""
    page_bytes, row_bytes = pages.shape[1], rows.shape[1] * rows.element_size()
    pitch = -(-row_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
    for index, row in enumerate(rows.contiguous().view(torch.uint8)):
        start, done = segment * SEGMENT_BYTES + index * pitch, 0
        while done < row_bytes:
            page, at = divmod(start + done, page_bytes)
            size = min(page_bytes - at, row_bytes - done)
            pages[page_ids[page], at : at + size] = row[done : done + size]
            done += size


def shrink_tiles(x: Tensor, shrunk: Tensor, pages: Tensor, tiles: list[HostLoraTile], site: LoraSite) -> None:
    """shrunk [T, max_group_rank] = x [T, in] times A of each tile's adapter.

    Rows in no tile and columns past a tile's rank are not written, so they must be 0 before.
    """
    for tile in tiles:
        rank, segment = tile.groups[site.group]
        if rank:
            a = read_rows(pages, tile.pages, segment, rank, x.shape[1], x.dtype)
            span = slice(tile.first, tile.first + tile.tokens)
            shrunk[span, :rank] = _multiply(x[span], a)


def expand_tiles(
    out: Tensor, shrunk: Tensor, pages: Tensor, tiles: list[HostLoraTile], site: LoraSite
) -> None:
    """out [T, sum(site.widths)] += weight * scale * shrunk times B, module by module, in place."""
    for tile in tiles:
        span = slice(tile.first, tile.first + tile.tokens)
        start = 0
        for module, width in enumerate(site.widths, site.first_module):
            rank, row, segment = tile.modules[module]
            if rank:
                b = read_rows(pages, tile.pages, segment, rank, width, out.dtype)
                delta = _multiply(shrunk[span, row : row + rank], b.T)
                out[span, start : start + width] += delta * (tile.weight * tile.scales[module])
            start += width


def write_delta(
    kernels: Kernels,
    delta: Tensor,
    shrunk: ShrinkOutput,
    pages: Tensor,
    site: LoraSite,
    step: LoraStep,
) -> None:
    """`Kernels.write_delta` by means of `Kernels.expand`."""
    delta.zero_()
    kernels.expand(delta, shrunk, pages, site, step)


def add_delta(x: Tensor, delta: Tensor | None) -> Tensor:
    """x plus a delta, added in float32 and rounded to the dtype of x. Returns x itself if there is no delta."""
    return x if delta is None else (x.float() + delta).to(x.dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N]: x W^T. The result is float32 on a CPU."""
    if x.device.type != "cpu":
        return x @ weight.T
    return multiply_rows(x.float(), weight.float().contiguous())


def apply_affine(out: Tensor, pages: Tensor, tiles: list[HostLoraTile], site: LoraSite) -> None:
    """See `Kernels.apply_affine`."""
    for tile in tiles:
        span = slice(tile.first, tile.first + tile.tokens)
        start = 0
        for module, width in zip(site.module_ids, site.widths, strict=True):
            is_affine, segment = tile.affine[module][:2]
            if is_affine:
                scales, offsets = read_rows(pages, tile.pages, segment, 2, width, torch.float32)
                columns = out[span, start : start + width]
                columns.copy_(columns.float() * scales + offsets * tile.weight)
            start += width


def shrink_embedding(
    token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
) -> Tensor:
    """The shrink of the input embedding, for all tiles at once. The input is one-hot, so x times A is a column of A.

    Gathers the columns of A at `token_ids` int64 [T]. Returns [T, max_group_rank] of `dtype`.

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
