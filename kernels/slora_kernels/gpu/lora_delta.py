"""Expand inside the kernel that reads a linear's output: what such a kernel needs to know, bound to its arguments.

The rotation of q and k, the gated activation and the norm that adds to the residual each read the output of a linear.
In a step of decode rows they also compute the adapters' part of it, with `multiply_b`. No launch of its own expands,
and no delta passes through memory. These kernels work row by row, so they look up the adapter of a row in a table,
which is written once per step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import LoraDelta, LoraTiles
from slora_kernels.gpu.lora_shrink import make_counters
from slora_kernels.launch import Launch
from slora_kernels.layout import SEGMENT_BYTES

ARGUMENTS = (
    "shrunk",
    "adapter_pages",
    "row_slots",
    "row_weights",
    "page_table",
    "modules",
    "scales",
    "first_module",
    "adapter_page_stride",
    "table_stride",
    "shrunk_stride",
)


@triton.jit(do_not_specialize=["num_tiles"])
def _lora_row_table_kernel(tiles, weights, row_slots, row_weights, num_tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = tl.load(tiles + lanes * 3 + 1, mask=lanes < num_tiles, other=0)
    size = tl.load(tiles + lanes * 3 + 2, mask=lanes < num_tiles, other=0)
    tile = tl.max(tl.where((first <= row) & (row < first + size), lanes, -1), 0)
    found = tile >= 0
    slot = tl.load(tiles + tile * 3, mask=found, other=-1)
    is_first = tl.load(tiles + tile * 3 + 1, mask=found, other=row) == row
    tl.store(row_slots + row * 2, slot)
    tl.store(
        row_slots + row * 2 + 1, tl.where(is_first, tl.load(tiles + tile * 3 + 2, mask=found, other=1), 0)
    )
    tl.store(row_weights + row, tl.load(weights + tile, mask=found, other=0.0))


@dataclass(frozen=True, slots=True)
class RowTable:
    """The adapter of each row of a step of decode rows.

    slots: int32 [T, 2]. First the slot of the row's adapter, or -1. Then the number of rows in its tile if the row is
    the tile's first, 0 if it is another row of the tile, and 1 if it is in no tile.
    weights: float32 [T], the weight of the row's tile, or 0.
    """

    slots: Tensor
    weights: Tensor


def bind_row_table(tiles: LoraTiles, num_rows: int) -> tuple[Launch, RowTable]:
    device = tiles.tiles.device
    table = RowTable(
        torch.empty(num_rows, 2, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )
    num_tiles = tiles.tiles.shape[0]
    return Launch(
        _lora_row_table_kernel,
        (num_rows,),
        {
            "tiles": tiles.tiles,
            "weights": tiles.weights,
            "row_slots": table.slots,
            "row_weights": table.weights,
            "num_tiles": num_tiles,
        },
        {"BLOCK": triton.next_power_of_2(num_tiles)},
        num_warps=1,
    ), table


@dataclass(slots=True)
class LoraPlan:
    """What all sites of a step share. counters: see `make_counters`."""

    counters: Tensor
    _table: RowTable | None = field(default=None)

    @staticmethod
    def make(tiles: LoraTiles) -> "LoraPlan":
        return LoraPlan(make_counters(tiles))

    def find_rows(self, tiles: LoraTiles, num_rows: int, run: Callable[[Launch], None]) -> RowTable:
        """The row table of the step, which the first call writes."""
        if self._table is None:
            launch, self._table = bind_row_table(tiles, num_rows)
            run(launch)
        return self._table


@dataclass(frozen=True, slots=True)
class RowDelta:
    """A `LoraDelta` and the row table of its step."""

    delta: LoraDelta
    table: RowTable


def bind_delta(
    rows: RowDelta | None, dtype: torch.dtype, block_rank: int
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the arguments and constants of a kernel that computes the delta. All are None if there is none.

    block_rank: rows of B that are in flight at a time.
    """
    if rows is None:
        constants = ("NUM_MODULES", "SEGMENT", "PAGE_SEGMENTS", "TWO_PAGES", "BLOCK_R")
        return dict.fromkeys(ARGUMENTS), dict.fromkeys(constants)
    delta, table = rows.delta, rows.table
    tables, pages = delta.step.tables, delta.pages.view(dtype)
    segment, page_segments = SEGMENT_BYTES // dtype.itemsize, delta.pages.shape[1] // SEGMENT_BYTES
    values = (
        delta.shrunk,
        pages,
        table.slots,
        table.weights,
        tables.page_table,
        tables.modules,
        tables.scales,
        delta.site.first_module,
        pages.stride(0),
        tables.page_table.stride(0),
        delta.shrunk.stride(0),
    )
    row_segments = triton.cdiv(max(delta.site.widths), segment)
    return dict(zip(ARGUMENTS, values, strict=True)), {
        "NUM_MODULES": tables.modules.shape[1],
        "SEGMENT": segment,
        "PAGE_SEGMENTS": page_segments,
        "TWO_PAGES": block_rank * row_segments <= page_segments,
        "BLOCK_R": block_rank,
    }
