"""A step plan as tensors: flat tokens without padding, block tables, and the LoRA work as tiles.

The batch is built once per step and read by every layer. All arrays are copied to the device together.

A tile is a run of rows with the same adapter and weight. The kernels limit its length. A row is in at most one tile of
a layer: layer 0 has the first adapter of each request, layer 1 the second adapters of composed requests, and so on. The
model adds the layers' outputs in this order.

All tokens of a step pass the embedding and the linears, but only sampling rows pass the output head. So the output head
has tiles of its own. An adapter that does not change the head has no tiles at the head. `StepBatch` uploads the tiles.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora.memory.kv_cache import BlockTable
from slora.memory.residency import Resident
from slora.sampling.prompt_rows import PooledRows, PromptRows, find_pooled_rows, find_prompt_rows
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, StepPlan
from slora_kernels.batch import AttentionBatch, LoraTiles, TileLimits
from slora_kernels.host_copies import upload
from slora_kernels.layout import Int32Array, LoraTargets


class Tile(NamedTuple):
    slot: int
    first_row: int
    num_rows: int
    weight: float


class TileLayer(NamedTuple):
    """The tiles of one layer, with decode rows first.

    Whether a row is a decode row depends only on its own chunk. The result of a row is therefore bit-identical in every
    batch.

    max_group_rank, num_groups: the greatest of the `LoraTargets` of the layer's adapters. has_affine, has_rows:
    whether one of them has `affine`, or `rows` or `norms`.
    """

    tiles: list[Tile]
    num_decodes: int
    max_group_rank: int
    num_groups: int
    has_affine: bool
    has_rows: bool


def cut_token_tiles(chunks: Collection[Chunk], limits: TileLimits) -> list[TileLayer]:
    """Cuts the step's tokens into tiles, layer by layer. A decode row is the only row of its chunk."""
    return [_cut_token_layer(chunks, layer, limits) for layer in range(_count_layers(chunks))]


def cut_head_tiles(chunks: Collection[Chunk], limits: TileLimits) -> list[TileLayer]:
    """Cuts the sampling rows into tiles, layer by layer, for adapters that change the output head.

    All of these rows are decode rows. A layer may have no tiles.
    """
    return [_cut_head_layer(chunks, layer, limits) for layer in range(_count_layers(chunks))]


def cut_rows(adapter: tuple[int, float], num_rows: int, tile_tokens: int) -> list[Tile]:
    """Cuts rows that all have the same slot and weight."""
    return list(_cut([(0, adapter, num_rows)], tile_tokens))


def max_rows(tiles: Collection[Tile]) -> int:
    """The number of rows of the longest tile."""
    return max(tile.num_rows for tile in tiles)


def join_targets(chunks: Collection[Chunk]) -> LoraTargets:
    """The union of the parts of the model that the step's adapters change."""
    residents = {resident for chunk in chunks for resident in chunk.sequence.residents}
    targets = [resident.targets for resident in residents]
    return LoraTargets(
        max((targets.max_group_rank for targets in targets), default=0),
        max((targets.num_groups for targets in targets), default=0),
        embedding=any(targets.embedding for targets in targets),
        norms=any(targets.norms for targets in targets),
        head=any(targets.head for targets in targets),
        kv=any(targets.kv for targets in targets),
        affine=any(targets.affine for targets in targets),
    )


def _cut_token_layer(chunks: Collection[Chunk], layer: int, limits: TileLimits) -> TileLayer:
    greatest = _greatest_targets(chunks, layer)
    decodes: list[_Run] = []
    others: list[_Run] = []
    first = 0
    for chunk in chunks:
        is_decode = chunk.num_tokens == 1 and limits.decode_tokens is not None
        if layer < len(chunk.slots):
            (decodes if is_decode else others).append(_find_run(chunk, layer, first))
        first += chunk.num_tokens
    if limits.decode_tokens is None:
        return TileLayer(list(_cut(others, limits.tokens)), 0, *greatest)
    tiles = list(_cut(decodes, limits.decode_tokens))
    return TileLayer([*tiles, *_cut(others, limits.tokens)], len(tiles), *greatest)


