"""Shrink and expand on a CPU.

With few tokens, the weights are read directly from the pages. With many tokens, rows of B are packed first.

Shrink and expand of a site are one job. If there are many tiles, each tile is one item, and one thread shrinks and
expands it. The adapter's rows of A and B are then read in one sweep, and no thread waits for another. If there are few
tiles, they are split into more items so that all threads have work. An item is then a block of rows of A (shrink) or a
block of output columns (expand) of one tile. Threads start expand items when all shrink items are taken.
"""

from slora_kernels.cpu.worker_sizes import (
    LOGIT_ROWS,
    PACKED_COLUMNS,
    PACKED_PITCH,
)
from slora_kernels.cpu.workers.dots import add_four_dots, add_one_dot
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Float,
    Int,
    Job,
    as_matrix,
    as_row,
    await_count,
    clear,
    compiled,
    count_between,
    count_items,
    increment_count,
    narrow,
    prefetch,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_int64_matrix,
    read_model_matrix,
    read_operand_matrix,
    take_item,
    take_thread_index,
    widen,
)
from slora_kernels.cpu.workers.weighted_sums import add_weighted_rows
from slora_kernels.layout import AFFINE_SEGMENT

# Columns of B are prefetched this many elements before they are read.
PREFETCH_ELEMENTS = 256
# From PACKED_TOKENS tokens on, rows of B are first packed into scratch, PACKED_COLUMNS columns at a time. In the pages,
# the pitch of the rows is often a multiple of 4 KiB, so unpacked rows would compete for the same few cache sets. 64
# packed rows fill two thirds of the L1 cache.
PACKED_TOKENS = 32
PACKED_PREFETCH_ROWS = 4


