"""LoRA as matmuls, tile by tile: rows are brought together from the pages, then it is two products a module.

Best for long tiles, where the products dwarf the copies and the calls. Rounds to the model's dtype in between.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.layout import GROUPS, SEGMENT_BYTES, LinearGroup


@dataclass(frozen=True, slots=True)
class TileRanks:
    """One LoRA tile in host numbers; groups[layer][group] and modules[layer][module] as in the tables."""

    first: int
    tokens: int
    weight: float
    pages: list[int]
    groups: list[list[list[int]]]
    modules: list[list[list[int]]]
    scales: list[list[float]]


def plan_tiles(tiles: LoraTiles, tables: AdapterTables) -> list[TileRanks]:
    """Brings what the tables say about each tile to the host, once a step for all layers."""
    work = tiles.tiles.tolist()
    slots = tiles.tiles[:, 0].long()
    columns = zip(
        work,
        tiles.weights.tolist(),
        tables.page_table[slots].tolist(),
        tables.groups[slots].tolist(),
        tables.modules[slots].tolist(),
        tables.scales[slots].tolist(),
        strict=True,
    )
    return [TileRanks(tile[1], tile[2], *rest) for tile, *rest in columns]


def read_rows(
    pages: Tensor, page_ids: list[int], segment: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Rows [rows, width] of a packed adapter: a view where one page holds them, else a copy."""
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


def shrink_tiles(
    x: Tensor, bridge: Tensor, pages: Tensor, tiles: list[TileRanks], layer: int, group: LinearGroup
) -> None:
    """bridge [T, max_group_rank] = x [T, in] times A, in the rows and columns of each tile; others stay."""
    group_idx = GROUPS.index(group)
    for tile in tiles:
        rank, segment = tile.groups[layer][group_idx]
        if rank:
            a = read_rows(pages, tile.pages, segment, rank, x.shape[1], x.dtype)
            span = slice(tile.first, tile.first + tile.tokens)
            bridge[span, :rank] = x[span] @ a.T


def expand_tiles(
    out: Tensor,
    bridge: Tensor,
    pages: Tensor,
    tiles: list[TileRanks],
    layer: int,
    group: LinearGroup,
    widths: tuple[int, ...],
) -> None:
    """out [T, sum(widths)] += weight * scale * bridge times B, module by module, in place."""
    for tile in tiles:
        span = slice(tile.first, tile.first + tile.tokens)
        start = 0
        for module, width in zip(group.modules, widths, strict=True):
            rank, row, segment = tile.modules[layer][module]
            if rank:
                b = read_rows(pages, tile.pages, segment, rank, width, out.dtype)
                y = bridge[span, row : row + rank].to(out.dtype)
                scale = tile.weight * tile.scales[layer][module]
                out[span, start : start + width].addmm_(y, b, alpha=scale)
            start += width
