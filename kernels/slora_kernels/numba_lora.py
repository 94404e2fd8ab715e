"""Shrink and expand on a CPU, for tiles of a few tokens: the weights are read straight from the pages, once.

Such tiles are bound by reading the weights, so an item is a stretch of rows (shrink) or of output columns
(expand) of one tile, and few tiles still keep all threads busy. Long tiles are matmuls and go through torch.
"""

from slora_kernels.numba_language import (
    Array,
    Float,
    Int,
    Job,
    add_four_rows,
    add_row,
    clear,
    compiled,
    count_items,
    dot,
    dot_four,
    narrow,
    prefetch,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_model_matrix,
    take_item,
    take_worker,
    widen,
)


@compiled
def find_segment(pages: Array, table: Array, segment: Int, segment_size: Int) -> tuple[Int, Int]:
    """Page and first number of a segment of an adapter."""
    page_segments = pages.shape[1] // segment_size
    return table[segment // page_segments], segment % page_segments * segment_size


@compiled
def shrink_row(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, width: Int
) -> None:
    """sums [t] = x [t, :width] times the row that begins at `segment`, page by page."""
    done = 0
    while done < width:
        page, start = find_segment(pages, table, segment + done // segment_size, segment_size)
        row = pages[page, start : min(start + width - done, pages.shape[1])]
        for t in range(sums.shape[0]):
            part = dot(x[t, done : done + row.shape[0]], row)
            sums[t] = part if done == 0 else sums[t] + part
        done += row.shape[0]


@compiled
def shrink_rows(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, width: Int
) -> None:
    """sums [t, n] = x [t, :width] times n rows, one after the other from `segment` on: four at a time in a page."""
    row_segments = (width + segment_size - 1) // segment_size
    pitch, n = row_segments * segment_size, 0
    while n < sums.shape[1]:
        at = segment + n * row_segments
        page, start = find_segment(pages, table, at, segment_size)
        if n + 4 <= sums.shape[1] and start + 4 * pitch <= pages.shape[1]:
            rows = pages[page, start : start + 4 * pitch].reshape((4, pitch))
            prefetch(pages[page, start + 4 * pitch : min(start + 8 * pitch, pages.shape[1])])
            for t in range(sums.shape[0]):
                sums[t, n], sums[t, n + 1], sums[t, n + 2], sums[t, n + 3] = dot_four(
                    x[t, :width], rows[0], rows[1], rows[2], rows[3]
                )
            n += 4
        else:
            shrink_row(sums[:, n], x, pages, table, at, segment_size, width)
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
            at = segment + row * row_segments
            shrink_rows(sums, x[first : first + tokens], pages, page_table[slot], at, segment_size, width)
        item = take_item(job)


@compiled
def add_adapter_row(
    sums: Array, weights: Array, pages: Array, table: Array, segment: Int, segment_size: Int
) -> None:
    """sums [t, size] += weights [t] * the numbers that begin at `segment`, page by page."""
    done = 0
    while done < sums.shape[1]:
        page, start = find_segment(pages, table, segment + done // segment_size, segment_size)
        row = pages[page, start : min(start + sums.shape[1] - done, pages.shape[1])]
        for t in range(sums.shape[0]):
            add_row(sums[t, done : done + row.shape[0]], weights[t], row)
        done += row.shape[0]


@compiled
def expand_columns(
    sums: Array,
    weights: Array,
    pages: Array,
    table: Array,
    segment: Int,
    row_segments: Int,
    segment_size: Int,
) -> None:
    """sums [t, size] += weights [t, rank] times rows whose columns begin at `segment`, `row_segments` apart.

    Four rows at a time where all four lie in one page.
    """
    size, rank, r = sums.shape[1], weights.shape[1], 0
    pitch = row_segments * segment_size
    while r < rank:
        at = segment + r * row_segments
        page, a = find_segment(pages, table, at, segment_size)
        b, c, d = a + pitch, a + 2 * pitch, a + 3 * pitch
        if r + 4 <= rank and d + size <= pages.shape[1]:
            row = pages[page]
            for k in range(4, 8):
                prefetch(row[a + k * pitch : min(a + k * pitch + size, pages.shape[1])])
            for t in range(sums.shape[0]):
                add_four_rows(
                    sums[t],
                    weights[t, r : r + 4],
                    row[a : a + size],
                    row[b : b + size],
                    row[c : c + size],
                    row[d : d + size],
                )
            r += 4
        else:
            add_adapter_row(sums, weights[:, r], pages, table, at, segment_size)
            r += 1


@compiled
def add_scaled(out: Array, sums: Array, scale: Float) -> None:
    for i in range(sums.shape[0]):
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