@compiled
def find_segment(pages: Array, table: Array, segment: Int, segment_size: Int) -> tuple[Int, Int]:
    """Page id of an adapter's segment, and the index of the segment's first element in the page."""
    page_segments = pages.shape[1] // segment_size
    return table[segment // page_segments], segment % page_segments * segment_size


@compiled
def shrink_row(
    sums: Array, x: Array, pages: Array, table: Array, segment: Int, segment_size: Int, width: Int
) -> None:
    """Adds the products of x [t, :width] and the row of A at `segment` to sums [t, 1], page by page."""
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
    """Adds the products of x [t, :width] and n consecutive rows of A to sums [t, n]. The first row begins at `segment`.

    Rows are read four at a time if one page holds all four.
    """
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


@compiled
def pack_row(
    target: Array, pages: Array, table: Array, segment: Int, segment_size: Int, pitch: Int, size: Int
) -> None:
    """Copies the `size` elements that begin at `segment` to target [:size], and prefetches a later row.

    pitch: distance to the next row. The row PACKED_PREFETCH_ROWS rows later is prefetched if it lies in the same page.
    """
    done = 0
    while done < size:
        page, start = find_segment(pages, table, segment + done // segment_size, segment_size)
        count = min(size - done, pages.shape[1] - start)
        ahead = start + PACKED_PREFETCH_ROWS * pitch
        prefetch(pages[page, min(ahead, pages.shape[1]) : min(ahead + count, pages.shape[1])])
        source = pages[page, start : start + count]
        piece = target[done : done + count]
        for i in range(count):
            piece[i] = source[i]
        done += count


@compiled
def find_rows(
    starts: Array,
    packed: Array,
    pages: Array,
    table: Array,
    segment: Int,
    row_segments: Int,
    segment_size: Int,
    size: Int,
    is_packed: bool,
) -> None:
    """Computes where `size` columns of each row begin: starts [rank], in elements from the beginning of `pages`.

    The columns of the first row begin at `segment`. A row that crosses a page boundary is copied to `packed` [rank,
    ...], and its start points there. If is_packed, all rows are copied.
    """
    page, pitch, page_elements = 0, row_segments * segment_size, pages.shape[1]
    start, to_packed = page_elements, count_between(pages, packed)
    for r in range(starts.shape[0]):
        start += pitch
        if start + size > page_elements:
            page, start = find_segment(pages, table, segment + r * row_segments, segment_size)
        if is_packed or start + size > page_elements:
            pack_row(packed[r], pages, table, segment + r * row_segments, segment_size, pitch, size)
            starts[r] = to_packed + r * packed.shape[1]
        else:
            starts[r] = page * page_elements + start


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
    starts: Array,
    packed: Array,
) -> None:
    """out [t, size] += scale * factors [t, rank] times `size` columns of `rank` rows of B.

    segment: where these columns begin in the first row. row_segments: distance between rows, in segments.
    starts [rank] and packed [rank, PACKED_PITCH] are scratch for `find_rows`.
    """
    rank, numbers = factors.shape[1], as_row(pages)
    is_packed = factors.shape[0] >= PACKED_TOKENS
    ahead = 0 if is_packed else PREFETCH_ELEMENTS
    for column in range(0, size, PACKED_COLUMNS):
        width, at = min(PACKED_COLUMNS, size - column), segment + column // segment_size
        find_rows(starts, packed, pages, table, at, row_segments, segment_size, width, is_packed)
        add_weighted_rows(out[:, column:], factors, numbers, starts, ahead, scale, width, rank)


@compiled
def copy_narrowed(target: Array, sums: Array) -> None:
    for i in range(sums.shape[0]):
        target[i] = narrow(sums[i], target)


# Fields of a job: the fields of the call come first, then the step, then the site.
#
# SHRUNK is the output of shrink and the input of expand. If it is already filled, NUM_SHRINK_ITEMS is 0.
# With IS_WHOLE, an item is a whole tile. Otherwise the first NUM_SHRINK_ITEMS items shrink and the others expand.
# A tile has BLOCKS shrink items of BLOCK_ROWS rows of A. Each of them adds 1 to its tile's count in DONE, which was
# COUNT_BEFORE at the start of the job.
# COLUMN_BLOCKS [n, 4] are (module's index in the group, first column in out, first column in the module, columns).
# GROUP and FIRST_MODULE are the indexes of the site among a slot's groups and modules.
(
    X,
    OUT,
    SHRUNK,
    NUM_SHRINK_ITEMS,
    COUNT_BEFORE,
    PAGES,
    TILES,
    PAGE_TABLE,
    WEIGHTS,
    GROUPS,
    MODULES,
    SCALES,
    IS_WHOLE,
    BLOCKS,
    BLOCK_ROWS,
    DONE,
    SUMS,
    PACKED,
    STARTS,
    GROUP,
    WIDTH,
    FIRST_MODULE,
    COLUMN_BLOCKS,
    WIDTHS,
    SEGMENT_SIZE,
) = range(25)


@compiled
def split_item(
    item: Int, is_whole: Int, num_shrink_items: Int, blocks: Int, block_rows: Int, column_blocks: Int
) -> tuple[Int, Int, Int, Int, Int]:
    """Returns the tile of an item, the first and the end of its rows of A, and of its blocks of columns."""
    if is_whole:
        return item, 0, blocks * block_rows if num_shrink_items > 0 else 0, 0, column_blocks
    if item < num_shrink_items:
        first_row = item % blocks * block_rows
        return item // blocks, first_row, first_row + block_rows, 0, 0
    item -= num_shrink_items
    block = item % column_blocks
    return item // column_blocks, 0, 0, block, block + 1


def lora_worker(job: Job) -> None:
    """Shrinks and expands the tiles of one site.

    Each item of the job is a tile or a part of a tile: a block of rows of A (shrink) or of output columns (expand).
    A block of columns waits until all blocks of rows of the same tile are done.
    """
    x, out, pages = read_model_matrix(job, X), read_model_matrix(job, OUT), read_model_matrix(job, PAGES)
    shrunk = read_operand_matrix(job, SHRUNK)
    tiles, page_table = read_int32_matrix(job, TILES), read_int32_matrix(job, PAGE_TABLE)
    weights, scales = read_float_matrix(job, WEIGHTS), read_float_matrix(job, SCALES)
    groups, modules = read_int32_matrix(job, GROUPS), read_int32_matrix(job, MODULES)
    column_blocks, widths = read_int32_matrix(job, COLUMN_BLOCKS), read_int32_matrix(job, WIDTHS)
    group, width, first_module = read_int(job, GROUP), read_int(job, WIDTH), read_int(job, FIRST_MODULE)
    num_shrink_items, blocks, block_rows = (
        read_int(job, NUM_SHRINK_ITEMS),
        read_int(job, BLOCKS),
        read_int(job, BLOCK_ROWS),
    )
    done, awaited = read_int64_matrix(job, DONE)[0], read_int(job, COUNT_BEFORE) + blocks
    segment_size, worker, is_whole = (
        read_int(job, SEGMENT_SIZE),
        take_thread_index(job),
        read_int(job, IS_WHOLE),
    )
    row_segments = (width + segment_size - 1) // segment_size
    scratch = read_float_matrix(job, SUMS)[worker]
    packed, starts = read_model_matrix(job, PACKED)[worker], read_int64_matrix(job, STARTS)[worker]
    item = take_item(job)
    while item < count_items(job):
        tile, first_row, end_row, first_block, end_block = split_item(
            item, is_whole, num_shrink_items, blocks, block_rows, column_blocks.shape[0]
        )
        slot, first, tokens = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        rank, segment = groups[slot, 2 * group], groups[slot, 2 * group + 1]
        for row in range(first_row, min(end_row, rank), block_rows):
            rows = min(block_rows, rank - row)
            numbers = scratch[: tokens * rows]
            clear(numbers)
            sums, at = as_matrix(numbers, rows), segment + row * row_segments
            shrink_rows(sums, x[first : first + tokens], pages, page_table[slot], at, segment_size, width)
            for t in range(tokens):
                copy_narrowed(shrunk[first + t, row : row + rows], sums[t])
        if end_block == 0:
            increment_count(done, tile)
        for block in range(first_block, end_block):
            member, out_column, column, size = column_blocks[block]
            module = first_module + member
            rank, row = modules[slot, 3 * module], modules[slot, 3 * module + 1]
            if rank > 0:
                if num_shrink_items > 0 and not is_whole:
                    await_count(done, tile, awaited)
                expand_columns(
                    out[first : first + tokens, out_column:],
                    shrunk[first : first + tokens, row : row + rank],
                    weights[0, tile] * scales[slot, module],
                    pages,
                    page_table[slot],
                    modules[slot, 3 * module + 2] + column // segment_size,
                    (widths[0, member] + segment_size - 1) // segment_size,
                    segment_size,
                    size,
                    starts[:rank],
                    as_matrix(packed[: rank * PACKED_PITCH], PACKED_PITCH),
                )
        item = take_item(job)


# Fields of a job of scales and offsets. AFFINE_PAGES are the pool's pages as float32.
(
    AFFINE_OUT,
    FIRST_AFFINE_MODULE,
    AFFINE_WIDTHS,
    AFFINE_PAGES,
    AFFINE_TILES,
    AFFINE_PAGE_TABLE,
    AFFINE_WEIGHTS,
    AFFINE,
) = range(8)


@compiled
def apply_affine_row(out: Array, scales: Array, offsets: Array, weight: Float) -> None:
    for i in range(out.shape[0]):
        out[i] = narrow(widen(out[i]) * scales[i] + offsets[i] * weight, out)


def affine_worker(job: Job) -> None:
    """Multiplies the output columns of adapted modules by scales, and adds offsets. Each item of the job is a tile."""
    out, pages = read_model_matrix(job, AFFINE_OUT), read_float_matrix(job, AFFINE_PAGES)
    tiles, page_table = read_int32_matrix(job, AFFINE_TILES), read_int32_matrix(job, AFFINE_PAGE_TABLE)
    weights, affine = read_float_matrix(job, AFFINE_WEIGHTS), read_int32_matrix(job, AFFINE)
    widths, first_module = read_int32_matrix(job, AFFINE_WIDTHS), read_int(job, FIRST_AFFINE_MODULE)
    tile = take_item(job)
    while tile < count_items(job):
        slot, first, tokens = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        table, weight, out_column = page_table[slot], weights[0, tile], 0
        for member in range(widths.shape[1]):
            width, module = widths[0, member], first_module + member
            segment = affine[slot, 4 * module + 1]
            num_segments = (width + AFFINE_SEGMENT - 1) // AFFINE_SEGMENT
            for index in range(num_segments if affine[slot, 4 * module] else 0):
                page, at = find_segment(pages, table, segment + index, AFFINE_SEGMENT)
                scales = pages[page, at : at + AFFINE_SEGMENT]
                page, at = find_segment(pages, table, segment + num_segments + index, AFFINE_SEGMENT)
                offsets = pages[page, at : at + AFFINE_SEGMENT]
                start = out_column + index * AFFINE_SEGMENT
                end = min(start + AFFINE_SEGMENT, out_column + width)
                for token in range(first, first + tokens):
                    apply_affine_row(out[token, start:end], scales, offsets, weight)
            out_column += width
        tile = take_item(job)


# Fields of a job of logits by rows of an adapter. LOGITS has a column for each row.
HIDDEN, LOGITS, ROW_PAGES, ROW_TABLE, FIRST_SEGMENT, NUM_ROWS, ROW_WIDTH, ROW_SEGMENT_SIZE, ROW_SUMS = range(
    9
)


def token_logits_worker(job: Job) -> None:
    """Multiplies hidden states by rows of an adapter. Each item of the job is a block of rows."""
    hidden, logits = read_model_matrix(job, HIDDEN), read_model_matrix(job, LOGITS)
    pages, table = read_model_matrix(job, ROW_PAGES), read_int32_matrix(job, ROW_TABLE)[0]
    width, segment_size = read_int(job, ROW_WIDTH), read_int(job, ROW_SEGMENT_SIZE)
    first, num_rows = read_int(job, FIRST_SEGMENT), read_int(job, NUM_ROWS)
    scratch = read_float_matrix(job, ROW_SUMS)[take_thread_index(job)]
    row_segments, tokens = (width + segment_size - 1) // segment_size, hidden.shape[0]
    block = take_item(job)
    while block < count_items(job):
        start = block * LOGIT_ROWS
        count = min(LOGIT_ROWS, num_rows - start)
        numbers = scratch[: tokens * count]
        clear(numbers)
        sums = as_matrix(numbers, count)
        shrink_rows(sums, hidden, pages, table, first + start * row_segments, segment_size, width)
        for token in range(tokens):
            copy_narrowed(logits[token, start : start + count], sums[token])
        block = take_item(job)