def _cut_head_layer(chunks: Collection[Chunk], layer: int, limits: TileLimits) -> TileLayer:
    runs: list[_Run] = []
    first = 0
    for chunk in chunks:
        num_rows = len(chunk.sampled_sequences)
        if num_rows and layer < len(chunk.slots) and _changes_head(chunk, layer):
            slot, _, weight = chunk.slots[layer]
            runs.append((first, (slot, weight), num_rows))
        first += num_rows
    greatest = _greatest_targets(chunks, layer)
    if limits.decode_tokens is None:
        return TileLayer(list(_cut(runs, limits.tokens)), 0, *greatest)
    tiles = list(_cut(runs, limits.decode_tokens))
    return TileLayer(tiles, len(tiles), *greatest)


# The first of consecutive rows, their slot and weight, and the number of these rows.
_Run = tuple[int, tuple[int, float], int]


def _find_run(chunk: Chunk, layer: int, first: int) -> _Run:
    """The rows of a chunk on which its adapter has an effect. first: the chunk's first row."""
    slot, _, weight = chunk.slots[layer]
    num_before = min(max(0, chunk.sequence.active_from - chunk.start), chunk.num_tokens)
    return first + num_before, (slot, weight), chunk.num_tokens - num_before


def _count_layers(chunks: Collection[Chunk]) -> int:
    return max((len(chunk.slots) for chunk in chunks), default=0)


def _greatest_targets(chunks: Collection[Chunk], layer: int) -> tuple[int, int, bool, bool]:
    """`max_group_rank`, `num_groups`, `affine` and `rows` of the layer's adapters together."""
    residents = {_resident(chunk, layer) for chunk in chunks}
    targets = [resident.targets for resident in residents if resident is not None]
    rank = max((of_adapter.max_group_rank for of_adapter in targets), default=0)
    num_groups = max((of_adapter.num_groups for of_adapter in targets), default=0)
    has_affine, has_rows = (
        any(flags) for flags in ([t.affine for t in targets], [t.rows or t.norms for t in targets])
    )
    return rank, num_groups, has_affine, has_rows


def _changes_head(chunk: Chunk, layer: int) -> bool:
    resident = _resident(chunk, layer)
    return resident is not None and resident.targets.head


def _resident(chunk: Chunk, layer: int) -> Resident | None:
    residents = chunk.sequence.residents
    return residents[layer] if layer < len(residents) else None


def _cut(runs: Iterable[_Run], tile_tokens: int) -> Iterator[Tile]:
    """Cuts runs that are sorted by their first rows. Neighbours with the same slot and weight are cut together."""
    joined: list[_Run] = []
    for first, adapter, num_rows in runs:
        if joined and joined[-1][1] == adapter and joined[-1][0] + joined[-1][2] == first:
            first, _, before = joined.pop()
            num_rows += before
        joined.append((first, adapter, num_rows))
    for first, (slot, weight), num_rows in joined:
        for row in range(first, first + num_rows, tile_tokens):
            yield Tile(slot, row, min(tile_tokens, first + num_rows - row), weight)


