"""CUDA graphs of steps: a step shape is recorded when it occurs again, and replayed for every later step of that shape.

A step launches hundreds of kernels. The host needs more time to launch them than the GPU needs to run them. On an H200,
a decode step of Llama-3.1-8B with adapters takes 37 ms without graphs and 9 ms with graphs.

Before a replay, a step is padded to a recorded number of tokens and sequences and copied into static buffers. Padding
tokens have a KV slot of -1. Padding sequences and padding LoRA tiles have no tokens. So padding touches no page, and no
other token reads its results.

Recording a step takes longer than launching it, and all streams wait meanwhile. Under a load of prompts, many shapes
occur only once. The first step of a shape is therefore launched without recording it, on the buffers of its graph. It
also compiles kernels and initializes libraries, which can't be recorded.

Adapters do not need graphs of their own. The adapters of a step are named by buffers and slot tables on the device, so
another adapter in a slot changes no launch argument. Three numbers change the launches: the rank, rounded up to a power
of two, the padded number of tiles, and the number of layers of LoRA work. So graphs differ by these numbers, but not by
adapter. The tiles of decode rows are padded to a quarter, a half or all of the rows. A program for a padding tile
ends immediately, but a site has thousands of such programs. With 64 rows and 8 adapters, padding to all rows doubled
the time of expand (H200).

Steps of many tokens are bound by arithmetic and run without graphs. Only `capture_cuda` uses CUDA.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slora.core.engine_config import EngineConfig
from slora.models.step_batch import StepBatch
from slora_kernels.batch import AttentionBatch, LoraTiles

Work = Callable[[], Tensor]

# Padding rows cost little in a decode step, because all rows share the read of the weights.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448)
# Padded tokens and sequences of steps with prefill chunks. With more tokens, the GPU takes longer to run the kernels
# than the host takes to launch them.
_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 1280, 1536)
_SEQUENCES = (16, 64, 256)
# The longest context decides how many programs attention launches. Beyond a few thousand tokens, their number is
# constant.
_SHORT_CONTEXT = 512
# A decode step of N rows is padded to N / 4, N / 2 or N tiles.
_TILE_PARTS = (4, 2, 1)
# A step with prefill chunks is padded to one tile for this many tokens. A tile may have twice as many tokens, but the
# last tile of each chunk is shorter.
_TOKENS_PER_TILE = 16
# Maximum number of graphs. Tenants choose lengths and ranks, and so the shapes. Each graph takes GPU memory, and
# recording it delays the step for all tenants. A graph is never replaced, because a workload with more shapes than
# graphs would then record all the time.
_MAX_GRAPHS = 256
# Maximum number of shapes that are known to have occurred once.
_MAX_SEEN = 4096
# Graphs of steps with composed requests are recorded only while there are fewer graphs than this. Otherwise
# compositions of many ranks could leave no graphs for steps without composed requests.
_MAX_GRAPHS_BEFORE_COMPOSED = 64
# Smaller ranks and tiles need no graphs of their own, because their launches are the same as for these sizes.
_MIN_RANK = 16
_MIN_DECODE_TILE, _MIN_CHUNK_TILE = 16, 32


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The properties of a layer of LoRA work that determine its kernel launches."""

    rank: int  # Upper bound of the total rank at one site.
    tile_tokens: int  # Upper bound of the tokens in a tile.
    # Padded numbers of tiles.
    decode_tiles: int
    other_tiles: int
    num_groups: int  # As in `LoraTiles`, rounded up to a power of two.
    has_affine: bool


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties of a step that determine its kernel launches."""

    # Padded numbers; equal if all sequences decode.
    tokens: int
    sequences: int
    only_decodes: bool
    context: int  # Upper bound of the longest context, in tokens.
    lora: tuple[LayerShape, ...] = ()  # One entry for each layer of LoRA work; empty without adapters.


class StepGraphs:
    """Captures a graph for each step shape on its second use, and replays it afterwards.

    num_delayed: steps so far that were launched kernel by kernel or recorded, although their shape can be replayed.

    forward: the model's forward pass, which returns hidden states [B', H].
    capture: records the work of a function, and returns a function that does this work on the same tensors.
    config: has the maximum numbers of sequences in a step and of layers of LoRA work.
    max_context_len: maximum number of tokens in a sequence. It sets the width of the block tables.
    """

    def __init__(
        self,
        forward: Callable[[StepBatch], Tensor],
        config: EngineConfig,
        max_context_len: int,
        device: torch.device,
        capture: Callable[[Work], Work],
    ) -> None:
        max_rows, num_blocks = config.max_num_seqs, -(-max_context_len // config.block_tokens)
        self._forward = forward
        self._capture = capture
        self._row_counts = [*(rows for rows in _ROWS if rows < max_rows), max_rows]
        self._sequence_counts = [*(count for count in _SEQUENCES if count < max_rows), max_rows]
        self._max_context = max_context_len
        self._buffers = _make_buffers(max_rows, num_blocks, config.max_composed_adapters, device)
        self._seen: set[StepShape] = set()
        self._replays: dict[StepShape, Work] = {}
        self.num_delayed = 0

    def find_shape(self, batch: StepBatch) -> StepShape | None:
        """The shape of a step that can be replayed.

        Returns None if the step has too many tokens, tiles or layers of tiles. Also returns None if an adapter changes
        the embedding or norms, or if logits of prompt tokens are requested, because the graphs compute none of these.
        Once there are too many graphs, also returns None for a new shape.
        """
        shape = self._shape_of(batch)
        if shape is None or shape in self._replays:
            return shape
        most = _MAX_GRAPHS if len(shape.lora) <= 1 else _MAX_GRAPHS_BEFORE_COMPOSED
        return shape if len(self._replays) < most else None

    def _shape_of(self, batch: StepBatch) -> StepShape | None:
        count, num_sequences = len(batch.token_ids), len(batch.attention.context_lens)
        only_decodes = batch.attention.max_query_len == 1
        tokens = _least(self._row_counts if only_decodes else _TOKENS, count)
        sequences = tokens if only_decodes else _least(self._sequence_counts, num_sequences)
        if tokens is None or sequences is None or len(batch.output_rows) > sequences:
            return None
        if len(batch.lora) > len(self._buffers.tiles):
            return None
        if batch.adapts_embedding or batch.adapts_norms or batch.prompts:
            return None
        is_short = batch.attention.max_context_len <= _SHORT_CONTEXT
        context = min(_SHORT_CONTEXT, self._max_context) if is_short else self._max_context
        shape = StepShape(tokens, sequences, only_decodes, context)
        layers = [_shape_layer(tiles, shape) for tiles in batch.lora]
        found = tuple(layer for layer in layers if layer is not None)
        return replace(shape, lora=found) if len(found) == len(layers) else None

    def run(self, batch: StepBatch, shape: StepShape) -> Tensor:
        """Runs a step of this shape: writes its KV and returns hidden states [B', H] of the rows in `output_rows`."""
        static = _cut(self._buffers, shape)
        _fill(static, batch, shape)
        if shape not in self._replays:
            self.num_delayed += 1
            if shape not in self._seen:
                hidden = self._forward(static)
                if len(self._seen) >= _MAX_SEEN:
                    self._seen.clear()
                self._seen.add(shape)
                return hidden[: len(batch.output_rows)]
            self._replays[shape] = self._capture(lambda: self._forward(static))
        return self._replays[shape]()[: len(batch.output_rows)]


def capture_cuda() -> Callable[[Work], Work]:
    """Returns a capture function whose graphs share one memory pool. A replay overwrites earlier results."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads page-lock memory during the capture. With this mode, their calls do not invalidate the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _shape_layer(lora: LoraTiles, step: StepShape) -> LayerShape | None:
    """Returns the padded shape of a layer of LoRA work, or None if the layer has too many tiles."""
    num_others = len(lora.tiles) - lora.num_decodes
    if step.only_decodes:
        parts = [-(-step.sequences // part) for part in _TILE_PARTS]
        decode_tiles = _least(parts, lora.num_decodes) if lora.num_decodes else 0
        other_tiles = _least(parts, num_others) if num_others else 0
    else:
        parts = [-(-step.sequences // part) for part in _TILE_PARTS]
        decode_tiles, other_tiles = (
            _least(parts, lora.num_decodes),
            max(_TILE_PARTS[0], step.tokens // _TOKENS_PER_TILE),
        )
    if decode_tiles is None or other_tiles is None:
        return None
    if lora.num_decodes > decode_tiles or num_others > other_tiles:
        return None
    return LayerShape(
        _round_up(lora.max_group_rank, _MIN_RANK),
        _round_up(lora.max_tokens, _MIN_DECODE_TILE if step.only_decodes else _MIN_CHUNK_TILE),
        decode_tiles,
        other_tiles,
        _round_up(lora.num_groups, 1),
        lora.has_affine,
    )


def _least(sizes: Sequence[int], count: int) -> int | None:
    """Returns the first of the ascending sizes that is at least `count`, or None if there is none."""
    return next((size for size in sizes if size >= count), None)


def _round_up(count: int, least: int) -> int:
    """Rounds up to a power of two, and at least to `least`."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The static inputs of the graphs, as large as the largest step. The fields are those of StepBatch."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    output_rows: Tensor
    # One row for each layer of LoRA work.
    tiles: Tensor
    weights: Tensor


def _make_buffers(rows: int, max_blocks: int, max_layers: int, device: torch.device) -> _Buffers:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    tokens = max(rows, _TOKENS[-1])
    tiles = rows + tokens // _TOKENS_PER_TILE + _TILE_PARTS[0]
    return _Buffers(
        token_ids=zeros(tokens, dtype=torch.int64),
        positions=zeros(tokens, dtype=torch.int64),
        kv_slots=zeros(tokens, dtype=torch.int64),
        query_starts=zeros(rows + 1, dtype=torch.int32),
        context_lens=zeros(rows, dtype=torch.int32),
        block_tables=zeros(rows, max_blocks, dtype=torch.int32),
        output_rows=zeros(rows, dtype=torch.int64),
        tiles=zeros(max_layers, tiles, 3, dtype=torch.int32),
        weights=zeros(max_layers, tiles, dtype=torch.float32),
    )


def _cut(buffers: _Buffers, shape: StepShape) -> StepBatch:
    """Returns a StepBatch of slices of the buffers. Their memory addresses are the same for all steps of this shape."""
    tokens, sequences = shape.tokens, shape.sequences
    attention = AttentionBatch(
        query_starts=buffers.query_starts[: sequences + 1],
        context_lens=buffers.context_lens[:sequences],
        block_tables=buffers.block_tables[:sequences],
        positions=buffers.positions[:tokens],
        kv_slots=buffers.kv_slots[:tokens],
        max_query_len=1 if shape.only_decodes else tokens,
        max_context_len=shape.context,
    )
    layers = []
    for layer, tiles, weights in zip(shape.lora, buffers.tiles, buffers.weights, strict=False):
        count = layer.decode_tiles + layer.other_tiles
        layers.append(
            LoraTiles(
                tiles[:count],
                weights[:count],
                layer.rank,
                layer.tile_tokens,
                layer.decode_tiles,
                layer.num_groups,
                layer.has_affine,
            )
        )
    return StepBatch(
        token_ids=buffers.token_ids[:tokens],
        attention=attention,
        lora=tuple(layers),
        adapts_embedding=False,
        adapts_norms=False,
        head_lora=(),
        output_rows=buffers.output_rows[:sequences],
        sampling_rows=buffers.output_rows[:0],
        sampling=[],
        prompts=[],
        pooled=[],
    )


def _fill(static: StepBatch, batch: StepBatch, shape: StepShape) -> None:
    """Copies a step into the buffers. Padding keeps old token ids, positions and pages, which no result depends on."""
    source, target = batch.attention, static.attention
    count, num_sequences = len(batch.token_ids), len(source.context_lens)
    static.token_ids[:count] = batch.token_ids
    target.positions[:count] = source.positions
    target.kv_slots[:count] = source.kv_slots
    target.kv_slots[count:] = -1
    target.query_starts[: num_sequences + 1] = source.query_starts
    target.query_starts[num_sequences + 1 :] = count
    target.context_lens[:num_sequences] = source.context_lens
    target.context_lens[num_sequences:] = 0
    # Pages beyond this width hold no tokens yet.
    width = min(source.block_tables.shape[1], target.block_tables.shape[1])
    target.block_tables[:num_sequences, :width] = source.block_tables[:, :width]
    static.output_rows[: len(batch.output_rows)] = batch.output_rows
    static.output_rows[len(batch.output_rows) :] = 0
    for layer, source_layer in zip(static.lora, batch.lora, strict=True):
        _fill_tiles(layer, source_layer)


def _fill_tiles(static: LoraTiles, lora: LoraTiles) -> None:
    """Copies the tiles of decode rows to the start of `static`, and all other tiles after the padded decode tiles."""
    static.tiles.zero_()
    parts = ((0, 0, lora.num_decodes), (static.num_decodes, lora.num_decodes, len(lora.tiles)))
    for start, first, end in parts:
        if end > first:
            static.tiles[start : start + end - first] = lora.tiles[first:end]
            static.weights[start : start + end - first] = lora.weights[first:end]
