"""A step plan as tensors: flat tokens without padding, block tables, and the LoRA work as tiles.

It is built once per step and read by every layer. All arrays are copied to the device together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.device.device_memory import DeviceMemory
from slora.device.lora_tiles import (
    StepTiles,
    Tile,
    cut_head_tiles,
    cut_rows,
    cut_token_tiles,
    join_targets,
    max_rows,
)
from slora.sampling.prompt_logprobs import PromptRows, find_prompt_rows
from slora.sampling.prompt_pooling import PooledRows, find_pooled_rows
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, StepPlan
from slora_kernels.batch import AttentionBatch, LoraTiles, TileLimits

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one step.

    token_ids: int64 [T].
    output_rows: int64 [B'], indices into the T tokens whose hidden states are read. First one per entry of `sampling`,
    in chunk order: if a prompt forks into n choices, its last token is listed n times. Then those of `prompts`: the
    prompt tokens whose logprobs were requested. Then those of `pooled`: the tokens of prompts to embed.
    lora: None if no sequence of the batch has an adapter. Rows of the base model are in no tile.
    adapts_embedding: whether an adapter of the batch changes the embedding.
    head_lora: tiles over the rows of `sampling`; None if no adapter changes the output head.
    """

    token_ids: Tensor
    attention: AttentionBatch
    lora: LoraTiles | None
    adapts_embedding: bool
    head_lora: LoraTiles | None
    output_rows: Tensor
    sampling: list[Sequence]
    prompts: list[PromptRows]
    pooled: list[PooledRows]

    @staticmethod
    def build(plan: StepPlan, memory: DeviceMemory, limits: TileLimits, long_rows: int = 0) -> "StepBatch":
        """Builds the batch. Raises RuntimeError if a slot no longer holds the adapter that a chunk was planned for.

        long_rows: the row of the rotary table at which the positions of long sequences begin.
        """
        chunks = plan.chunks
        for chunk in chunks:
            if chunk.slot is not None and not memory.holds(chunk.slot, chunk.generation or 0):
                raise RuntimeError(
                    f"slot {chunk.slot} no longer holds the adapter that this step was planned for"
                )
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        first_positions = np.array([chunk.start for chunk in chunks], np.int64)
        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(first_positions - starts[:-1], counts)
        block_tables = _block_tables(chunks)
        contexts = (first_positions + counts).astype(np.int32)
        targets = join_targets(chunks)
        tiles = cut_token_tiles(chunks, limits)
        head_tiles = cut_head_tiles(chunks, limits) if targets.head else StepTiles([], 0)
        sampled = [chunk.sampled_sequences for chunk in chunks]
        last_rows = np.repeat(starts[1:] - 1, [len(sequences) for sequences in sampled])
        prompts = find_prompt_rows(chunks, starts)
        pooled = find_pooled_rows(chunks, starts)
        others = [*_tokens(prompts), *_tokens(pooled)]
        arrays: list[IntArray | npt.NDArray[np.float32]] = [
            _token_ids(chunks, int(starts[-1])),
            _rotary_rows(chunks, positions, counts, long_rows),
            _kv_slots(positions, counts, block_tables, memory.geometry.block_tokens),
            np.array([*last_rows, *others], np.int64) if others else last_rows.astype(np.int64),
            starts,
            contexts,
            block_tables,
            *_tile_arrays(tiles.tiles),
            *_tile_arrays(head_tiles.tiles),
        ]
        ids, pos, kv_slots, output_rows, query_starts, context_lens, tables, *rest = _upload(
            arrays, memory.device
        )
        tile_tensors = iter(rest)
        attention = AttentionBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            positions=pos,
            kv_slots=kv_slots,
            max_query_len=int(counts.max()),
            max_context_len=int(contexts.max()),
        )
        return StepBatch(
            token_ids=ids,
            attention=attention,
            lora=_join_tiles(tiles, tile_tensors, targets.max_group_rank),
            adapts_embedding=targets.embedding,
            head_lora=_join_tiles(head_tiles, tile_tensors, targets.max_group_rank),
            output_rows=output_rows,
            sampling=[sequence for sequences in sampled for sequence in sequences],
            prompts=prompts,
            pooled=pooled,
        )


def _tokens(found: list[PromptRows] | list[PooledRows]) -> Iterator[int]:
    return (token for rows in found for token in rows.tokens)


def _token_ids(chunks: list[Chunk], num_tokens: int) -> IntArray:
    ids = np.empty(num_tokens, np.int64)
    end = 0
    for chunk in chunks:
        first, end = end, end + chunk.num_tokens
        if chunk.num_tokens == 1:
            ids[first] = chunk.sequence.token_ids[chunk.start]
        else:
            ids[first:end] = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return ids


def _rotary_rows(chunks: list[Chunk], positions: IntArray, counts: IntArray, long_rows: int) -> IntArray:
    if not any(chunk.sequence.uses_long_rope for chunk in chunks):
        return positions
    offsets = np.array([long_rows * chunk.sequence.uses_long_rope for chunk in chunks], np.int64)
    rows: IntArray = positions + np.repeat(offsets, counts)
    return rows


def _block_tables(chunks: list[Chunk]) -> IntArray:
    tables = np.zeros((len(chunks), max(chunk.sequence.blocks.num_pages for chunk in chunks)), np.int32)
    for row, chunk in enumerate(chunks):
        pages = chunk.sequence.blocks.pages
        tables[row, : len(pages)] = pages
    return tables


def _kv_slots(positions: IntArray, counts: IntArray, block_tables: IntArray, block_tokens: int) -> IntArray:
    rows = np.repeat(np.arange(len(counts)), counts)
    pages = block_tables[rows, positions // block_tokens].astype(np.int64)
    slots: IntArray = pages * block_tokens + positions % block_tokens
    return slots


def tile_prompt_rows(
    sequence: Sequence, num_rows: int, tile_tokens: int, device: torch.device
) -> LoraTiles | None:
    """Tiles for prompt rows of one sequence at the output head. None if its adapter does not change the head."""
    resident = sequence.resident
    if resident is None or not resident.targets.head:
        return None
    tiles = cut_rows((resident.slot, sequence.request.adapter_weight), num_rows, tile_tokens)
    rows, weights = (torch.from_numpy(array).to(device) for array in _tile_arrays(tiles))
    return LoraTiles(rows, weights, resident.targets.max_group_rank, max_rows(tiles))


def _join_tiles(cut: StepTiles, tensors: Iterator[Tensor], max_group_rank: int) -> LoraTiles | None:
    """Builds LoraTiles from `cut`. tensors: the device copies of the tile arrays; the next two belong to `cut`."""
    if not cut.tiles:
        return None
    return LoraTiles(next(tensors), next(tensors), max_group_rank, max_rows(cut.tiles), cut.num_decodes)


def _tile_arrays(tiles: list[Tile]) -> list[IntArray | npt.NDArray[np.float32]]:
    """The arrays of `LoraTiles`: int32 [num_tiles, 3] and float32 [num_tiles]. Empty list if there are no tiles."""
    if not tiles:
        return []
    rows = np.array([tile[:3] for tile in tiles], np.int32)
    return [rows, np.array([tile.weight for tile in tiles], np.float32)]


def _upload(arrays: list[IntArray | npt.NDArray[np.float32]], device: torch.device) -> list[Tensor]:
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
