"""Products with the base model's weights on a CPU with AMX, for bfloat16.

oneDNN adds the products of a row in an order that depends on the number of rows, so `row_blocks` may call it with few
rows only. Here every row takes the same steps, whatever their number: one tile product for each 32 terms, in order.

A panel has 32 output columns, as pairs of tiles [16 pairs of terms, 16 columns, 2] for each 32 terms. An item of a job
is one panel; a thread multiplies all rows with it, 32 rows at a time.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from slora_kernels.cpu.intrinsics import (
    Array,
    Int,
    Job,
    compile_worker,
    count_items,
    intrinsic,
    read_float_matrix,
    read_int,
    read_model_matrix,
    take_item,
)
from slora_kernels.cpu.job_fields import NO_TENSOR, begin_job, pack_row, pack_rows
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.tile_attention import (
    Tiles,
    call_instruction,
    configure_tiles,
    describe_tiles,
    release_tiles,
)
from slora_kernels.cpu.vectors import F32, HAS_TILES, I32, I64, IN_ORDER, VECTOR, Memory, mask_below

# A tile has 16 rows of 32 terms, and the second factor 16 columns.
_ROWS, _TERMS, _COLUMNS = 16, 32, 16
PANEL_COLUMNS = 2 * _COLUMNS
_BLOCK_ROWS = 2 * _ROWS
_TILE_BYTES = 1024
# Tiles: the sums of two tiles of rows times two of columns, then the rows, then the columns.
_SUMS, _FIRST, _SECOND = ((0, 1), (2, 3)), (4, 5), (6, 7)
_I8 = ir.IntType(8)
_BYTES = _I8.as_pointer()
# Reading fewer weights than this takes less time than waking a second thread.
_SERIAL_ELEMENTS = 65536


def _emit_multiply(*, has_bias: bool) -> Any:
    @intrinsic
    def multiply(
        typing: Any, out: Array, x: Array, panel: Array, bias: Array, width: Int, column: Int, end: Int
    ) -> Any:
        """out [T, column to end - 1] = x [T, width] times a panel, plus a bias. There are at most 32 such columns."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tiles = Tiles(builder)
            results = Memory(context, builder, out, args[0])
            _, out_pitch = cgutils.unpack_tuple(
                builder, context.make_array(out)(context, builder, args[0]).shape
            )
            offsets = Memory(context, builder, bias, args[3], I64(0))
            rows = context.make_array(x)(context, builder, args[1])
            num_rows, _ = cgutils.unpack_tuple(builder, rows.shape)
            pitch, _ = cgutils.unpack_tuple(builder, rows.strides)
            first_row = builder.ptrtoint(rows.data, I64)
            first_weight = builder.ptrtoint(context.make_array(panel)(context, builder, args[2]).data, I64)
            scratch = cgutils.alloca_once(builder, ir.ArrayType(F32, _BLOCK_ROWS * PANEL_COLUMNS))
            scratch.align = 64
            sums = builder.ptrtoint(scratch, I64)
            config = cgutils.alloca_once_value(builder, cgutils.make_bytearray(describe_tiles()))
            config.align = 64
            config_bytes = builder.bitcast(config, _BYTES)
            columns_left = builder.sub(args[6], args[5])
            # The panel before may have ended with fewer rows.
            call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], config_bytes)

            def set_rows(tile: int, count: Any) -> None:
                builder.store(builder.trunc(count, _I8), builder.gep(config_bytes, [I32(48 + tile)]))

            def compute(start: Any, num_tiles: int) -> None:
                for pair in _SUMS[:num_tiles]:
                    for tile in pair:
                        tiles.clear(tile)
                own_rows = builder.add(first_row, builder.mul(start, pitch))
                with cgutils.for_range(builder, builder.udiv(args[4], I64(_TERMS))) as loop:
                    weights = builder.add(first_weight, builder.mul(loop.index, I64(2 * _TILE_BYTES)))
                    terms = builder.add(own_rows, builder.mul(loop.index, I64(2 * _TERMS)))
                    for k, tile in enumerate(_SECOND):
                        tiles.load(tile, builder.add(weights, I64(k * _TILE_BYTES)), I64(64))
                    for k in range(num_tiles):
                        tiles.load(_FIRST[k], builder.add(terms, builder.mul(pitch, I64(k * _ROWS))), pitch)
                        for total, second in zip(_SUMS[k], _SECOND, strict=True):
                            tiles.multiply(total, _FIRST[k], second)
                for k in range(num_tiles):
                    for n, tile in enumerate(_SUMS[k]):
                        place = k * _ROWS * PANEL_COLUMNS + n * _COLUMNS
                        tiles.store(tile, builder.add(sums, I64(4 * place)), I64(4 * PANEL_COLUMNS))

            with cgutils.for_range_slice(builder, I64(0), num_rows, I64(_BLOCK_ROWS)) as (start, _):
                left = builder.sub(num_rows, start)
                is_whole = builder.icmp_signed(">=", left, I64(_BLOCK_ROWS))
                count = builder.select(is_whole, I64(_BLOCK_ROWS), left)
                # The last rows may be fewer than those of two tiles. Memory behind them is not read.
                is_few = builder.icmp_signed("<=", left, I64(_ROWS))
                with builder.if_then(builder.not_(is_whole)):
                    upper = builder.select(is_few, left, I64(_ROWS))
                    lower = builder.select(is_few, I64(_ROWS), builder.sub(left, I64(_ROWS)))
                    for k, height in enumerate((upper, lower)):
                        for tile in (*_SUMS[k], _FIRST[k]):
                            set_rows(tile, height)
                    call_instruction(builder, "llvm.x86.ldtilecfg", [_BYTES], config_bytes)
                with builder.if_else(is_few) as (few, many):
                    with few:
                        compute(start, 1)
                    with many:
                        compute(start, 2)
                with cgutils.for_range(builder, count) as loop:
                    row = builder.mul(builder.add(start, loop.index), out_pitch)
                    for n in range(2):
                        place = builder.add(builder.mul(loop.index, I64(PANEL_COLUMNS)), I64(n * _COLUMNS))
                        address = builder.add(sums, builder.mul(place, I64(4)))
                        value = builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=64)
                        at = builder.add(args[5], I64(n * _COLUMNS))
                        mask = mask_below(builder, builder.sub(columns_left, I64(n * _COLUMNS)))
                        if has_bias:
                            value = builder.fadd(value, offsets.load(0, at, mask), flags=IN_ORDER)
                        results.store(0, builder.add(row, at), value, mask)
            return context.get_dummy_value()

        numbers = (types.int64, types.int64, types.int64)
        return types.void(out, x, panel, bias, *numbers), emit

    return multiply


