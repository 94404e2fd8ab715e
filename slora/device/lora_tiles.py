"""The LoRA work of a step as tiles: runs of rows that share an adapter and its weight, cut to what kernels take.

The embedding and all linears see every token of the step, the output head only the rows that sample; whoever adapts
neither embedding nor head costs nothing there. Knows no tensor: `StepBatch` uploads the tiles.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from slora.scheduler.step_plan import Chunk
from slora_kernels.batch import TileLimits
from slora_kernels.layout import LoraReach


class Tile(NamedTuple):
    slot: int
    first_row: int
    num_rows: int
    weight: float


class StepTiles(NamedTuple):
    """Tiles of decode rows first. What a row is says its own chunk, not who is beside it: its bits follow from that."""

    tiles: list[Tile]
    num_decodes: int


def cut_token_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> StepTiles:
    """Over the step's tokens. A decode row is the only one of its chunk."""
    if limits.decode_tokens is None:
        return StepTiles(list(_cut([(_adapter(c), c.num_tokens) for c in chunks], limits.tokens)), 0)
    decodes = [(_adapter(c) if c.num_tokens == 1 else None, c.num_tokens) for c in chunks]
    others = [(_adapter(c) if c.num_tokens > 1 else None, c.num_tokens) for c in chunks]
    tiles = list(_cut(decodes, limits.decode_tokens))
    return StepTiles([*tiles, *_cut(others, limits.tokens)], len(tiles))


def cut_head_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> StepTiles:
    """Over the rows that sample, of those adapters that reach the head: decode rows, all of them."""
    runs = [(_adapter(c) if _reach(c).head else None, len(c.draws)) for c in chunks if c.draws]
    if limits.decode_tokens is None:
        return StepTiles(list(_cut(runs, limits.tokens)), 0)
    tiles = list(_cut(runs, limits.decode_tokens))
    return StepTiles(tiles, len(tiles))


def cut_rows(adapter: tuple[int, float], num_rows: int, tile_tokens: int) -> list[Tile]:
    """Over rows that all belong to one slot and weight."""
    return list(_cut([(adapter, num_rows)], tile_tokens))


def max_rows(tiles: Sequence[Tile]) -> int:
    """Of the longest tile."""
    return max(tile.num_rows for tile in tiles)


def join_reaches(chunks: Sequence[Chunk]) -> LoraReach:
    """What the adapters of the step reach, all together."""
    reaches = [_reach(chunk) for chunk in chunks]
    return LoraReach(
        max((reach.max_group_rank for reach in reaches), default=0),
        embedding=any(reach.embedding for reach in reaches),
        head=any(reach.head for reach in reaches),
    )


_NOWHERE = LoraReach(0, embedding=False, head=False)


def _reach(chunk: Chunk) -> LoraReach:
    resident = chunk.sequence.resident
    return resident.reach if resident is not None and chunk.slot is not None else _NOWHERE


def _adapter(chunk: Chunk) -> tuple[int, float] | None:
    return None if chunk.slot is None else (chunk.slot, chunk.sequence.request.adapter_weight)


def _cut(runs: Sequence[tuple[tuple[int, float] | None, int]], tile_tokens: int) -> Iterator[Tile]:
    """Runs come ordered by adapter and weight; rows of the base, None, are in no tile."""
    first = 0
    for adapter, members in groupby(runs, lambda run: run[0]):
        end = first + sum(rows for _, rows in members)
        if adapter is not None:
            slot, weight = adapter
            for row in range(first, end, tile_tokens):
                yield Tile(slot, row, min(tile_tokens, end - row), weight)
        first = end
