"""The LoRA jobs of one step. The words that all sites share are computed once and copied into each job.

Building a job in Python is slow, because the preceding matmul has evicted Python's data from the CPU caches. A step of
12 layers has 48 such jobs. When all fields were built for each job, and shrink and expand were separate jobs, building
the jobs took 3 ms of a step of 18 ms (two cores, 64 tokens, 32 adapters).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slora_kernels.batch import AdapterTables, LoraTiles
from slora_kernels.cpu.job_fields import (
    JobWords,
    begin_job,
    name_dtype,
    operand_dtype,
    pack_fields,
    pack_pages,
    pack_rows,
)
from slora_kernels.cpu.job_threads import Reserve, count_busy_items
from slora_kernels.cpu.machine_code import LORA_TILES, find_lora_worker
from slora_kernels.cpu.worker_sizes import (
    NUM_SUMS,
    PACKED_PITCH,
    TILE_TOKENS,
    count_lora_scratch,
    pad_rank,
)
from slora_kernels.layout import AFFINE_BYTES, SEGMENT_BYTES, LoraSite

_SHRINK_ROWS = (16, 4)
_EXPAND_COLUMNS = (1024, 256)
# From this many tiles per thread on, each tile is computed by a single thread. Measured on two threads, with the
# longest tile first: 32 tiles of two tokens went from 20.7 to 14.2 ms. 8 tiles of 64 tokens went from 17.2 to 12.9 ms.
_WHOLE_TILES = 2
# Reading the weights of an adapter costs about as much as computing this many tokens.
_READING_TOKENS = 8


def _uses_tiles(dtype: torch.dtype) -> bool:
    """Whether the jobs of a model are computed by `workers.tile_lora` and not by `workers.lora`."""
    return find_lora_worker(name_dtype(dtype)) is LORA_TILES


@dataclass(frozen=True, slots=True)
class DeferredShrink:
    """A shrink that the expand job will compute from x [T, in]. Do not modify x until that job is done."""

    x: Tensor


class LoraPlan:
    """Makes the LoRA jobs of all sites in one step."""

    def __init__(self, tiles: LoraTiles, tables: AdapterTables, reserve: Reserve) -> None:
        self._tables, self._given = tables, tiles
        self._num_tiles, self._rank = tiles.tiles.shape[0], tiles.max_group_rank
        self._is_whole = self._num_tiles >= _WHOLE_TILES * torch.get_num_threads()
        self._tiles, self._weights = tiles.tiles, tiles.weights
        if self._is_whole:
            self._tiles, self._weights = _sort_by_cost(tiles, tables)
        self._enough, self._reserve = count_busy_items(), reserve
        # For each tile, the number of finished blocks of rows of A, over all sites so far.
        self._done = torch.zeros(self._num_tiles, dtype=torch.int64)
        self._num_done = 0
        # The shrink output, [T, rank]. All sites reuse it in turn.
        self._shrunk, self._scratch = torch.empty(0, 0), torch.empty(0)
        self._shrunk_words = pack_rows(self._shrunk)
        self._pages: Tensor | None = None
        self._affine_pages: Tensor | None = None
        self._affine_words = pack_fields()
        self._dtype = torch.float32
        self._words = pack_fields()

    @property
    def num_threads(self) -> int:
        """The number of threads that have scratch, once a job was made. torch may have more by now."""
        return len(self._scratch)

    def refresh(self) -> None:
        """Lets all jobs compute what the tensors of the tiles contain now."""
        if self._is_whole:
            for own, new in zip(
                (self._tiles, self._weights), _sort_by_cost(self._given, self._tables), strict=True
            ):
                own.copy_(new)
        self._done.zero_()

    def make_job(
        self, out: Tensor, shrunk: DeferredShrink | Tensor, pages: Tensor, site: LoraSite
    ) -> tuple[JobWords, int]:
        """Returns the job that adds to `out`, and approximately how many elements the job reads."""
        if pages is not self._pages or out.dtype is not self._dtype:
            self._pack_shared_fields(pages, out.dtype)
        num_tiles, tokens, widest = self._num_tiles, out.shape[0], max(site.widths)
        coarse, fine = _EXPAND_COLUMNS
        columns = coarse if num_tiles * -(-widest // coarse) >= self._enough else fine
        num_blocks, words = _split_site(site, columns, self._dtype.itemsize)
        if isinstance(shrunk, DeferredShrink):
            if tokens != self._shrunk_words[1]:
                self._reserve_shrunk(tokens)
            x, shrunk_words, width = shrunk.x, self._shrunk_words, widest + site.in_width
            num_shrink_items, before = num_tiles * self._blocks, self._num_done
            self._num_done += self._blocks
        else:
            x, shrunk_words, width, num_shrink_items, before = out, pack_rows(shrunk), widest, 0, 0
        job = begin_job(
            num_tiles if self._is_whole else num_shrink_items + num_tiles * num_blocks,
            *pack_rows(x),
            *pack_rows(out),
            *shrunk_words,
            *(num_shrink_items, 0, 0, before, 0, 0),
        )
        job.extend(self._words)
        job.extend(words)
        return job, num_tiles * self._rank * width

    def make_affine_job(self, out: Tensor, pages: Tensor, site: LoraSite) -> JobWords:
        """Returns the job that multiplies columns of `out` by scales and adds offsets. Its items are the tiles."""
        if pages is not self._affine_pages:
            tables, self._affine_pages = self._tables, pages
            self._affine_words = pack_fields(
                pack_pages(pages, AFFINE_BYTES),
                self._tiles,
                tables.page_table,
                self._weights,
                tables.affine.flatten(1),
            )
        _, widths = _split_columns(site.widths, _EXPAND_COLUMNS[0])
        job = begin_job(self._num_tiles, *pack_rows(out), *(site.first_module, 0, 0), *pack_rows(widths))
        job.extend(self._affine_words)
        return job

    def _reserve_shrunk(self, tokens: int) -> None:
        self._shrunk = torch.empty(tokens, self._rank, dtype=operand_dtype(self._dtype))
        self._shrunk_words = pack_rows(self._shrunk)

    def _pack_shared_fields(self, pages: Tensor, dtype: torch.dtype) -> None:
        """Computes the words that all jobs share."""
        self._pages, self._dtype = pages, dtype
        self._reserve_shrunk(0)
        tables, size, rank = self._tables, dtype.itemsize, self._rank
        coarse, rows = _SHRINK_ROWS
        if _uses_tiles(dtype) or self._num_tiles * -(-rank // coarse) >= self._enough:
            rows = coarse
        self._blocks = -(-rank // rows)
        # Scratch of each thread: either sums, or the start of each row (int64) followed by packed rows. With tiles, the
        # sums come first, because they are used together with the others.
        if _uses_tiles(dtype):
            rank = pad_rank(rank)
            num_elements, start = count_lora_scratch(rank), 4 * NUM_SUMS
        else:
            num_elements, start = max(TILE_TOKENS * rows, rank * (2 + PACKED_PITCH)), 0
        self._scratch = self._reserve(num_elements)
        scratch, threads, pitch = pack_rows(self._scratch)
        self._words = pack_fields(
            pack_pages(pages, size),
            self._tiles,
            tables.page_table,
            self._weights,
            tables.groups.flatten(1),
            tables.modules.flatten(1),
            tables.scales,
            self._is_whole,
            self._blocks,
            rows,
            self._done,
            self._scratch,
            (scratch + start + 8 * rank, threads, 4 * pitch // size),
            (scratch + start, threads, pitch // 2),
        )


def _sort_by_cost(tiles: LoraTiles, tables: AdapterTables) -> tuple[Tensor, Tensor]:
    """Sorts tiles and their weights, most expensive first, so that all threads finish at about the same time.

    It uses numpy, because torch's calls take five times as long.
    """
    rows = tiles.tiles.numpy()
    ranks = tables.groups.numpy()[rows[:, 0], :, 0].sum(1)
    order = (-ranks * (rows[:, 2] + _READING_TOKENS)).argsort()
    return torch.from_numpy(rows[order]), torch.from_numpy(tiles.weights.numpy()[order])


# The caches of the next two functions never evict an entry, because jobs hold addresses of the cached tensors.
@cache
def _split_columns(widths: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor]:
    """Cuts the output columns of a site into blocks.

    Returns two tensors. The blocks, int32 [n, 4], are (module's index in the group, first column in out, first column
    in the module, number of columns). The widths are int32 [1, modules].
    """
    blocks, start = [], 0
    for member, width in enumerate(widths):
        blocks += [(member, start + c, c, min(columns, width - c)) for c in range(0, width, columns)]
        start += width
    return torch.tensor(blocks, dtype=torch.int32), torch.tensor([widths], dtype=torch.int32)


@cache
def _split_site(site: LoraSite, columns: int, element_bytes: int) -> tuple[int, JobWords]:
    """Returns the number of column blocks of a site, and the site's words of a job."""
    blocks, widths = _split_columns(site.widths, columns)
    segment = SEGMENT_BYTES // element_bytes
    return len(blocks), pack_fields(site.group, site.in_width, site.first_module, blocks, widths, segment)
