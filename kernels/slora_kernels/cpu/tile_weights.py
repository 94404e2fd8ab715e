"""Weights that the tiles of a CPU with AMX multiply, in panels as `workers.tile_linear` reads them."""

import threading
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.coded_weight import CodedWeight, unpack_codes
from slora_kernels.cpu.job_fields import NO_TENSOR, FieldWords, begin_job, pack_row, pack_rows
from slora_kernels.cpu.machine_code import (
    CODED_LINEAR,
    FLOAT8_LINEAR,
    INT8_LINEAR,
    LINEAR,
    Worker,
    find_worker,
)
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.worker_sizes import (
    COLUMNS,
    HAS_TILES,
    LANES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    TERMS,
    WIDENED_STEPS,
)

# Elements of x that stay in a core's own cache (2 MiB) beside two panels.
_CACHED_ELEMENTS = 1 << 19
# Reading fewer weights than this takes less time than waking a second thread.
_SERIAL_ELEMENTS = 65536


@cache
def _make_team() -> ThreadTeam:
    return ThreadTeam()


def _cut_panels(weight: Tensor) -> Tensor:
    """[N, K] -> [panels, K / 32, 2, 16 * 32]: the tiles of all panels, in the order of their elements in memory."""
    out_width, width = weight.shape
    num_panels = -(-out_width // PANEL_COLUMNS)
    padded = F.pad(weight, (0, 0, 0, num_panels * PANEL_COLUMNS - out_width))
    tiles = padded.view(num_panels, 2, COLUMNS, width // TERMS, TERMS // 2, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(num_panels, width // TERMS, 2, -1)


class _TileLinear:
    """What all kinds of weights [out, in] share. `in` is a multiple of 32."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._num_panels = -(-shape[0] // PANEL_COLUMNS)
        self._no_bias = torch.zeros(shape[0])

    def _run(
        self,
        worker: Worker,
        x: Tensor,
        panels: Tensor,
        bias: Tensor | None,
        *fields: FieldWords,
        num_blocks: int = 1,
    ) -> Tensor:
        """num_blocks: the blocks of rows that are items of their own."""
        rows = x if x.stride(1) == 1 else x.contiguous()
        out_width, width = self.shape
        out = torch.empty(len(x), out_width, dtype=x.dtype)
        if len(x) == 0:
            return out
        offsets = self._no_bias if bias is None else bias.float()
        job = begin_job(
            num_blocks * self._num_panels,
            *pack_rows(rows),
            *pack_rows(panels),
            *pack_rows(out),
            *pack_row(offsets),
            *(width, 0, 0),
            *(out_width, 0, 0),
            *chain.from_iterable(fields),
        )
        threads = min(torch.get_num_threads(), self._num_panels)
        if out_width * width < _SERIAL_ELEMENTS:
            threads = 1
        _make_team().run(find_worker(worker, "bfloat16"), job.buffer_info()[0], threads)
        return out


class TileWeight(_TileLinear):
    """A weight in panels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__((weight.shape[0], weight.shape[1]))
        self._panels = _cut_panels(weight).flatten(1)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether this CPU has tiles, and the weight can be multiplied with them."""
        return (
            HAS_TILES and weight.dtype == torch.bfloat16 and weight.shape[1] % TERMS == 0 and len(weight) > 0
        )

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        size = max(PANEL_ROWS, _CACHED_ELEMENTS // self.shape[1] // PANEL_ROWS * PANEL_ROWS)
        num_blocks = -(-len(x) // size)
        return self._run(LINEAR, x, self._panels, bias, (size, 0, 0), num_blocks=num_blocks)

    def unpack(self) -> Tensor:
        """Returns the weight [out, in]."""
        out_width, width = self.shape
        tiles = self._panels.view(self._num_panels, width // TERMS, 2, TERMS // 2, COLUMNS, 2)
        return tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, width)[:out_width]


class ByteTileWeight(_TileLinear):
    """A weight of int8 or float8_e4m3fn [out, in] in panels, with a scale for each row, float32 [out]."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__((values.shape[0], values.shape[1]))
        self._panels = _cut_panels(values.view(torch.uint8)).flatten(1)
        self._scales = scales
        self._worker = INT8_LINEAR if values.dtype == torch.int8 else FLOAT8_LINEAR

    @staticmethod
    def suits(values: Tensor, dtype: torch.dtype) -> bool:
        """Whether this CPU has tiles, and can multiply the weight with x of `dtype`."""
        return HAS_TILES and dtype == torch.bfloat16 and values.shape[1] % TERMS == 0 and len(values) > 0

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        panels = _scratch.reserve(PANEL_COLUMNS * max(self.shape[1], 2 * WIDENED_STEPS * TERMS))
        fields = (NO_TENSOR, pack_rows(self._panels), NO_TENSOR, pack_row(self._scales))
        return self._run(self._worker, x, panels, bias, *fields)


class CodedTileWeight(_TileLinear):
    """A `CodedWeight` in panels of codes."""

    def __init__(self, weight: CodedWeight) -> None:
        super().__init__(weight.shape)
        tiles = _cut_panels(unpack_codes(weight.codes)).view(self._num_panels, -1, 4, 2 * LANES)
        self._codes = empty_aligned(self._num_panels, PANEL_COLUMNS * self.shape[1] // 2)
        words = self._codes.view(torch.int16).view(self._num_panels, -1, 2 * LANES)
        torch.sum(
            tiles.short() << torch.tensor([[0], [4], [8], [12]], dtype=torch.int16),
            2,
            dtype=torch.int16,
            out=words,
        )
        self._scales, self._minimums = (self._by_column(part) for part in (weight.scales, weight.minimums))
        self._table = weight.table.repeat(2).bfloat16()
        self._num_groups, self._group_steps = weight.scales.shape[1], weight.group // TERMS
        self._is_half = weight.scales.dtype == torch.float16

    @staticmethod
    def suits(weight: CodedWeight, dtype: torch.dtype) -> bool:
        """Whether this CPU has tiles, and can multiply the weight with x of `dtype`."""
        return (
            HAS_TILES
            and dtype == torch.bfloat16
            and torch.equal(weight.table.bfloat16().float(), weight.table)
        )

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        threads, has_minimums = torch.get_num_threads(), self._minimums.numel() > 0
        # For few rows, there are places for two groups that are multiplied, and for two that are decoded meanwhile.
        panels = _scratch.reserve(PANEL_COLUMNS * max(self.shape[1], 4 * TERMS * self._group_steps))
        sums = torch.empty(threads, len(x) * self._num_groups if has_minimums else 0)
        numbers = (self._group_steps, self._is_half, has_minimums)
        fields = (
            NO_TENSOR,
            pack_rows(self._codes),
            pack_row(self._table),
            pack_rows(self._scales),
            pack_rows(self._minimums),
            pack_rows(sums),
            *((number, 0, 0) for number in numbers),
        )
        return self._run(CODED_LINEAR, x, panels, bias, *fields)

    def _by_column(self, numbers: Tensor) -> Tensor:
        """[N, groups] -> bytes [panels, groups * 32 numbers]. An absent tensor stays absent."""
        if not numbers.numel():
            return torch.empty(self._num_panels, 0, dtype=torch.uint8)
        padded = F.pad(numbers, (0, 0, 0, self._num_panels * PANEL_COLUMNS - len(numbers)))
        columns = padded.view(self._num_panels, PANEL_COLUMNS, -1).transpose(1, 2)
        return columns.reshape(self._num_panels, -1).view(torch.uint8)


def empty_aligned(rows: int, num_bytes: int) -> Tensor:
    """uint8 [rows, num_bytes] that begins at a cache line."""
    memory = torch.empty(rows * num_bytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + rows * num_bytes].view(rows, num_bytes)


class _Scratch(threading.local):
    """The memory of one calling thread, whose products run one after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_elements: int) -> Tensor:
        """Returns bfloat16 [threads, elements], that begins at a cache line."""
        threads = torch.get_num_threads()
        num_bytes = 2 * threads * num_elements
        if self._memory.numel() < num_bytes:
            self._memory = empty_aligned(1, num_bytes).view(-1)
        return self._memory[:num_bytes].view(torch.bfloat16).view(threads, num_elements)


_scratch = _Scratch()
