"""Decode steps as graphs: a step's launches are recorded once for its shape, and replayed for every step like it.

A step of one token a sequence is brought up to a number of rows that was recorded, and copied into buffers that never
move. What fills the rows up belongs to nobody: a context of no token, a KV slot of -1, tiles of no token. Which
adapters a step uses stands in those buffers and in the slots' tables, on the device: another adapter in a slot changes
no argument of any launch, only a greater rank does, by powers of two. So there are graphs with adapters and without,
and none for an adapter.

Steps with chunks of prompts are bound by arithmetic and run as they are. Knows no CUDA but in `capture_cuda`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.device.step_batch import StepBatch
from slora_kernels.batch import AttentionBatch, LoraTiles

__all__ = ["DecodeGraphs", "capture_cuda"]

Work = Callable[[], Tensor]

# Rows that nobody asked for cost little beside the weights, which all rows share.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# The longest context decides how many programs attention launches; beyond a few thousand tokens it is always as many.
_SHORT_CONTEXT = 512
# Ranks and tiles of less than these launch the same programs.
_LEAST_RANK = 16
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step decides its launches: bounds on the longest context, on the total rank of a site and on the tokens
    of a tile. Without adapters the latter two are 0."""

    rows: int
    context: int
    rank: int
    tile_tokens: int


class DecodeGraphs:
    """forward: the model's, of hidden states [B', H]. capture: runs what it is given and returns what runs it again,
    on the same tensors.

    max_rows: sequences of a step; max_context: tokens of the longest, for block tables of that width.
    """

    def __init__(
        self,
        forward: Callable[[StepBatch], Tensor],
        max_rows: int,
        max_context: int,
        block_tokens: int,
        device: torch.device,
        capture: Callable[[Work], Work],
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._row_counts = [*(rows for rows in _ROWS if rows < max_rows), max_rows]
        self._max_context = max_context
        self._buffers = _make_buffers(max_rows, -(-max_context // block_tokens), device)
        self._replays: dict[StepShape, Work] = {}

    def fits(self, batch: StepBatch) -> bool:
        """Whether the step only decodes, and adapts nothing that the graphs leave out."""
        is_small = len(batch.token_ids) <= self._row_counts[-1]
        return is_small and batch.attention.max_query == 1 and not batch.adapts_embedding

    def run(self, batch: StepBatch) -> Tensor:
        """Hidden states [B', H] of the rows in `sample_rows`, of a step that fits; its KV is written."""
        shape = self._shape_of(batch)
        static = _cut(self._buffers, shape)
        _fill(static, batch)
        if shape not in self._replays:
            self._replays[shape] = self._capture(lambda: self._forward(static))
        return self._replays[shape]()[batch.sample_rows]

    def _shape_of(self, batch: StepBatch) -> StepShape:
        count, lora = len(batch.token_ids), batch.lora
        rows = next(rows for rows in self._row_counts if rows >= count)
        is_short = batch.attention.max_context <= _SHORT_CONTEXT
        context = min(_SHORT_CONTEXT, self._max_context) if is_short else self._max_context
        if lora is None:
            return StepShape(rows, context, 0, 0)
        return StepShape(
            rows,
            context,
            _round_up(lora.max_group_rank, _LEAST_RANK),
            _round_up(lora.max_tokens, _LEAST_TILE),
        )


def capture_cuda(device: torch.device) -> Callable[[Work], Work]:
    """A capture whose graphs share their memory: what one left is gone when the next is replayed."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        # Once before: it compiles kernels and sets libraries up, which no graph may hold. What it writes, the first
        # replay writes again.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads pin memory meanwhile, which is no business of this graph.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _round_up(count: int, least: int) -> int:
    """To a power of two."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Buffers:
    """As in `StepBatch` and what it holds, of the most rows. query_starts, rows: 0, 1, 2, ..., whatever the step."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    tiles: Tensor
    weights: Tensor
    query_starts: Tensor
    rows: Tensor


def _make_buffers(rows: int, max_blocks: int, device: torch.device) -> _Buffers:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return _Buffers(
        token_ids=zeros(rows, dtype=torch.int64),
        positions=zeros(rows, dtype=torch.int64),
        kv_slots=zeros(rows, dtype=torch.int64),
        context_lens=zeros(rows, dtype=torch.int32),
        block_tables=zeros(rows, max_blocks, dtype=torch.int32),
        tiles=zeros(rows, 3, dtype=torch.int32),
        weights=zeros(rows, dtype=torch.float32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        rows=torch.arange(rows, device=device),
    )


def _cut(buffers: _Buffers, shape: StepShape) -> StepBatch:
    """The first rows of the buffers as a step: always the same memory."""
    rows = shape.rows
    attention = AttentionBatch(
        query_starts=buffers.query_starts[: rows + 1],
        context_lens=buffers.context_lens[:rows],
        block_tables=buffers.block_tables[:rows],
        positions=buffers.positions[:rows],
        kv_slots=buffers.kv_slots[:rows],
        max_query=1,
        max_context=shape.context,
    )
    tiles = LoraTiles(buffers.tiles[:rows], buffers.weights[:rows], shape.rank, shape.tile_tokens, rows)
    return StepBatch(
        token_ids=buffers.token_ids[:rows],
        attention=attention,
        lora=tiles if shape.rank else None,
        adapts_embedding=False,
        head_lora=None,
        sample_rows=buffers.rows[:rows],
        sampling=[],
        prompts=[],
    )


def _fill(static: StepBatch, batch: StepBatch) -> None:
    """Rows that the step has not keep whatever token, position and pages they had: nobody looks at them."""
    count, source, target = len(batch.token_ids), batch.attention, static.attention
    static.token_ids[:count] = batch.token_ids
    target.positions[:count] = source.positions
    width = min(source.block_tables.shape[1], target.block_tables.shape[1])  # pages beyond hold no token yet
    target.block_tables[:count, :width] = source.block_tables[:, :width]
    target.kv_slots[:count] = source.kv_slots
    target.kv_slots[count:] = -1
    target.context_lens[:count] = source.context_lens
    target.context_lens[count:] = 0
    if static.lora is not None and batch.lora is not None:
        num_tiles = len(batch.lora.tiles)
        static.lora.tiles[:num_tiles] = batch.lora.tiles
        static.lora.tiles[num_tiles:] = 0
        static.lora.weights[:num_tiles] = batch.lora.weights
