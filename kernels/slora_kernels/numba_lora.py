"""Shrink and expand on a CPU, for tiles of a few tokens: the weights are read straight from the pages, once.

Such tiles are bound by reading the weights, so an item is a stretch of rows (shrink) or of output columns
(expand) of one tile, and few tiles still keep all threads busy. Long tiles are matmuls and go through torch.
"""

from slora_kernels.numba_language import (
    Array,
    Float,
    Job,
    add_four_rows,
    add_row,
    clear,
    compiled,
    count_items,
    dot,
    narrow,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_model_matrix,
    take_item,
    take_worker,
    widen,
)


@compiled
def find_stretch(pages: Array, table: Array, segment: int, segment_size: int, size: int) -> Array:
    """The first of `size` numbers that begin at a segment of an adapter: as many as lie in its page."""
    page_segments = pages.shape[1] // segment_size
    start = segment % page_segments * segment_size
    return pages[table[segment // page_segments], start : min(start + size, pages.shape[1])]


@compiled
def shrink_row(
    sums: Array, x: Array, pages: Array, table: Array, segment: int, segment_size: int, width: int
) -> None:
    """sums [t] = x [t, :width] times the row that begins at `segment`, page by page."""
    done = 0
    while done < width:
        row = find_stretch(pages, table, segment + done // segment_size, segment_size, width - done)
        for t in range(sums.shape[0]):
            part = dot(x[t, done : done + row.shape[0]], row)
            sums[t] = part if done == 0 else sums[t] + part
        done += row.shape[0]


# Fields of a shrink job. groups begins at the layer's and group's entry of slot 0.
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
        slot, first, tokens = tiles[item // blocks]
        rank, segment = groups[slot, 0], groups[slot, 1]
        first_row = item % blocks * block_rows
        for row in range(first_row, min(first_row + block_rows, rank)):
            shrink_row(
                bridge[first : first + tokens, row],
                x[first : first + tokens],
                pages,
                page_table[slot],
                segment + row * row_segments,
                segment_size,
                width,
            )
        item = take_item(job)


@compiled
def add_adapter_row(
    sums: Array, weights: Array, pages: Array, table: Array, segment: int, segment_size: int
) -> None:
    """sums [t, size] += weights [t] * the numbers that begin at `segment`, page by page."""
    done = 0
    while done < sums.shape[1]:
        row = find_stretch(pages, table, segment + done // segment_size, segment_size, sums.shape[1] - done)
        for t in range(sums.shape[0]):
            add_row(sums[t, done : done + row.shape[0]], weights[t], row)
        done += row.shape[0]


@compiled
def expand_columns(
    sums: Array,
    weights: Array,
    pages: Array,
    table: Array,
    segment: int,
    row_segments: int,
    segment_size: int,
) -> None:
    """sums [t, size] += weights [t, rank] times rows whose columns begin at `segment`, `row_segments` apart.

    Four rows at a time where none of the four crosses a page.
    """
    size, rank, r = sums.shape[1], weights.shape[1], 0
    while r < rank:
        at = segment + r * row_segments
        last = min(r + 3, rank - 1)
        a = find_stretch(pages, table, at, segment_size, size)
        b = find_stretch(pages, table, at + min(1, last - r) * row_segments, segment_size, size)
        c = find_stretch(pages, table, at + min(2, last - r) * row_segments, segment_size, size)
        d = find_stretch(pages, table, at + (last - r) * row_segments, segment_size, size)
        shortest = min(min(a.shape[0], b.shape[0]), min(c.shape[0], d.shape[0]))
        if last == r + 3 and shortest == size:
            for t in range(sums.shape[0]):
                add_four_rows(sums[t], weights[t, r : r + 4], a, b, c, d)
            r += 4
        else:
            add_adapter_row(sums, weights[:, r], pages, table, at, segment_size)
            r += 1


@compiled
def add_scaled(out: Array, sums: Array, scale: Float) -> None:
    for i in range(sums.shape[0]):
        out[i] = narrow(widen(out[i]) + scale * sums[i], out)


# Fields of an expand job. modules and scales begin at the entries of the layer and the group's first module of
# slot 0; blocks [n, 4] are (member of the group, first column in out, first column in the module, columns).
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
            sums = scratch[: tokens * size].reshape((tokens, size))
            clear(scratch[: tokens * size])
            expand_columns(
                sums,
                bridge[first : first + tokens, row : row + rank],
                pages,
                page_table[slot],
                modules[slot, 3 * member + 2] + column // segment_size,
                (widths[0, member] + segment_size - 1) // segment_size,
                segment_size,
            )
            for t in range(tokens):
                scale = weights[0, tile] * scales[slot, member]
                add_scaled(out[first + t, out_column : out_column + size], sums[t], scale)
        item = take_item(job)
