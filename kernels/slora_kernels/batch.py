"""What a step hands to the kernels: geometry, device tables and the shape of the batch.

Everything is tensors and a few host numbers. The module knows no request and no adapter: a slot is a row of
the tables, a tile is a run of tokens that share a slot, a sequence is a run of tokens with a row of page ids.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import KVBlockLayout, lay_out_kv_block


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """How K and V of one layer lie in a page: `[2, num_kv_heads, block_tokens, head_dim]` of `number_dtype`, and in
    FP8 behind them, from byte `layout.scales_start` on, a scale for each head_dim of them.

    dtype: the model's.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    kv_format: KVFormat = KVFormat.MODEL

    @property
    def number_dtype(self) -> torch.dtype:
        """What K and V are in a page."""
        return self.dtype if self.kv_format is KVFormat.MODEL else torch.float8_e4m3fn

    @property
    def has_scales(self) -> bool:
        return self.kv_format is not KVFormat.MODEL

    @property
    def layout(self) -> KVBlockLayout:
        return lay_out_kv_block(
            self.num_kv_heads, self.head_dim, self.block_tokens, self.dtype.itemsize, self.kv_format
        )

    @property
    def layer_numbers(self) -> int:
        """Numbers, of `number_dtype`, from one layer's share of a page to the next one's."""
        return self.layout.num_bytes // self.number_dtype.itemsize

    @property
    def group_heads(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """Where each slot's adapter lies, one row per slot, written when it is loaded; kernels only read them.

    page_table: int32 [num_slots, max_pages], the pages of the adapter's byte string in order.
    groups: int32 [num_slots, num_sites, 2], (total rank, first segment of A).
    modules: int32 [num_slots, num_modules, 3], (rank, first row in the group's A, first segment of B transposed).
    scales: float32 [num_slots, num_modules].
    """

    page_table: Tensor
    groups: Tensor
    modules: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The LoRA work of one step, shared by all layers. Tokens of the base model are in no tile.

    tiles: int32 [num_tiles, 3], (slot, first token, tokens); a token is in at most one tile, and a tile may be empty.
    Tiles of decode rows come first, those of chunks behind them.
    weights: float32 [num_tiles], a factor on top of the adapter's scale.
    max_group_rank: greatest total rank of a linear group among the slots used; a host number, sizes the
    bridge.
    max_tokens: at least the tokens of the longest tile; a host number, chooses the kernels' sizes.
    num_decodes: tiles of decode rows, each the only token of its sequence in this step (or a row that the output head
    samples from); 0 also where an implementation has them tiled with all other tokens.
    """

    tiles: Tensor
    weights: Tensor
    max_group_rank: int
    max_tokens: int
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The most tokens of a LoRA tile, and of one of decode rows; None for these: they are tiled with all others."""

    tokens: int
    decode_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Flat tokens of all sequences of a step: sequence b owns tokens [query_starts[b], query_starts[b+1]).

    query_starts: int32 [B+1].
    context_lens: int32 [B], KV tokens visible to the last token of the sequence's chunk, this step's
    included.
    block_tables: int32 [B, max_blocks] page ids; entries past a sequence's context, and those wholly behind the
    window of every token of its chunk, are valid ids whose pages are anybody's.
    positions: int64 [T], position of each token in its sequence, or the row of the rotary table that stands for it.
    kv_slots: int64 [T], page_id * block_tokens + offset: where the token's K and V go. Rows that only fill up a
    captured step (Triton's kernels alone take these) have slot -1, nowhere, and context 0; their results mean nothing.
    max_query: greatest number of query tokens of a sequence; max_context: greatest context length.

    Example: a sequence of 20 known tokens that computes its last 4 has context 20 and positions 16..19.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    kv_slots: Tensor
    max_query: int
    max_context: int


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a token attends to in one layer, and how scores are formed: scale * q k, capped, then masked.

    window: a token sees itself and the window - 1 tokens before it; None: all before it.
    softcap: s -> softcap * tanh(s / softcap) (arXiv 2408.00118, section 2); None: scores stay as they are.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def count_visible(self, context: int) -> int:
        """Tokens of a context that its last token sees. A window of 4 over 3 tokens: 3; over 9: 4."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class QueryKeyNorm:
    """RMS norm of each head of q and of k before they are rotated (Qwen3, Gemma 3).

    query, key: [D], float32 or the model dtype.
    """

    query: Tensor
    key: Tensor
    eps: float


# What a gated MLP does to its gate: gelu is exact (by erf), gelu_tanh its approximation (arXiv 1606.08415).
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A batch, with whatever an implementation worked out about it once for all layers (`prepare_attention`).

    plan: private to the implementation that made it.
    """

    batch: AttentionBatch
    plan: object


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Tiles and the tables that they point into, with an implementation's `plan` for all sites (`prepare_lora`)."""

    tiles: LoraTiles
    tables: AdapterTables
    plan: object
