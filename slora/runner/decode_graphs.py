"""CUDA graphs of decode steps: each step shape is recorded once and replayed for every step of that shape.

Before a replay, a decode step is padded to a recorded number of rows and copied into static buffers. Padding rows have
a context length of 0 and a KV slot of -1, and padding LoRA tiles have no tokens, so they touch no page.

Adapters do not need graphs of their own. The buffers and the slot tables, both on the device, name the adapters of a
step, so another adapter in a slot changes no launch argument. Only the rank, rounded up to a power of two, and the
number of tiles, rounded up to a quarter, a half or all of the rows, change the launches. A program for a padding tile
ends at once, but a site has thousands of them: with 64 rows and 8 adapters, padding to all rows doubled the time of
expand (H200).

Steps with prefill chunks are bound by arithmetic and run without graphs. Only `capture_cuda` uses CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.device.step_batch import StepBatch
from slora_kernels.batch import AttentionBatch, LoraTiles

__all__ = ["DecodeGraphs", "capture_cuda"]

Work = Callable[[], Tensor]

# Padding rows cost little, because all rows share the read of the weights.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# The longest context decides how many programs attention launches. Beyond a few thousand tokens, their number is
# constant.
_SHORT_CONTEXT = 512
# The parts of the rows that the number of tiles is rounded up to: 1/4, 1/2, 1.
_TILE_PARTS = (4, 2, 1)
# Ranks and tiles below these sizes launch the same programs as these sizes.
_MIN_RANK = 16
_MIN_TILE = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties of a step that decide its launches.

    rows: padded number of sequences. context: upper bound of the longest context, in tokens.
    rank: upper bound of the total rank at one site; 0 without adapters.
    tile_tokens: upper bound of the tokens in a tile; 0 without adapters.
    num_tiles: padded number of tiles; 0 without adapters.
    """

    rows: int
    context: int
    rank: int
    tile_tokens: int
    num_tiles: int


class DecodeGraphs:
    """Captures a graph for each step shape on first use, and replays it afterwards.

    forward: the model's forward pass, which returns hidden states [B', H].
    capture: runs a function once, and returns a function that replays its work on the same tensors.
    max_rows: the most sequences of a step.
    max_context_len: the most tokens of one sequence. It sets the width of the block tables.
    """

    def __init__(
        self,
        forward: Callable[[StepBatch], Tensor],
        max_rows: int,
        max_context_len: int,
        block_tokens: int,
        device: torch.device,
        capture: Callable[[Work], Work],
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._row_counts = [*(rows for rows in _ROWS if rows < max_rows), max_rows]
        self._max_context = max_context_len
        self._buffers = _make_buffers(max_rows, -(-max_context_len // block_tokens), device)
        self._replays: dict[StepShape, Work] = {}

    def fits(self, batch: StepBatch) -> bool:
        """True if the step only decodes and none of its adapters changes the embedding. The graphs do not contain that
        change.
        """
        is_small = len(batch.token_ids) <= self._row_counts[-1]
        return is_small and batch.attention.max_query_len == 1 and not batch.adapts_embedding

    def run(self, batch: StepBatch) -> Tensor:
        """Runs a step that fits: writes its KV and returns hidden states [B', H] of the rows in `sample_rows`."""
        shape = self._shape_of(batch)
        static = _cut(self._buffers, shape)
        _fill(static, batch)
        if shape not in self._replays:
            self._replays[shape] = self._capture(lambda: self._forward(static))
        return self._replays[shape]()[batch.sample_rows]

    def _shape_of(self, batch: StepBatch) -> StepShape:
        count, lora = len(batch.token_ids), batch.lora
        rows = next(rows for rows in self._row_counts if rows >= count)
        is_short = batch.attention.max_context_len <= _SHORT_CONTEXT
        context = min(_SHORT_CONTEXT, self._max_context) if is_short else self._max_context
        if lora is None:
            return StepShape(rows, context, 0, 0, 0)
        padded = (-(-rows // part) for part in _TILE_PARTS)
        return StepShape(
            rows,
            context,
            _round_up(lora.max_group_rank, _MIN_RANK),
            _round_up(lora.max_tokens, _MIN_TILE),
            next(tiles for tiles in padded if tiles >= len(lora.tiles)),
        )


def capture_cuda(device: torch.device) -> Callable[[Work], Work]:
    """Returns a capture function whose graphs share one memory pool. A replay overwrites earlier results."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        # The warm-up run compiles kernels and initializes libraries, which can't be captured. The first replay
        # overwrites what the warm-up wrote.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads page-lock memory during the capture. With this mode, their calls do not invalidate the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _round_up(count: int, least: int) -> int:
    """Rounds up to a power of two, and at least to `least`."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The static inputs of the graphs, with as many rows as the largest step. The fields are those of StepBatch.

    query_starts, rows: always 0, 1, 2, ...
    """

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
    """The first rows of the buffers as a StepBatch. The memory addresses are the same for every step of this shape."""
    rows = shape.rows
    attention = AttentionBatch(
        query_starts=buffers.query_starts[: rows + 1],
        context_lens=buffers.context_lens[:rows],
        block_tables=buffers.block_tables[:rows],
        positions=buffers.positions[:rows],
        kv_slots=buffers.kv_slots[:rows],
        max_query_len=1,
        max_context_len=shape.context,
    )
    count = shape.num_tiles
    tiles = LoraTiles(buffers.tiles[:count], buffers.weights[:count], shape.rank, shape.tile_tokens, count)
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
    """Copies a step into the buffers. Padding rows keep old token ids, positions and pages, which no kernel reads."""
    count, source, target = len(batch.token_ids), batch.attention, static.attention
    static.token_ids[:count] = batch.token_ids
    target.positions[:count] = source.positions
    # Pages beyond this width hold no tokens yet.
    width = min(source.block_tables.shape[1], target.block_tables.shape[1])
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