IntArray = npt.NDArray[np.integer]
HostArray = IntArray | npt.NDArray[np.float32] | npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step that a recurrent layer computes together: `num_tokens` tokens of each of B sequences.

    rows: int64 [B * num_tokens], indices of the step's rows, sequence by sequence.
    tables: int64 [B, P], the pages of each sequence's state.
    is_new: bool [B], whether the sequence begins with these rows. Its pages then hold no state yet.
    any_new, all_new: whether some or all of `is_new` are True.
    lora: the layers of LoRA work of these rows alone, see `StepBatch.lora`.
    """

    rows: Tensor
    tables: Tensor
    is_new: Tensor
    num_tokens: int
    any_new: bool
    all_new: bool
    lora: tuple[LoraTiles, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one step.

    token_ids: int64 [T]. The value -1 - row stands for the pending token of the sequence in this row of the sampling
    table. `Runner` replaces it before the model reads it.
    output_rows: int64 [B'], indices of the tokens whose hidden states are read, in three groups. The first group has
    one token for each entry of `sampling`, in chunk order. If a prompt forks into n choices, its last token is listed n
    times. The second group has the tokens of `prompts`, whose logprobs were requested. The third group has the tokens
    of `pooled`, which belong to prompts to embed.
    lora: the layers of LoRA work, in the order in which they are added; see `cut_token_tiles`. Empty if no sequence of
    the batch has an adapter. Rows of the base model are in no tile.
    adapts_embedding, adapts_norms: whether an adapter of the batch changes the embedding, or norms.
    head_lora: layers over the rows of `sampling`; empty if no adapter changes the output head.
    sampling_rows: int64, the row of the sampling table for each entry of `sampling`.
    states: the parts that recurrent layers compute, which together are all rows of the step. Empty if the model has no
    such layers.
    """

    token_ids: Tensor
    attention: AttentionBatch
    lora: tuple[LoraTiles, ...]
    adapts_embedding: bool
    adapts_norms: bool
    head_lora: tuple[LoraTiles, ...]
    output_rows: Tensor
    sampling_rows: Tensor
    sampling: list[Sequence]
    prompts: list[PromptRows]
    pooled: list[PooledRows]
    states: tuple[StateRows, ...] = ()

    @staticmethod
    def build(plan: StepPlan, memory: DeviceMemory, limits: TileLimits, long_rows: int = 0) -> "StepBatch":
        """Builds the batch. Raises RuntimeError if a slot no longer holds the adapter that a chunk was planned for.

        long_rows: the row of the rotary table at which the positions of long sequences begin.
        """
        return StepArrays.build(plan, memory, limits, long_rows).upload(memory.device)


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """A layer of LoRA work in host memory. arrays: tiles int32 [num_tiles, 3] and weights float32 [num_tiles]."""

    arrays: tuple[HostArray, HostArray]
    max_group_rank: int
    max_tokens: int
    num_decodes: int
    num_groups: int
    has_affine: bool
    has_rows: bool

    @property
    def slots(self) -> set[int]:
        return set(self.arrays[0][:, 0].tolist())

    def upload(self, device: torch.device) -> LoraTiles:
        return self.join(upload(array, device) for array in self.arrays)

    def join(self, tensors: Iterator[Tensor]) -> LoraTiles:
        """tensors: the arrays on the device, two for each layer."""
        return LoraTiles(
            next(tensors),
            next(tensors),
            self.max_group_rank,
            self.max_tokens,
            self.num_decodes,
            self.num_groups,
            self.has_affine,
            self.arrays[0].tolist() if self.has_rows else (),
        )


