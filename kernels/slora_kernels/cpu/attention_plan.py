"""The attention jobs of one step, and the jobs that write KV. The fields that all layers share are computed once.

Building a job in Python is slow, because the preceding matmul has evicted Python's data from the CPU caches. When all
fields were built for each job, building the 24 jobs of a step took 1.3 ms of 50 ms (12 layers, two cores, 64 tokens).
"""

from functools import cache

import torch
from torch import Tensor

from slora_kernels.batch import AttentionBatch, AttentionRule, KVGeometry, QueryKeyNorm
from slora_kernels.cpu.job_fields import (
    NO_TENSOR,
    JobWords,
    begin_job,
    operand_dtype,
    pack_fields,
    pack_pages,
    pack_row,
    pack_rows,
)
from slora_kernels.cpu.job_threads import Reserve, count_busy_items
from slora_kernels.cpu.worker_sizes import (
    HAS_TILES,
    NO_WINDOW,
    ROWS,
    TILE_ROWS,
    count_float_scratch,
    count_operand_scratch,
    count_starts,
)
from slora_kernels.layout import SCALE_BYTES


def _tile_queries(batch: AttentionBatch, tile_queries: int) -> Tensor:
    """Cuts the queries of a batch into attention tiles, the longest first.

    Returns int32 [n, 4]: sequence, first token, number of tokens, KV tokens before the first.
    """
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    tiles = []
    for b, context in enumerate(contexts):
        tokens = starts[b + 1] - starts[b]
        for at in range(0, tokens, tile_queries):
            tiles.append((b, starts[b] + at, min(tile_queries, tokens - at), context - tokens + at))
    tiles.sort(key=lambda tile: -tile[2] * (tile[3] + tile[2]))
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def _choose_heads_per_item(num_tiles: int, num_heads: int, group: int, max_query_len: int) -> int:
    """Returns the number of KV heads per item.

    If all sequences decode, this is the greatest number that leaves enough items for all threads. More heads per item
    are faster, because consecutive heads are contiguous in a page. If any sequence prefills, the number is 1.
    """
    if max_query_len > 1:
        return 1
    fitting = [
        heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads * group <= TILE_ROWS
    ]
    enough = count_busy_items()
    return max((heads for heads in fitting if num_tiles * num_heads // heads >= enough), default=1)


def _split_query_heads(batch: AttentionBatch, num_heads: int) -> int:
    """Returns into how many parts the query heads of a single KV head are divided, which are items of their own.

    If all sequences decode, this is the least number that leaves an item for each thread, because each part reads all
    keys. A part then also fits the rows of a tile, if there are tiles. If any sequence prefills, the number is 1.
    """
    if batch.max_query_len > 1:
        return 1
    most = ROWS if HAS_TILES else TILE_ROWS
    fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= most]
    num_items = [n * len(batch.context_lens) for n in fitting]
    enough = (n for n, items in zip(fitting, num_items, strict=True) if items >= torch.get_num_threads())
    return min(enough, default=num_heads)


@cache
def _pack_attention_rule(rule: AttentionRule) -> JobWords:
    """Packs a rule into job words. The cache is unbounded, because a model only has a few rules."""
    return pack_fields(rule.scale, NO_WINDOW if rule.window is None else rule.window, rule.softcap or 0.0)


class AttentionPlan:
    """The attention jobs of one batch, over the pages of one pool."""

    def __init__(self, batch: AttentionBatch, reserve: Reserve) -> None:
        self._batch, self._reserve = batch, reserve
        self._pages: Tensor | None = None
        self._geometry: KVGeometry | None = None
        self._layer_elements = self._layer_scales = self._first_scale = self._num_items = 0
        self._tile_length = 1
        self._attend_words = self._rotate_words = pack_fields()
        # The words hold addresses of these tensors, so the plan keeps the tensors alive.
        self._tiles = self._scratch = self._no_sinks = torch.empty(0)
        # The norm weights that the last rotate job points to. The plan does not keep those of the jobs before it.
        self.norms: tuple[Tensor, ...] = ()

    @property
    def num_threads(self) -> int:
        """The number of threads that have scratch, once a job was made. torch may have more by now."""
        return len(self._scratch)

    def refresh(self) -> None:
        """Lets all jobs compute what the batch's tensors contain now. Their sizes are as they were."""
        self._tiles.copy_(_tile_queries(self._batch, self._tile_length))

    def make_rotate_job(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        norms: QueryKeyNorm | None,
    ) -> JobWords:
        """Returns the job that rotates q and k and writes KV. It points to `norms`, which the next job replaces."""
        place = self._find_layer(pages, geometry, layer)
        turns = NO_TENSOR if cos_sin is None else pack_rows(cos_sin)
        job = begin_job(len(qkv), *pack_rows(qkv), *turns, *place)
        if norms is None:
            job.extend((0, 0, 0, *NO_TENSOR, *NO_TENSOR, 0, 0, 0))
        else:
            self.norms = norms.query.float(), norms.key.float()
            job.extend(pack_fields(1, *self.norms, norms.eps))
        job.extend(self._rotate_words)
        return job

    def make_attend_job(
        self, q: Tensor, out: Tensor, pages: Tensor, geometry: KVGeometry, layer: int, rule: AttentionRule
    ) -> tuple[JobWords, int]:
        """Returns the job that fills `out`, and approximately how many elements the job reads."""
        place = self._find_layer(pages, geometry, layer)
        sinks = pack_row(self._no_sinks if rule.sinks is None else rule.sinks)
        job = begin_job(self._num_items, *pack_rows(q), *pack_rows(out), *place, *sinks)
        job.extend(_pack_attention_rule(rule))
        job.extend(self._attend_words)
        return job, len(q) * out.shape[1] * rule.count_visible(self._batch.max_context_len)

    def _find_layer(self, pages: Tensor, geometry: KVGeometry, layer: int) -> tuple[int, ...]:
        """Returns two job fields: where the layer's elements begin in a page, and where its scales begin.

        Also recomputes `_rotate_words`, `_attend_words` and `_num_items` if the pages or the geometry changed, so read
        these attributes only after this call.
        """
        if pages is not self._pages or geometry is not self._geometry:
            self._pack_shared_fields(pages, geometry)
        return layer * self._layer_elements, 0, 0, self._first_scale + layer * self._layer_scales, 0, 0

    def _pack_shared_fields(self, pages: Tensor, geometry: KVGeometry) -> None:
        """Computes the fields that the jobs of all layers share, and the number of items."""
        self._pages, self._geometry = pages, geometry
        batch, size, kv_heads = self._batch, geometry.head_dim, geometry.num_kv_heads
        if geometry.num_sides == 1:
            assert kv_heads == 1, "several KV heads have no values"
            kv_heads = _split_query_heads(batch, geometry.num_heads)
        group = geometry.num_heads // kv_heads
        elements = pack_pages(pages, geometry.element_dtype.itemsize)
        scales = NO_TENSOR
        self._layer_elements = geometry.layer_elements
        if geometry.has_scales:
            scales = pack_pages(pages, SCALE_BYTES)
            self._layer_scales = geometry.layout.num_bytes // SCALE_BYTES
            self._first_scale = geometry.layout.scales_start // SCALE_BYTES
        self._rotate_words = pack_fields(
            elements,
            batch.positions,
            batch.kv_slots,
            geometry.num_heads,
            geometry.num_kv_heads,
            size,
            geometry.block_tokens,
            scales,
            geometry.num_sides,
        )
        # Lower than any score, so that it changes no sum.
        self._no_sinks = torch.full((geometry.num_heads,), -1e30)
        self._tile_length = max(1, TILE_ROWS // group)
        self._tiles = _tile_queries(batch, self._tile_length)
        heads = 1
        if geometry.num_sides > 1:
            heads = _choose_heads_per_item(len(self._tiles), kv_heads, group, batch.max_query_len)
        self._num_items = len(self._tiles) * kv_heads // heads
        # Scratch of each thread: the start of each key of a block (int64), float32 values, values of `operand_dtype`.
        starts, floats = 2 * count_starts(), count_float_scratch(size)
        # Scratch of a thread begins at a cache line.
        self._scratch = self._reserve(-(-(starts + floats + count_operand_scratch(size)) // 16) * 16)
        first, threads, pitch = pack_rows(self._scratch)
        address = first + 4 * starts
        self._attend_words = pack_fields(
            elements,
            self._tiles,
            batch.block_tables,
            (address, threads, pitch),
            (address + 4 * floats, threads, 4 * pitch // operand_dtype(geometry.dtype).itemsize),
            (first, threads, pitch // 2),
            kv_heads,
            group,
            size,
            geometry.block_tokens,
            heads,
            scales,
            geometry.num_sides,
        )
