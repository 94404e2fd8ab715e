"""Cuts the LoRA work of a step into tiles, which are runs of rows with the same adapter and weight.

The kernels limit the length of a tile.

All tokens of a step pass the embedding and the linears, but only sampling rows pass the output head. So the output head
has tiles of its own. An adapter that does not change the head has no tile among them. This module uses no tensors:
`StepBatch` uploads the tiles.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from slora.scheduler.step_plan import Chunk
from slora_kernels.batch import TileLimits
from slora_kernels.layout import LoraTargets


class Tile(NamedTuple):
    slot: int
    first_row: int
    num_rows: int
    weight: float


class StepTiles(NamedTuple):
    """The tiles of a step, with decode rows first.

    Whether a row is a decode row depends only on its own chunk. Its result is therefore the same in every batch, bit
    for bit.
    """

    tiles: list[Tile]
    num_decodes: int


def cut_token_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> StepTiles:
    """Cuts the step's tokens into tiles. A decode row is the only row of its chunk."""
    if limits.decode_tokens is None:
        return StepTiles(list(_cut([(_adapter(c), c.num_tokens) for c in chunks], limits.tokens)), 0)
    decodes = [(_adapter(c) if c.num_tokens == 1 else None, c.num_tokens) for c in chunks]
    others = [(_adapter(c) if c.num_tokens > 1 else None, c.num_tokens) for c in chunks]
    tiles = list(_cut(decodes, limits.decode_tokens))
    return StepTiles([*tiles, *_cut(others, limits.tokens)], len(tiles))


def cut_head_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> StepTiles:
    """Cuts the sampling rows into tiles, for adapters that change the output head. All of them are decode rows."""
    runs = [
        (_adapter(c) if _targets(c).head else None, len(c.sampled_sequences))
        for c in chunks
        if c.sampled_sequences
    ]
    if limits.decode_tokens is None:
        return StepTiles(list(_cut(runs, limits.tokens)), 0)
    tiles = list(_cut(runs, limits.decode_tokens))
    return StepTiles(tiles, len(tiles))


def cut_rows(adapter: tuple[int, float], num_rows: int, tile_tokens: int) -> list[Tile]:
    """Cuts rows that all have the same slot and weight."""
    return list(_cut([(adapter, num_rows)], tile_tokens))


def max_rows(tiles: Sequence[Tile]) -> int:
    """The number of rows of the longest tile."""
    return max(tile.num_rows for tile in tiles)


def join_targets(chunks: Sequence[Chunk]) -> LoraTargets:
    """The union of the parts of the model that the step's adapters change."""
    targets = [_targets(chunk) for chunk in chunks]
    return LoraTargets(
        max((targets.max_group_rank for targets in targets), default=0),
        embedding=any(targets.embedding for targets in targets),
        head=any(targets.head for targets in targets),
    )


_NO_TARGETS = LoraTargets(0, embedding=False, head=False)


def _targets(chunk: Chunk) -> LoraTargets:
    resident = chunk.sequence.resident
    return resident.targets if resident is not None and chunk.slot is not None else _NO_TARGETS


def _adapter(chunk: Chunk) -> tuple[int, float] | None:
    return None if chunk.slot is None else (chunk.slot, chunk.sequence.request.adapter_weight)


def _cut(runs: Sequence[tuple[tuple[int, float] | None, int]], tile_tokens: int) -> Iterator[Tile]:
    """Cuts runs that are sorted by adapter and weight. Rows of the base model (None) are in no tile."""
    first = 0
    for adapter, members in groupby(runs, lambda run: run[0]):
        end = first + sum(rows for _, rows in members)
        if adapter is not None:
            slot, weight = adapter
            for row in range(first, end, tile_tokens):
                yield Tile(slot, row, min(tile_tokens, end - row), weight)
        first = end
