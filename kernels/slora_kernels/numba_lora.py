"""Shrink and expand on a CPU, for tiles of a few tokens: the weights are read straight from the pages, once.

Such tiles are bound by reading the weights, so an item is a stretch of rows (shrink) or of output columns
(expand) of one tile, and few tiles still keep all threads busy. Long tiles are matmuls and go through torch.
"""

import numpy as np

from slora_kernels.numba_blocks import (
    LANES,
    add_four_dots,
    add_one_dot,
    gather_rows,
)
from slora_kernels.numba_language import (
    Array,
    Float,
    Int,
    Job,
    clear,
    compiled,
    count_items,
    narrow,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_model_matrix,
    take_item,
    take_worker,
    widen,
)

# Columns of B are asked for so many numbers before they are read.
AHEAD = 256
_ONE = np.float32(1.0)


@compiled
def find_segment(pages: Array, table: Array, segment: Int, segment_size: Int) -> tuple[Int, Int]:
    """Page and first number of a segment of an adapter."""
    page_segments = pages.shape[1] // segment_size
    return table[segment // page_segments], segment % page_segments * segment_size


@compiled
def shrink_row(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, width: Int
) -> None:
    """sums [t, 1] += x [t, :width] times the row that begins at `segment`, page by page."""
    done = 0
    while done < width:
        page, start = find_segment(pages, table, segment + done // segment_size, segment_size)
        count = min(width - done, pages.shape[1] - start)
        add_one_dot(sums, x[:, done:], pages[page, start:], 0, count)
        done += count


@compiled
def shrink_rows(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, width: Int
) -> None:
    """sums [t, n] += x [t, :width] times n rows, one after the other from `segment` on: four at a time in a page."""
    row_segments = (width + segment_size - 1) // segment_size
    pitch, n = row_segments * segment_size, 0
    while n < sums.shape[1]:
        at = segment + n * row_segments
        page, start = find_segment(pages, table, at, segment_size)
        if n + 4 <= sums.shape[1] and start + 4 * pitch <= pages.shape[1]:
            add_four_dots(sums[:, n:], x, pages[page, start:], pitch, width)
            n += 4
        else:
            shrink_row(sums[:, n:], x, pages, table, at, segment_size, width)
            n += 1


# Fields of a shrink job. groups begins at the site's entry of slot 0.
X, PAGES, BRIDGE, TILES, PAGE_TABLE, GROUPS, WIDTH, SEGMENT_SIZE, BLOCKS, BLOCK_ROWS = range(10)


def shrink_worker(job: Job) -> None:
    """Items: tiles times blocks of rows of A."""
    x, pages, bridge = (
        read_model_matrix(job, X),
        read_model_matrix(job, PAGES),
        read_float_matrix(job, BRIDGE),
    )
    tiles, page_table = read_int32_matrix(job, TILES), read_int32_matrix(job, PAGE_TABLE)
    groups, width, segment_size = (
        read_int32_matrix(job, GROUPS),
        read_int(job, WIDTH),
        read_int(job, SEGMENT_SIZE),
    )
    blocks, block_rows = read_int(job, BLOCKS), read_int(job, BLOCK_ROWS)
    row_segments = (width + segment_size - 1) // segment_size
    item = take_item(job)
    while item < count_items(job):
        tile, row = item // blocks, item % blocks * block_rows
        slot, first, tokens = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        rank, segment = groups[slot, 0], groups[slot, 1]
        if row < rank:
            sums = bridge[first : first + tokens, row : min(row + block_rows, rank)]
            for t in range(tokens):
                clear(sums[t])
            at = segment + row * row_segments
            shrink_rows(sums, x[first : first + tokens], pages, page_table[slot], at, segment_size, width)
        item = take_item(job)


@compiled
def expand_row(
    sums: Array, factors: Array, pages: Array, table: Array, segment: Int, segment_size: Int, size: Int
) -> None:
    """sums [t, size] += factors [t, 1] * the numbers that begin at `segment`, page by page."""
    done = 0
    while done < size:
        page, start = find_segment(pages, table, segment + done // segment_size, segment_size)
        count = min(size - done, pages.shape[1] - start)
        gather_rows(sums[:, done:], factors, pages[page, start:], 0, AHEAD, _ONE, count, 1)
        done += count


@compiled
def expand_pieces(
    sums: Array,
    factors: Array,
    pages: Array,
    table: Array,
    segment: Int,
    row_segments: Int,
    segment_size: Int,
    size: Int,
) -> None:
    """sums [t, size] += factors [t, rank] times rows whose columns begin at `segment`, `row_segments` apart: as many
    at a time as lie in one page."""
    rank, r = factors.shape[1], 0
    pitch = row_segments * segment_size
    while r < rank:
        at = segment + r * row_segments
        page, start = find_segment(pages, table, at, segment_size)
        room = pages.shape[1] - start - size
        if room < 0:
            expand_row(sums, factors[:, r:], pages, table, at, segment_size, size)
            r += 1
        else:
            count = min(rank - r, room // pitch + 1)
            gather_rows(sums, factors[:, r:], pages[page, start:], pitch, AHEAD, _ONE, size, count)
            r += count


@compiled
def expand_columns(
    out: Array,
    factors: Array,
    scale: Float,
    pages: Array,
    table: Array,
    segment: Int,
    row_segments: Int,
    segment_size: Int,
    size: Int,
    scratch: Array,
) -> None:
    """out [t, size] += scale * factors [t, rank] times rows whose columns begin at `segment`, `row_segments` apart."""
    rank, pitch = factors.shape[1], row_segments * segment_size
    page, start = find_segment(pages, table, segment, segment_size)
    if size % LANES == 0 and start + (rank - 1) * pitch + size <= pages.shape[1]:
        gather_rows(out, factors, pages[page, start:], pitch, AHEAD, scale, size, rank)
        return
    room = (size + LANES - 1) // LANES * LANES
    numbers = scratch[: factors.shape[0] * room]
    clear(numbers)
    sums = numbers.reshape((-1, room))
    expand_pieces(sums, factors, pages, table, segment, row_segments, segment_size, size)
    for t in range(factors.shape[0]):
        add_scaled(out[t, :size], sums[t], scale)


@compiled
def add_scaled(out: Array, sums: Array, scale: Float) -> None:
    for i in range(out.shape[0]):
        out[i] = narrow(widen(out[i]) + scale * sums[i], out)


# Fields of an expand job. modules and scales begin at the entries of the site's first module of slot 0; blocks [n, 4]
# are (member of the group, first column in out, first column in the module, columns).
(
    E_OUT,
    E_PAGES,
    E_BRIDGE,
    E_TILES,
    E_WEIGHTS,
    E_PAGE_TABLE,
    E_MODULES,
    E_SCALES,
    E_BLOCKS,
    E_WIDTHS,
    E_SUMS,
    E_SEGMENT_SIZE,
) = range(12)


def expand_worker(job: Job) -> None:
    """Items: tiles times blocks of output columns."""
    out, pages, bridge = (
        read_model_matrix(job, E_OUT),
        read_model_matrix(job, E_PAGES),
        read_float_matrix(job, E_BRIDGE),
    )
    tiles, page_table = read_int32_matrix(job, E_TILES), read_int32_matrix(job, E_PAGE_TABLE)
    weights, scales = read_float_matrix(job, E_WEIGHTS), read_float_matrix(job, E_SCALES)
    modules, blocks = read_int32_matrix(job, E_MODULES), read_int32_matrix(job, E_BLOCKS)
    widths, segment_size = read_int32_matrix(job, E_WIDTHS), read_int(job, E_SEGMENT_SIZE)
    scratch = read_float_matrix(job, E_SUMS)[take_worker(job)]
    item = take_item(job)
    while item < count_items(job):
        tile = item // blocks.shape[0]
        slot, first, tokens = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        member, out_column, column, size = blocks[item % blocks.shape[0]]
        rank, row = modules[slot, 3 * member], modules[slot, 3 * member + 1]
        if rank > 0:
            expand_columns(
                out[first : first + tokens, out_column:],
                bridge[first : first + tokens, row : row + rank],
                weights[0, tile] * scales[slot, member],
                pages,
                page_table[slot],
                modules[slot, 3 * member + 2] + column // segment_size,
                (widths[0, member] + segment_size - 1) // segment_size,
                segment_size,
                size,
                scratch,
            )
        item = take_item(job)
