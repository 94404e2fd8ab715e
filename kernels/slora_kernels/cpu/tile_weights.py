"""Weights for our own products, in panels as `workers.tile_linear` and `workers.pair_linear` read them.

The CPU multiplies them with the tiles of AMX. bfloat16 also is multiplied in pairs, with AVX-512 BF16.
"""

import mmap
import threading
from array import array
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.coded_weight import CodedWeight, unpack_codes
from slora_kernels.cpu.job_fields import (
    LEAST_SHARED_ROWS,
    NO_TENSOR,
    JobWords,
    begin_job,
    name_dtype,
    pack_row,
    pack_rows,
    share_rows,
)
from slora_kernels.cpu.machine_code import (
    CODED_LINEAR,
    FLOAT8_LINEAR,
    INT8_LINEAR,
    Worker,
    find_linear_worker,
    find_worker,
)
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.worker_sizes import (
    BLOCK_ROWS,
    COLUMNS,
    FEW_ROWS,
    FIELD_WORDS,
    HAS_TILES,
    LANES,
    NUM_ITEMS,
    NUM_WORDS,
    PANEL_COLUMNS,
    PANEL_ROWS,
    TERMS,
    WIDENED_STEPS,
)

# Elements of x that stay in a core's own cache (2 MiB) beside two panels.
_CACHED_ELEMENTS = 1 << 19
# Items of fewer rows are multiplied where they are. Rows of 5632 are 64 an item, and copying them did not pay.
_LEAST_TILED_ROWS = 128
# Reading fewer weights than this takes less time than waking a second thread.
_SERIAL_ELEMENTS = 65536
# A thread reads panels of about this many bytes one after the other, and there are at least four such items for each.
_ITEM_BYTES, _ITEMS_EACH = 1 << 17, 4
_LINE_BYTES, _HUGE_PAGE_BYTES, _SLAB_BYTES = 64, 2 << 20, 64 << 20
_NUM_CODES = 16
# A float32 has so many significant bits. x is rounded to integers of `_LEAST_BITS` to `_MOST_BITS` and a sign.
_FLOAT_BITS, _LEAST_BITS, _MOST_BITS = 24, 13, 14
# Up to so many rows of all threads together, each thread rounds the rows of x for itself. Reading what another core has
# written takes longer: 64 rows of int4, 11264 x 2048, took 1.15 times as long.
_OWN_ROWS = 256
# The first words of these fields of a job, see `workers.tile_linear`.
_X, _PANELS, _OUT, _BIAS = (NUM_WORDS + FIELD_WORDS * field for field in range(4))
_ITEM_SIZE, _TILED_ROWS, _GROUP_SUMS = (NUM_WORDS + FIELD_WORDS * field for field in (6, 7, 11))
_NUM_ROUNDED, _ROUNDED = (NUM_WORDS + FIELD_WORDS * field for field in range(17, 19))


@cache
def _make_team() -> ThreadTeam:
    return ThreadTeam()


class _Slabs:
    """Memory in huge pages for panels, which have the size of a few small pages.

    With pages of 4 KiB, one thread read codes at 8.2 GB/s instead of 10 to 12.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Returns uint8 [num_bytes] that begins at a cache line. A slab is freed after all that was taken of it.

        The bytes of the cache line behind it can be read.
        """
        size = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if self._left.numel() < size:
                self._left = _map_huge_pages(max(size, _SLAB_BYTES))
            taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


def _map_huge_pages(num_bytes: int) -> Tensor:
    """Returns uint8 [num_bytes or more]. Linux takes memory for it as it is written."""
    size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    # The first page that is aligned begins before the last 4 KiB of what is added, which stay free behind the end.
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The kernel may have no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    start = -tensor.data_ptr() % _HUGE_PAGE_BYTES
    return tensor[start : start + size]


_slabs = _Slabs()