multiply_panel = _emit_multiply(has_bias=False)
multiply_panel_with_bias = _emit_multiply(has_bias=True)

# Fields of a job.
X, PANELS, OUT, BIAS, WIDTH, OUT_WIDTH = range(6)


def linear_worker(job: Job) -> None:
    """Multiplies all rows with panels. Each item of the job is one panel."""
    mode = configure_tiles()
    x, out, panels = read_model_matrix(job, X), read_model_matrix(job, OUT), read_model_matrix(job, PANELS)
    width, out_width = read_int(job, WIDTH), read_int(job, OUT_WIDTH)
    item = take_item(job)
    while item < count_items(job):
        multiply_panel(out, x, panels[item], out, width, item * PANEL_COLUMNS, out_width)
        item = take_item(job)
    release_tiles(mode)


def biased_linear_worker(job: Job) -> None:
    """Like `linear_worker`, and adds a bias."""
    mode = configure_tiles()
    x, out, panels = read_model_matrix(job, X), read_model_matrix(job, OUT), read_model_matrix(job, PANELS)
    bias, width, out_width = read_float_matrix(job, BIAS), read_int(job, WIDTH), read_int(job, OUT_WIDTH)
    item = take_item(job)
    while item < count_items(job):
        multiply_panel_with_bias(out, x, panels[item], bias, width, item * PANEL_COLUMNS, out_width)
        item = take_item(job)
    release_tiles(mode)


@cache
def compile_linear(worker: Any) -> int:
    """Returns the address of the compiled worker."""
    address: int = compile_worker(worker, types.uint16).address
    return address


@cache
def _make_team() -> ThreadTeam:
    return ThreadTeam()


class TileWeight:
    """A weight [out, in] in panels. `in` is a multiple of 32."""

    def __init__(self, weight: Tensor) -> None:
        self._out_width, self._width = weight.shape
        num_panels = -(-self._out_width // PANEL_COLUMNS)
        padded = F.pad(weight, (0, 0, 0, num_panels * PANEL_COLUMNS - self._out_width))
        tiles = padded.view(num_panels, 2, _COLUMNS, self._width // _TERMS, _TERMS // 2, 2)
        self._panels = tiles.permute(0, 3, 1, 4, 2, 5).reshape(num_panels, -1)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether this CPU has tiles, and the weight can be multiplied with them."""
        return (
            HAS_TILES and weight.dtype == torch.bfloat16 and weight.shape[1] % _TERMS == 0 and len(weight) > 0
        )

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        rows = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), self._out_width, dtype=x.dtype)
        if len(x) == 0:
            return out
        offsets = None if bias is None else bias.float()
        job = begin_job(
            len(self._panels),
            *pack_rows(rows),
            *pack_rows(self._panels),
            *pack_rows(out),
            *(NO_TENSOR if offsets is None else pack_row(offsets)),
            *(self._width, 0, 0),
            *(self._out_width, 0, 0),
        )
        threads = min(torch.get_num_threads(), len(self._panels))
        if self._panels.numel() < _SERIAL_ELEMENTS:
            threads = 1
        worker = linear_worker if offsets is None else biased_linear_worker
        _make_team().run(compile_linear(worker), job.buffer_info()[0], threads)
        return out