@dataclass(frozen=True, slots=True)
class StateArrays:
    """A `StateRows` in host memory. arrays: its rows, tables and is_new."""

    arrays: tuple[IntArray, IntArray, npt.NDArray[np.bool_]]
    num_tokens: int
    lora: tuple[LayerArrays, ...]

    @staticmethod
    def cut(
        chunks: list[Chunk], starts: Int32Array, limits: TileLimits, *, continues_states: bool
    ) -> "tuple[StateArrays, ...]":
        """Cuts a step into its chunks of one token, together, and each other chunk.

        starts: the first row of each chunk. continues_states: False cuts a chunk that does not begin a sequence into
        its tokens, one part for each.
        """
        places = [place for place, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        parts = [places] if places else []
        parts += [[place] for place, chunk in enumerate(chunks) if chunk.num_tokens > 1]
        found = []
        for part in parts:
            chunk, first = chunks[part[0]], starts[part[:1]]
            if continues_states or chunk.num_tokens == 1 or not chunk.start:
                found.append(StateArrays._of([chunks[place] for place in part], starts[part], limits))
                continue
            for offset in range(chunk.num_tokens):
                token = chunk._replace(start=chunk.start + offset, num_tokens=1)
                found.append(StateArrays._of([token], first + offset, limits))
        return tuple(found)

    @staticmethod
    def _of(chunks: list[Chunk], starts: Int32Array, limits: TileLimits) -> "StateArrays":
        num_tokens = chunks[0].num_tokens
        rows = starts[:, None].astype(np.int64) + np.arange(num_tokens)
        tables = np.array([chunk.sequence.blocks.state_pages for chunk in chunks], np.int64)
        is_new = np.array([chunk.start == 0 for chunk in chunks])
        return StateArrays(
            (rows.reshape(-1), tables, is_new), num_tokens, _lay_out(cut_token_tiles(chunks, limits))
        )

    def join(self, tensors: Iterator[Tensor]) -> StateRows:
        """tensors: the arrays on the device: these three, and two for each layer of LoRA work."""
        rows, tables, is_new = (next(tensors) for _ in self.arrays)
        lora = tuple(layer.join(tensors) for layer in self.lora)
        flags = self.arrays[2]
        return StateRows(rows, tables, is_new, self.num_tokens, bool(flags.any()), bool(flags.all()), lora)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What a step takes from its chunks without their positions and pages. Steps that decode the same sequences with
    the same adapters share it.

    key: all that the layout depends on; None if it depends on positions too.
    adapters: (slot, generation) of each adapter.
    counts: int32 [chunks]. starts: int32 [chunks + 1], the first row of each chunk, and the number of rows.
    output_rows: the rows of `sampling`.
    """

    key: tuple[object, ...] | None
    adapters: frozenset[tuple[int, int]]
    counts: Int32Array
    starts: Int32Array
    targets: LoraTargets
    lora: tuple[LayerArrays, ...]
    head_lora: tuple[LayerArrays, ...]
    sampling: list[Sequence]
    sampling_rows: IntArray
    output_rows: IntArray

    @staticmethod
    def of(chunks: list[Chunk], key: tuple[object, ...], limits: TileLimits) -> "RowLayout":
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        targets = join_targets(chunks)
        sampled = [chunk.sampled_sequences for chunk in chunks]
        sampling = [sequence for sequences in sampled for sequence in sequences]
        only_decodes = len(starts) == starts[-1] + 1 and all(
            [chunk.samples and chunk.is_decode_row and not chunk.drafts for chunk in chunks]
        )
        return RowLayout(
            key if only_decodes else None,
            frozenset(
                (slot, generation) for slots in {c.slots for c in chunks} for slot, generation, _ in slots
            ),
            counts,
            starts,
            targets,
            _lay_out(cut_token_tiles(chunks, limits)),
            _lay_out(cut_head_tiles(chunks, limits)) if targets.head else (),
            sampling,
            np.array([sequence.row for sequence in sampling], np.int64),
            np.repeat(starts[1:] - 1, [len(sequences) for sequences in sampled]).astype(np.int64),
        )


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The block tables of a step's chunks.

    entries: int32 [chunks, P], with 0 behind the end of a table. It is never changed.
    stamps: `BlockTable.stamp` of each. num_pages: int32 [chunks].
    """

    entries: Int32Array
    stamps: list[int]
    num_pages: Int32Array

    @staticmethod
    def of(blocks: list[BlockTable], last: "BlockTables | None") -> "BlockTables":
        """last: the tables of the same sequences in the step before. They are copied where they have not changed."""
        stamps = [table.stamp for table in blocks]
        if last is None:
            changed = list(range(len(blocks)))
            num_pages = np.array([table.num_pages for table in blocks], np.int32)
        elif last.stamps == stamps:
            return last
        else:
            changed = [row for row, stamp in enumerate(stamps) if stamp != last.stamps[row]]
            num_pages = last.num_pages.copy()
            num_pages[changed] = [blocks[row].num_pages for row in changed]
        entries = np.zeros((len(blocks), int(num_pages.max())), np.int32)
        if last is not None:
            width = min(last.entries.shape[1], entries.shape[1])
            entries[:, :width] = last.entries[:, :width]
            entries[changed] = 0
        for row in changed:
            pages = blocks[row].pages
            entries[row, : len(pages)] = pages
        return BlockTables(entries, stamps, num_pages)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A `StepBatch` in host memory. The ranks of a group get it without the sequences (`without_sequences`).

    layout, tables: what the next step may use again.
    """

    arrays: list[HostArray]
    max_query_len: int
    max_context_len: int
    lora: tuple[LayerArrays, ...]
    adapts_embedding: bool
    adapts_norms: bool
    head_lora: tuple[LayerArrays, ...]
    has_pending: bool
    sampling: list[Sequence]
    prompts: list[PromptRows]
    pooled: list[PooledRows]
    states: tuple[StateArrays, ...] = ()
    layout: RowLayout | None = None
    tables: BlockTables | None = None

    @staticmethod
    def build(
        plan: StepPlan,
        memory: DeviceMemory,
        limits: TileLimits,
        long_rows: int = 0,
        last: "StepArrays | None" = None,
    ) -> "StepArrays":
        """See `StepBatch.build`. last: the step before. Its arrays are used again as far as they are still right."""
        chunks = _split_drafts(plan.chunks)
        sequences: tuple[Sequence, ...]
        sequences, first_tokens, *columns = zip(*chunks, strict=True)
        key = (sequences, *columns, [sequence.row for sequence in sequences])
        layout, last_tables = (last.layout, last.tables) if last is not None else (None, None)
        if layout is None or layout.key != key:
            layout, last_tables = RowLayout.of(chunks, key, limits), None
        if not memory.holds(layout.adapters):
            missing = [slot for slot, generation in layout.adapters if not memory.holds({(slot, generation)})]
            raise RuntimeError(f"slots {missing} no longer hold the adapters that this step was planned for")
        counts, starts = layout.counts, layout.starts
        first_positions = np.array(first_tokens, np.int64)
        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(first_positions - starts[:-1], counts)
        tables = BlockTables.of([sequence.blocks for sequence in sequences], last_tables)
        block_tables = tables.entries
        contexts = (first_positions + counts).astype(np.int32)
        states: tuple[StateArrays, ...] = ()
        if memory.num_state_pages:
            states = StateArrays.cut(chunks, starts, limits, continues_states=memory.continues_states)
        prompts = find_prompt_rows(chunks, starts) if layout.key is None else []
        pooled = find_pooled_rows(chunks, starts) if layout.key is None else []
        others = [*_tokens(prompts), *_tokens(pooled)]
        token_ids = _token_ids(chunks) if layout.key is None else _last_tokens(sequences, first_tokens)
        arrays: list[HostArray] = [
            token_ids,
            _rotary_rows(chunks, positions, counts, long_rows),
            _kv_slots(positions, counts, block_tables, memory.geometry.block_tokens),
            np.array([*layout.output_rows, *others], np.int64) if others else layout.output_rows,
            starts,
            contexts,
            block_tables,
            layout.sampling_rows,
            *(array for layer in (*layout.lora, *layout.head_lora) for array in layer.arrays),
        ]
        for part in states:
            arrays += [*part.arrays, *(array for layer in part.lora for array in layer.arrays)]
        return StepArrays(
            arrays=arrays,
            max_query_len=int(counts.max()),
            max_context_len=int(contexts.max()),
            lora=layout.lora,
            adapts_embedding=layout.targets.embedding,
            adapts_norms=layout.targets.norms,
            head_lora=layout.head_lora,
            has_pending=bool((token_ids < 0).any()),
            sampling=layout.sampling,
            prompts=prompts,
            pooled=pooled,
            states=states,
            layout=layout,
            tables=tables,
        )

    @property
    def slots(self) -> set[int]:
        """The slots of all adapters of the step."""
        return set[int]().union(*(layer.slots for layer in self.lora))

    def without_sequences(self) -> "StepArrays":
        return replace(self, sampling=[], prompts=[], pooled=[], layout=None, tables=None)

    def upload(self, device: torch.device) -> StepBatch:
        """Copies all arrays to the device together."""
        ids, pos, kv_slots, output_rows, query_starts, context_lens, tables, sampling_rows, *rest = _upload(
            self.arrays, device
        )
        tile_tensors = iter(rest)
        attention = AttentionBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            positions=pos,
            kv_slots=kv_slots,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
        )
        return StepBatch(
            token_ids=ids,
            attention=attention,
            lora=tuple(layer.join(tile_tensors) for layer in self.lora),
            adapts_embedding=self.adapts_embedding,
            adapts_norms=self.adapts_norms,
            head_lora=tuple(layer.join(tile_tensors) for layer in self.head_lora),
            output_rows=output_rows,
            sampling_rows=sampling_rows,
            sampling=self.sampling,
            prompts=self.prompts,
            pooled=self.pooled,
            states=tuple(part.join(tile_tensors) for part in self.states),
        )


def _tokens(found: list[PromptRows] | list[PooledRows]) -> Iterator[int]:
    return (token for rows in found for token in rows.tokens)


def _split_drafts(chunks: list[Chunk]) -> list[Chunk]:
    """Makes each token of a chunk with drafts a decode row, with the block table of its sequence.

    A row attends to the KV of the rows before it, because all rows of a step write their KV before attention reads it.
    So the results of a row are bit-identical to those of a step that decodes its token alone.
    """
    if not any([chunk.drafts for chunk in chunks]):
        return chunks
    return [row for chunk in chunks for row in (chunk.split() if chunk.drafts else [chunk])]


def _token_ids(chunks: list[Chunk]) -> IntArray:
    ids: list[int] = []
    for chunk in chunks:
        sequence, start, num_tokens, _, _, _, drafts = chunk
        if num_tokens == 1 and not drafts:
            known = sequence.token_ids
            ids.append(known[start] if start < len(known) else -1 - sequence.row)
        else:
            ids += chunk.token_ids
    return np.array(ids, np.int64)


def _last_tokens(sequences: Iterable[Sequence], places: Iterable[int]) -> IntArray:
    """The token ids of decode rows."""
    known = [
        (sequence.token_ids, place, sequence.row) for sequence, place in zip(sequences, places, strict=True)
    ]
    return np.array([ids[place] if place < len(ids) else -1 - row for ids, place, row in known], np.int64)


def _rotary_rows(chunks: list[Chunk], positions: IntArray, counts: IntArray, long_rows: int) -> IntArray:
    if not long_rows or not any([chunk.sequence.uses_long_rope for chunk in chunks]):
        return positions
    offsets = np.array([long_rows * chunk.sequence.uses_long_rope for chunk in chunks], np.int64)
    rows: IntArray = positions + np.repeat(offsets, counts)
    return rows


def _kv_slots(positions: IntArray, counts: IntArray, block_tables: IntArray, block_tokens: int) -> IntArray:
    rows = np.repeat(np.arange(len(counts)), counts)
    pages = block_tables[rows, positions // block_tokens].astype(np.int64)
    slots: IntArray = pages * block_tokens + positions % block_tokens
    return slots


def tile_prompt_rows(sequence: Sequence, num_rows: int, tile_tokens: int) -> tuple[LayerArrays, ...]:
    """The layers of LoRA work for prompt rows of one sequence at the output head."""
    layers = []
    for resident, (slot, _, weight) in zip(sequence.residents, sequence.slots, strict=True):
        if resident.targets.head:
            tiles = cut_rows((slot, weight), num_rows, tile_tokens)
            targets = resident.targets
            greatest = targets.max_group_rank, targets.num_groups, targets.affine, targets.rows
            layers.append(TileLayer(tiles, 0, *greatest))
    return _lay_out(layers)


def _lay_out(layers: Iterable[TileLayer]) -> tuple[LayerArrays, ...]:
    """Returns the layers that have tiles, as arrays."""
    return tuple(
        LayerArrays(
            _tile_arrays(layer.tiles),
            layer.max_group_rank,
            max_rows(layer.tiles),
            layer.num_decodes,
            layer.num_groups,
            layer.has_affine,
            layer.has_rows,
        )
        for layer in layers
        if layer.tiles
    )


def _tile_arrays(tiles: list[Tile]) -> tuple[HostArray, HostArray]:
    rows = np.array([tile[:3] for tile in tiles], np.int32)
    return rows, np.array([tile.weight for tile in tiles], np.float32)


def _upload(arrays: list[HostArray], device: torch.device) -> list[Tensor]:
    """Copies the arrays to the device in one transfer, from one page-locked buffer with 8-byte alignment."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets = np.cumsum([0] + [-(-array.nbytes // 8) * 8 for array in arrays])
    staging = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for array, offset in zip(arrays, offsets[:-1], strict=True):
        host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = staging.to(device, non_blocking=True)
    return [
        buffer[offset : offset + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, offset in zip(arrays, offsets[:-1], strict=True)
    ]
