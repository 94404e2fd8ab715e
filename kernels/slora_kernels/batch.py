"""The arguments that a step passes to the kernels: KV geometry, adapter tables and the batch.

The arguments are tensors and a few host numbers, never requests or adapters. A slot is a row of the adapter
tables. A tile is a run of consecutive tokens that use the same slot. A sequence is a run of consecutive tokens with a
row of page ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import KVBlockLayout, ModelShape, lay_out_kv_block

# More than any model has.
_ALL_GROUPS = 1 << 16


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The layout of K and V of one layer in a page: `[num_sides, num_kv_heads, block_tokens, head_dim]` of
    `element_dtype`.

    In FP8, the scales begin at byte `layout.scales_start`, one for each vector of head_dim elements.

    dtype: the model's dtype.
    latent_width: 0, or the elements of a latent (`LatentShape`). The row of a token is then its key, and its first
    `latent_width` elements are its value: the caller uses no others of an output. If the row is not finite, its last
    element alone is NaN; in FP8, the scale is NaN.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    kv_format: KVFormat = KVFormat.MODEL
    latent_width: int = 0

    @staticmethod
    def of(
        shape: ModelShape, block_tokens: int, dtype: torch.dtype, kv_format: KVFormat = KVFormat.MODEL
    ) -> "KVGeometry":
        """The geometry of a model's pages."""
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = 0 if shape.latent is None else shape.latent.width
        return KVGeometry(shape.num_kv_layers, *heads, block_tokens, dtype, kv_format, width)

    @property
    def num_sides(self) -> int:
        """Keys and values, or 1 if the values are in the keys."""
        return 1 if self.latent_width else 2

    @property
    def value_width(self) -> int:
        """Elements of a token's value in one KV head."""
        return self.latent_width or self.head_dim

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of the K and V elements in a page."""
        return self.dtype if self.kv_format is KVFormat.MODEL else torch.float8_e4m3fn

    @property
    def has_scales(self) -> bool:
        return self.kv_format is not KVFormat.MODEL

    @property
    def layout(self) -> KVBlockLayout:
        sizes = self.num_kv_heads, self.head_dim, self.block_tokens, self.dtype.itemsize
        return lay_out_kv_block(*sizes, self.kv_format, self.num_sides)

    @property
    def layer_elements(self) -> int:
        """Distance between the parts of two consecutive layers in a page, in elements of `element_dtype`."""
        return self.layout.num_bytes // self.element_dtype.itemsize

    @property
    def group_heads(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """Tables that locate the adapter of each slot, one row per slot. A row is written when its adapter is loaded.

    Kernels only read these tables.

    page_table: int32 [num_slots, max_pages], page ids of the adapter's byte string, in order.
    groups: int32 [num_slots, num_sites, 2], (total rank, first segment of A).
    modules: int32 [num_slots, num_modules, 3], (rank, first row in the group's A, first segment of B transposed).
    scales: float32 [num_slots, num_modules].
    affine: int32 [num_slots, num_modules, 4], whose first two columns are (whether the module has scales and offsets
        of its output columns, first segment of the scales). The offsets follow the scales.
    """

    page_table: Tensor
    groups: Tensor
    modules: Tensor
    scales: Tensor
    affine: Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Where the rows lie that an adapter has in place of some rows of the embedding or of the head, or as a head.

    pages: uint8 [num_pages, page_bytes], the pool. page_ids: those of the adapter, in order. first_id, first_row: the
    first segments of the token ids, int32 [count] in ascending order, and of the rows. num_added: how many of the last
    rows lie behind those of the base model.
    """

    pages: Tensor
    page_ids: list[int]
    count: int
    first_id: int
    first_row: int
    num_added: int = 0


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The LoRA work of one step, shared by all layers. Tokens without an adapter are in no tile.

    tiles: int32 [num_tiles, 3], (slot, first token, number of tokens). A token is in at most one tile. A tile may be
    empty. Tiles of decode rows come first, tiles of prefill chunks follow.
    weights: float32 [num_tiles], a factor that multiplies the adapter's scale.
    max_group_rank: greatest total rank of a linear group among the slots in use. This host number decides how many
    columns the shrink output has.
    max_tokens: upper bound of the tokens in a tile. This host number selects the kernels' block sizes.
    num_decodes: number of tiles of decode rows. A decode row is the only token of its sequence in this step, or a row
    that the output head samples from. num_decodes is 0 if the implementation tiles decode rows together with all
    other tokens.
    num_groups: `LoraTargets.num_groups` of the slots in use together. Sites of later groups have no LoRA work.
    has_affine: whether an adapter of the slots in use has scales and offsets of output columns.
    runs: the tiles as (slot, first token, number of tokens) on the host, if an adapter replaces norms, or rows of the
    embedding or of the head; otherwise empty.
    """

    tiles: Tensor
    weights: Tensor
    max_group_rank: int
    max_tokens: int
    num_decodes: int = 0
    num_groups: int = _ALL_GROUPS
    has_affine: bool = False
    runs: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The maximum number of tokens in a LoRA tile.

    tokens: limit of a tile of prefill chunks.
    decode_tokens: limit of a tile of decode rows. None: decode rows are tiled together with all other tokens.
    """

    tokens: int
    decode_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens of all sequences of a step, concatenated. Sequence b owns tokens [query_starts[b], query_starts[b+1]).

    query_starts: int32 [B+1].
    context_lens: int32 [B], number of KV tokens visible to the last token of the sequence's chunk. It includes the
    tokens of this step.
    block_tables: int32 [B, max_blocks], page ids. All entries are valid ids. An entry past the sequence's context, or
    outside the window of every token of the chunk, may name a page of another sequence.
    positions: int64 [T], the token's row in the rotary table. It is the token's position in its sequence, plus an
    offset if the sequence uses the long factors of longrope.
    kv_slots: int64 [T], page_id * block_tokens + offset, where the token's K and V are written. A padding row of a
    captured step has slot -1, so nothing is written, and context length 0. Its outputs are undefined. Only the Triton
    kernels accept padding rows.
    max_query_len: greatest number of query tokens of a sequence.
    max_context_len: greatest context length.

    Example: a sequence of 20 known tokens that computes its last 4 has context 20 and positions 16..19.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    kv_slots: Tensor
    max_query_len: int
    max_context_len: int

    def split(self, chunk: int, block_tokens: int) -> "AttentionBatch":
        """Returns a batch in which a token sees only the tokens of its own chunk.

        A chunk begins at each multiple of `chunk`, which is a multiple of `block_tokens`. The part of a sequence within
        a chunk becomes a sequence. The order of the tokens stays. Reads the batch on the host.
        """
        cuts, contexts, rows, columns = [0], list[int](), list[int](), list[int]()
        starts, device = self.query_starts.tolist(), self.block_tables.device
        for b, context in enumerate(self.context_lens.tolist()):
            position = context - (starts[b + 1] - starts[b])
            while position < context:
                begin = position - position % chunk
                end = min(context, begin + chunk)
                cuts.append(cuts[-1] + end - position)
                contexts.append(end - begin)
                rows.append(b)
                columns.append(begin // block_tokens)
                position = end
        most = self.block_tables.shape[1]
        places = torch.tensor(columns)[:, None] + torch.arange(min(most, chunk // block_tokens))
        tables = self.block_tables[torch.tensor(rows)[:, None], places.clamp(max=most - 1).to(device)]
        return replace(
            self,
            query_starts=torch.tensor(cuts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=tables,
            max_query_len=min(self.max_query_len, chunk),
            max_context_len=min(self.max_context_len, chunk),
        )


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The attention rule of one layer: which tokens are visible, and how scores are computed.

    A score is scale * q k, then the soft cap is applied, then the mask.

    window: a token sees itself and the window - 1 tokens before it. None: it sees all tokens before it.
    softcap: s -> softcap * tanh(s / softcap) (arXiv 2408.00118, section 2). None: scores are not capped.
    sinks: float32 [Hq], contiguous. Each head has one more score, neither scaled nor capped, of a token without a
    value: exp(sink) joins the sum by which the weights are divided (arXiv 2309.17453). None: no sinks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def count_visible(self, context: int) -> int:
        """Number of tokens that the last token of a context sees.

        With window 4, the result is 3 for a context of 3 tokens, and 4 for a context of 9.
        """
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class QueryKeyNorm:
    """RMS norm of each head of q and k, applied before rotary embedding (Qwen3, Gemma 3).

    query, key: weights [D], float32 or the model dtype.
    """

    query: Tensor
    key: Tensor
    eps: float


# The activation of a gated MLP. gelu is exact (uses erf). gelu_tanh is its tanh approximation (arXiv 1606.08415).
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A batch and the `plan` that `prepare_attention` computed for it, once for all layers.

    plan: private to the implementation that created it.
    """

    batch: AttentionBatch
    plan: object


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Tiles, adapter tables, and the `plan` that `prepare_lora` computed from them, once for all sites.

    plan: private to the implementation that created it.
    """

    tiles: LoraTiles
    tables: AdapterTables
    plan: object
