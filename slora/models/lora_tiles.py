"""Cuts the LoRA work of a step into tiles, which are runs of rows with the same adapter and weight.

The kernels limit the length of a tile. A row is in at most one tile of a layer: layer 0 has the first adapter of each
request, layer 1 the second adapters of composed requests, and so on. The model adds the layers' outputs in this order.

All tokens of a step pass the embedding and the linears, but only sampling rows pass the output head. So the output head
has tiles of its own. An adapter that does not change the head has no tiles at the head. This module uses no tensors:
`StepBatch` uploads the tiles.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from slora.memory.residency import Resident
from slora.scheduler.step_plan import Chunk
from slora_kernels.batch import TileLimits
from slora_kernels.layout import LoraTargets


class Tile(NamedTuple):
    slot: int
    first_row: int
    num_rows: int
    weight: float


class TileLayer(NamedTuple):
    """The tiles of one layer, with decode rows first.

    Whether a row is a decode row depends only on its own chunk. The result of a row is therefore bit-identical in every
    batch.

    max_group_rank: the greatest `LoraTargets.max_group_rank` of the layer's adapters.
    """

    tiles: list[Tile]
    num_decodes: int
    max_group_rank: int


def cut_token_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> list[TileLayer]:
    """Cuts the step's tokens into tiles, layer by layer. A decode row is the only row of its chunk."""
    return [_cut_token_layer(chunks, layer, limits) for layer in range(_count_layers(chunks))]


def cut_head_tiles(chunks: Sequence[Chunk], limits: TileLimits) -> list[TileLayer]:
    """Cuts the sampling rows into tiles, layer by layer, for adapters that change the output head.

    All of these rows are decode rows. A layer may have no tiles.
    """
    return [_cut_head_layer(chunks, layer, limits) for layer in range(_count_layers(chunks))]


def cut_rows(adapter: tuple[int, float], num_rows: int, tile_tokens: int) -> list[Tile]:
    """Cuts rows that all have the same slot and weight."""
    return list(_cut([(adapter, num_rows)], tile_tokens))


def max_rows(tiles: Sequence[Tile]) -> int:
    """The number of rows of the longest tile."""
    return max(tile.num_rows for tile in tiles)


def join_targets(chunks: Sequence[Chunk]) -> LoraTargets:
    """The union of the parts of the model that the step's adapters change."""
    targets = [resident.targets for chunk in chunks for resident in chunk.sequence.residents]
    return LoraTargets(
        max((targets.max_group_rank for targets in targets), default=0),
        embedding=any(targets.embedding for targets in targets),
        head=any(targets.head for targets in targets),
        kv=any(targets.kv for targets in targets),
    )


def _cut_token_layer(chunks: Sequence[Chunk], layer: int, limits: TileLimits) -> TileLayer:
    rank = _max_group_rank(chunks, layer)
    if limits.decode_tokens is None:
        runs = [(_adapter(c, layer), c.num_tokens) for c in chunks]
        return TileLayer(list(_cut(runs, limits.tokens)), 0, rank)
    decodes = [(_adapter(c, layer) if c.num_tokens == 1 else None, c.num_tokens) for c in chunks]
    others = [(_adapter(c, layer) if c.num_tokens > 1 else None, c.num_tokens) for c in chunks]
    tiles = list(_cut(decodes, limits.decode_tokens))
    return TileLayer([*tiles, *_cut(others, limits.tokens)], len(tiles), rank)


def _cut_head_layer(chunks: Sequence[Chunk], layer: int, limits: TileLimits) -> TileLayer:
    runs = [
        (_adapter(c, layer) if _changes_head(c, layer) else None, len(c.sampled_sequences))
        for c in chunks
        if c.sampled_sequences
    ]
    rank = _max_group_rank(chunks, layer)
    if limits.decode_tokens is None:
        return TileLayer(list(_cut(runs, limits.tokens)), 0, rank)
    tiles = list(_cut(runs, limits.decode_tokens))
    return TileLayer(tiles, len(tiles), rank)


def _count_layers(chunks: Sequence[Chunk]) -> int:
    return max((len(chunk.slots) for chunk in chunks), default=0)


def _max_group_rank(chunks: Sequence[Chunk], layer: int) -> int:
    residents = (_resident(chunk, layer) for chunk in chunks)
    return max((one.targets.max_group_rank for one in residents if one is not None), default=0)


def _changes_head(chunk: Chunk, layer: int) -> bool:
    resident = _resident(chunk, layer)
    return resident is not None and resident.targets.head


def _resident(chunk: Chunk, layer: int) -> Resident | None:
    residents = chunk.sequence.residents
    return residents[layer] if layer < len(residents) else None


def _adapter(chunk: Chunk, layer: int) -> tuple[int, float] | None:
    if layer >= len(chunk.slots):
        return None
    slot, _, weight = chunk.slots[layer]
    return slot, weight


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