def _cut_panels(weight: Tensor, pair: int = 2) -> Tensor:
    """Views [N, K] as [panels, K / 32, 2, 16, 16, 2]: the tiles of all panels, in the order of panels in memory.

    pair: the size of the last axis: 1 if each number of `weight` stands for two.
    """
    out_width, width = weight.shape
    num_panels = -(-out_width // PANEL_COLUMNS)
    missing = num_panels * PANEL_COLUMNS - out_width
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    tiles = padded.view(num_panels, 2, COLUMNS, width * 2 // (pair * TERMS), TERMS // 2, pair)
    return tiles.permute(0, 3, 1, 4, 2, 5)


# The dtype of two numbers, by the bytes of one. Copying pairs takes a fifth of the time of copying single numbers.
_PAIRS = {1: torch.int16, 2: torch.int32}


def _store_panels(weight: Tensor) -> Tensor:
    """[N, K] -> [panels, K * 32]."""
    tiles = _cut_panels(weight.contiguous().view(_PAIRS[weight.element_size()]), 1)
    panels = _slabs.take(tiles.numel() * tiles.element_size())
    panels.view(tiles.dtype).view(tiles.shape).copy_(tiles)
    return panels.view(weight.dtype).view(len(tiles), -1)


class _TileLinear:
    """What all kinds of weights [out, in] share. `in` is a multiple of 32.

    Most words of a job are the same for all products. They are packed once, because Python has to make four jobs for
    each layer of a model, and a product with one row of a small model takes no longer than packing all words.
    """

    def __init__(self, shape: tuple[int, int], worker: Worker, *words: int) -> None:
        """words: those of the fields behind OUT_WIDTH."""
        self.shape = shape
        self._num_panels = -(-shape[0] // PANEL_COLUMNS)
        self._address = find_worker(worker, "bfloat16")
        self._no_bias = torch.zeros(shape[0])
        self._is_small = shape[0] * shape[1] < _SERIAL_ELEMENTS
        self._words = begin_job(
            0,
            *(*NO_TENSOR, *NO_TENSOR, 0, 0, shape[0]),
            *pack_row(self._no_bias),
            *(shape[1], 0, 0, shape[0], 0, 0),
            *words,
        )

    def _run(self, x: Tensor, job: JobWords, bias: Tensor | None, *operands: Tensor) -> Tensor:
        """job: a copy of `_words`, with the number of its items. operands: further tensors that it points to."""
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self.shape[0], dtype=x.dtype)
        if num_rows == 0:
            return out
        rows = x if x.stride(1) == 1 else x.contiguous()
        job[_X], job[_X + 1], job[_X + 2] = rows.data_ptr(), num_rows, rows.stride(0)
        job[_OUT], job[_OUT + 1] = out.data_ptr(), num_rows
        offsets = self._no_bias if bias is None else bias.float().contiguous()
        job[_BIAS] = offsets.data_ptr()
        threads = 1 if self._is_small else min(torch.get_num_threads(), job[NUM_ITEMS])
        _make_team().run(self._address, job, threads, rows, out, offsets, _scratch.memory, *operands)
        return out


class _NarrowTileLinear(_TileLinear):
    """What weights of 8 and 4 bits share. An item of a job is some panels."""

    def __init__(self, shape: tuple[int, int], bits: int, worker: Worker, *words: int) -> None:
        """words: those of the fields behind ITEM_SIZE."""
        super().__init__(shape, worker, 0, 0, 0, *words)
        self._largest_item = max(1, _ITEM_BYTES // (PANEL_COLUMNS * shape[1] * bits // 8))
        # The number of threads, and the size and the number of the items for it. They are one value, because callers
        # on two threads may have other numbers of threads.
        self._items = 0, 0, 0

    def _copy_words(self, scratch_elements: int, num_sums: int = 0) -> JobWords:
        """A job with its items and the field PANELS. Behind the scratch of all threads is memory for sums of each."""
        threads = torch.get_num_threads()
        for_threads, size, num_items = self._items
        if threads != for_threads:
            size = min(max(1, self._num_panels // (_ITEMS_EACH * threads)), self._largest_item)
            num_items = -(-self._num_panels // size)
            self._items = threads, size, num_items
        job = self._words[:]
        job[NUM_ITEMS], job[_ITEM_SIZE] = num_items, size
        job[_PANELS] = _scratch.reserve(2 * threads * (scratch_elements + 2 * num_sums))
        job[_PANELS + 1], job[_PANELS + 2] = threads, scratch_elements
        return job


class TileWeight(_TileLinear):
    """A weight in panels."""

    def __init__(self, weight: Tensor) -> None:
        self._panels = _store_panels(weight)
        width = weight.shape[1]
        self._item_rows = max(BLOCK_ROWS, _CACHED_ELEMENTS // width // BLOCK_ROWS * BLOCK_ROWS)
        worker = find_linear_worker("bfloat16")
        assert worker is not None
        # The last field is TILED_ROWS. It has no rows if the rows of x are multiplied where they are.
        super().__init__((len(weight), width), worker, self._item_rows, 0, 0, 0, 0, 0)
        self._words[_PANELS : _PANELS + FIELD_WORDS] = array("q", pack_rows(self._panels))

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether this CPU has a worker for the weight."""
        has_worker = find_linear_worker(name_dtype(weight.dtype)) is not None
        return has_worker and weight.shape[1] % TERMS == 0 and len(weight) > 0

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        job, num_rows, item_rows = self._words[:], x.shape[0], self._item_rows
        threads = torch.get_num_threads()
        if num_rows >= LEAST_SHARED_ROWS * threads:
            share = -(-num_rows // (threads * BLOCK_ROWS)) * BLOCK_ROWS
            item_rows = job[_ITEM_SIZE] = min(item_rows, share)
            share_rows(job, num_rows, threads)
        job[NUM_ITEMS] = -(-num_rows // item_rows) * self._num_panels
        if num_rows > PANEL_ROWS and item_rows >= _LEAST_TILED_ROWS:
            most = -(-min(num_rows, item_rows) // BLOCK_ROWS) * BLOCK_ROWS
            job[_TILED_ROWS] = _scratch.reserve(2 * threads * most * self.shape[1])
            job[_TILED_ROWS + 1], job[_TILED_ROWS + 2] = threads, most * self.shape[1]
        return self._run(x, job, bias)

    def unpack(self) -> Tensor:
        """Returns the weight [out, in]."""
        out_width, width = self.shape
        tiles = self._panels.view(self._num_panels, width // TERMS, 2, TERMS // 2, COLUMNS, 2)
        return tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, width)[:out_width]


class ByteTileWeight(_NarrowTileLinear):
    """A weight of int8 or float8_e4m3fn [out, in] in panels, with a scale for each row, float32 [out]."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self._panels, self._scales = _store_panels(values.view(torch.uint8)), scales
        worker = INT8_LINEAR if values.dtype == torch.int8 else FLOAT8_LINEAR
        words = *pack_rows(self._panels), *NO_TENSOR, *pack_row(scales)
        super().__init__((len(values), values.shape[1]), 8, worker, *words)

    @staticmethod
    def suits(values: Tensor, dtype: torch.dtype) -> bool:
        """Whether this CPU has tiles, and can multiply the weight with x of `dtype`."""
        return HAS_TILES and dtype == torch.bfloat16 and values.shape[1] % TERMS == 0 and len(values) > 0

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        job = self._copy_words(PANEL_COLUMNS * max(self.shape[1], 2 * WIDENED_STEPS * TERMS))
        return self._run(x, job, bias)


def _split_table(table: Tensor) -> Tensor:
    """Numbers of bfloat16 [parts, 16] whose sums are those of a table, or differ from them by at most 2^-17 of each.

    A row of x has been rounded to bfloat16 by up to 2^-8 of each number. A third part would make the sums exact, and
    one row took 1.45 times as long.
    """
    high = table.bfloat16()
    parts = [high] if torch.equal(high.float(), table) else [high, (table - high.float()).bfloat16()]
    return torch.stack(parts)


def _count_exact_bits(weight: CodedWeight) -> int:
    """The most bits of the integers that x is rounded to, so that the sums of a group are exact in float32.

    0: x is not rounded, because the codes do not stand for consecutive integers of at most 4 bits, or because the
    groups are so long that the integers would have few bits.
    """
    lowest = weight.numbers[0]
    if lowest not in range(1 - _NUM_CODES, 1) or weight.numbers != tuple(
        lowest + k for k in range(_NUM_CODES)
    ):
        return 0
    num_bits = ((1 << _FLOAT_BITS) // (weight.group * (_NUM_CODES - 1))).bit_length() - 1
    return min(num_bits, _MOST_BITS) if num_bits >= _LEAST_BITS else 0


class CodedTileWeight(_NarrowTileLinear):
    """A `CodedWeight` in panels of codes."""

    def __init__(self, weight: CodedWeight) -> None:
        tiles = _cut_panels(unpack_codes(weight.codes))
        num_panels, num_bytes = len(tiles), PANEL_COLUMNS * weight.shape[1] // 2
        tiles = tiles.reshape(num_panels, -1, 4, 2 * LANES)
        self._codes = _slabs.take(num_panels * num_bytes).view(num_panels, num_bytes)
        words = self._codes.view(torch.int16).view(num_panels, -1, 2 * LANES)
        torch.sum(
            tiles.short() << torch.tensor([[0], [4], [8], [12]], dtype=torch.int16),
            2,
            dtype=torch.int16,
            out=words,
        )
        self._scales, self._minimums = (
            _by_column(part, num_panels) for part in (weight.scales, weight.minimums)
        )
        self._table = _split_table(weight.table).repeat(1, 2)
        self._num_groups, group_steps = weight.scales.shape[1], weight.group // TERMS
        self._has_minimums, self._num_bits = weight.minimums.numel() > 0, _count_exact_bits(weight)
        # For few rows, there are places for a group that is multiplied, and for the next one, decoded meanwhile.
        terms = max(weight.shape[1], 2 * TERMS * group_steps)
        self._num_decoded = PANEL_COLUMNS * terms * len(self._table)
        super().__init__(
            weight.shape,
            4,
            CODED_LINEAR,
            *pack_rows(self._codes),
            *pack_rows(self._table),
            *pack_rows(self._scales),
            *pack_rows(self._minimums),
            *NO_TENSOR,
            *(group_steps, 0, 0, weight.scales.dtype == torch.float16, 0, 0, self._has_minimums, 0, 0),
            *(self._num_bits, 0, 0, int(weight.numbers[0]) if self._num_bits else 0, 0, 0),
            *(0, 0, 0, *NO_TENSOR),
        )

    @staticmethod
    def suits(weight: CodedWeight, dtype: torch.dtype) -> bool:
        """Whether this CPU has tiles, and can multiply the weight with x of `dtype`."""
        return HAS_TILES and dtype == torch.bfloat16

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        num_rows, rounded = x.shape[0], self._no_bias
        num_sums = num_rows * self._num_groups if self._has_minimums else 0
        if self._num_bits and num_rows <= FEW_ROWS:
            num_sums = 3 * num_rows * self._num_groups
        job = self._copy_words(self._num_decoded, num_sums)
        if self._num_bits and num_rows > FEW_ROWS:
            is_shared = num_rows * job[_PANELS + 1] > _OWN_ROWS
            rounded = torch.empty(
                num_rows if is_shared else num_rows * job[_PANELS + 1], x.shape[1], dtype=x.dtype
            )
            job[_ROUNDED : _ROUNDED + FIELD_WORDS] = array("q", pack_rows(rounded))
            if is_shared:
                job[_NUM_ROUNDED] = num_rows
                job[NUM_ITEMS] += num_rows
        threads = job[_PANELS + 1]
        job[_GROUP_SUMS] = job[_PANELS] + 2 * threads * self._num_decoded
        job[_GROUP_SUMS + 1], job[_GROUP_SUMS + 2] = threads, num_sums
        return self._run(x, job, bias, rounded)


def _by_column(numbers: Tensor, num_panels: int) -> Tensor:
    """[N, groups] -> bytes [panels, groups * 32 numbers]. An absent tensor stays absent."""
    if not numbers.numel():
        return torch.empty(num_panels, 0, dtype=torch.uint8)
    padded = F.pad(numbers, (0, 0, 0, num_panels * PANEL_COLUMNS - len(numbers)))
    columns = padded.view(num_panels, PANEL_COLUMNS, -1).transpose(1, 2)
    stored = _slabs.take(columns.numel() * columns.element_size()).view(columns.dtype)
    stored.view(columns.shape).copy_(columns)
    return stored.view(torch.uint8).view(num_panels, -1)


class _Scratch(threading.local):
    """The memory of one calling thread, whose products run one after the other."""

    def __init__(self) -> None:
        self._num_bytes = self._address = 0
        self.memory = torch.empty(0)

    def reserve(self, num_bytes: int) -> int:
        """Returns the address of memory that begins at a cache line."""
        if self._num_bytes < num_bytes:
            self.memory = _map_huge_pages(num_bytes)
            self._address, self._num_bytes = self.memory.data_ptr(), self.memory.numel()
        return self._address


_scratch = _Scratch()
