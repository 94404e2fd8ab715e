"""Paged attention on a CPU for decode and prefill.

An item of a job is one tile of a sequence's queries and one or more KV heads. A thread reads the visible keys of an
item in blocks, with an online softmax (arXiv 2205.14135) in base 2. Sums are float32. In a bfloat16 model, queries and
attention weights are bfloat16, as on a GPU, because some CPUs add two bfloat16 products in one instruction. In other
models, queries and attention weights are float32.

For a tile with one query (decode), the thread reads keys and values directly from the pages. For a tile of several
queries, the thread first copies each block. If the tile has enough rows, the thread also transposes the keys.

A query's result has the same bits on all these paths, so it does not depend on the tile or on the other queries of the
step. Blocks begin at multiples of `BLOCK_KEYS`. The products of a score, and the values of a block, are added one after
the other. Keys that a query does not see have the weight 0.

`scales` is a bfloat16 view of the same pages, for reading the scales that they contain. It is None if K and V have no
scales. The scores are multiplied by the scales of K, and the attention weights by the scales of V.
"""

import numpy as np

from slora_kernels.cpu.worker_sizes import (
    BLOCK_KEYS,
    HAS_BFLOAT16_DOT,
    LANES,
    TILE_ROWS,
)
from slora_kernels.cpu.workers.dots import dot_keys
from slora_kernels.cpu.workers.intrinsics import (
    Array,
    Float,
    Int,
    Job,
    as_matrix,
    as_row,
    clear,
    compiled,
    copy_converted,
    count_items,
    fill,
    multiply_columns,
    narrow,
    prefetch,
    read_bfloat16_matrix,
    read_byte_matrix,
    read_float,
    read_float_matrix,
    read_int,
    read_int32_matrix,
    read_int64_matrix,
    read_model_matrix,
    read_operand_matrix,
    take_item,
    take_thread_index,
)
from slora_kernels.cpu.workers.softmax import (
    LOG2_E,
    multiply,
    update_softmax_of_rows,
)
from slora_kernels.cpu.workers.weighted_sums import add_weighted_rows

# From this many rows of a tile on, transposing the keys is faster.
TRANSPOSE_ROWS = 8

# Keys and values are prefetched this many elements before they are read.
PREFETCH_ELEMENTS = 1024

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NAN = np.float32(np.nan)


@compiled
def copy_queries(rows: Array, q: Array, first_head: Int, group: Int) -> None:
    """Copies heads of q [tokens, heads * D]: head `first_head + g` of token t becomes row t * group + g of `rows`."""
    size = rows.shape[1]
    for m in range(rows.shape[0]):
        start = (first_head + m % group) * size
        copy_converted(rows[m], q[m // group, start : start + size])


@compiled
def count_contiguous_keys(key: Int, end: Int, block_tokens: Int) -> Int:
    """Number of keys from `key` to `end` that are contiguous in the page of `key`."""
    return min(block_tokens - key % block_tokens, end - key)


@compiled
def load_block(target: Array, pages: Array, table: Array, key: Int, block_tokens: Int, start: Int) -> None:
    """Copies the unscaled K (or V) of n tokens into target [n, D], page by page. `key` is the first token.

    start: where K (or V) of the head begins in a page.
    """
    size, done = target.shape[1], 0
    while done < target.shape[0]:
        count = count_contiguous_keys(key + done, key + target.shape[0], block_tokens)
        page, first = table[(key + done) // block_tokens], start + (key + done) % block_tokens * size
        run = as_row(target[done : done + count])
        copy_converted(run, pages[page, first : first + count * size])
        done += count


@compiled
def scale_block(
    operands: Array, scales: Array, table: Array, key: Int, block_tokens: Int, scale_start: Int
) -> None:
    """Multiplies operands [M, n] by the scales of the n tokens from `key` on.

    scale_start: where the head's scales begin in a page.
    """
    done = 0
    while done < operands.shape[1]:
        count = count_contiguous_keys(key + done, key + operands.shape[1], block_tokens)
        first = scale_start + (key + done) % block_tokens
        own = scales[table[(key + done) // block_tokens], first : first + count]
        multiply_columns(operands[:, done : done + count], own)
        done += count


@compiled
def transpose(target: Array, source: Array, first: Int, end: Int) -> None:
    """target [D, n] = source [n, D] transposed, for columns `first` to `end - 1`. The columns before these become 0."""
    for i in range(target.shape[0]):
        row = target[i]
        for n in range(first):
            row[n] = 0
        for n in range(first, end):
            row[n] = source[n, i]


@compiled
def score_contiguous_keys(scores: Array, rows: Array, keys: Array) -> None:
    """scores [M, n] = rows [M, D] times the n contiguous keys that begin at `keys`. D is a multiple of LANES."""
    size = rows.shape[1]
    for n in range(0, scores.shape[1], LANES):
        dot_keys(scores[:, n:], rows, keys[n * size :], size, size, min(LANES, scores.shape[1] - n))


@compiled
def attend_token(
    rows: Array,
    sums: Array,
    state: Array,
    scratch: Array,
    operands: Array,
    starts: Array,
    pages: Array,
    scales: Array | None,
    table: Array,
    position: Int,
    group: Int,
    factor: Float,
    window: Int,
    cap: Float,
    block_tokens: Int,
    start: Int,
    side: Int,
    scale_start: Int,
) -> None:
    """Computes attention of the queries of the token at `position`, `rows` [M, D].

    Updates sums [M, D] and state [M, 3], which the caller has initialised.

    The rows belong to consecutive KV heads, with `group` rows for each head. These heads are contiguous in a page.
    start: where K of the first head begins in a page. V begins `side` elements later.
    scale_start: where the K scales of the first head begin. There is one scale for each row of D elements.
    factor: multiplies the scores. cap: the soft cap of the scores, 0 for none.
    """
    num_rows, size = rows.shape
    head_elements, num_heads, numbers = block_tokens * size, num_rows // group, as_row(pages)
    scores = as_matrix(scratch[: num_rows * BLOCK_KEYS], BLOCK_KEYS)
    weights = as_matrix(operands[: num_rows * BLOCK_KEYS], BLOCK_KEYS)
    first, visible = max(0, position + 1 - window), position + 1
    for key in range(first - first % BLOCK_KEYS, visible, BLOCK_KEYS):
        end = min(key + BLOCK_KEYS, visible)
        for m in range(num_rows):
            clear(scores[m])
        at = max(key, first)
        while at < end:
            count, offset = count_contiguous_keys(at, end, block_tokens), at % block_tokens * size
            page = pages[table[at // block_tokens]]
            prefetch(page[start + side : start + side + num_heads * head_elements])
            if at + count < visible:
                ahead = pages[table[(at + count) // block_tokens]]
                prefetch(ahead[start : start + num_heads * head_elements])
            for head in range(num_heads):
                mine = scores[head * group : (head + 1) * group, at - key : at - key + count]
                keys = page[start + head * head_elements + offset :]
                score_contiguous_keys(mine, rows[head * group :], keys)
                if scales is not None:
                    first_scale = scale_start + head * block_tokens + at % block_tokens
                    own = scales[table[at // block_tokens]]
                    multiply_columns(mine, own[first_scale : first_scale + count])
            at += count
        for m in range(num_rows):
            multiply(scores[m], factor)
        update_softmax_of_rows(weights, sums, state, scores, end - key, position - key, num_rows, window, cap)
        low = max(key, first)
        at = low
        while at < end:
            count, page = count_contiguous_keys(at, end, block_tokens), table[at // block_tokens]
            value = page * pages.shape[1] + start + side + at % block_tokens * size
            for k in range(at - key, at - key + count):
                starts[k] = value
                value += size
            if scales is not None:
                for head in range(num_heads):
                    m, first_scale = head * group, scale_start + head * block_tokens + at % block_tokens
                    own = scales[page, first_scale + side // size : first_scale + side // size + count]
                    multiply_columns(weights[m : m + group, at - key : at - key + count], own)
            at += count
        # The values of keys that are not visible may be NaN.
        for k in range(low - key):
            starts[k] = starts[low - key]
        for head in range(num_heads):
            add_weighted_rows(
                sums[head * group : (head + 1) * group],
                weights[head * group : (head + 1) * group],
                numbers[head * head_elements :],
                starts,
                PREFETCH_ELEMENTS,
                _ONE,
                size,
                end - key,
            )


@compiled
def attend_tile(
    rows: Array,
    sums: Array,
    state: Array,
    scratch: Array,
    operands: Array,
    pages: Array,
    scales: Array | None,
    table: Array,
    before: Int,
    group: Int,
    factor: Float,
    window: Int,
    cap: Float,
    block_tokens: Int,
    start: Int,
    side: Int,
    scale_start: Int,
) -> None:
    """Computes attention of one KV head for the queries in `rows` [M, D]. Updates sums [M, D] and state [M, 3].

    Row m belongs to the token at position `before + m // group`. The row sees that token and the `window - 1` tokens
    before that token.
    factor: multiplies the scores. cap: the soft cap of the scores, 0 for none.
    """
    num_rows, size = rows.shape
    block = BLOCK_KEYS * size
    transposed = as_matrix(operands[:block], BLOCK_KEYS)
    block_rows = as_matrix(operands[block : 2 * block], size)
    all_weights = as_matrix(operands[2 * block : 2 * block + num_rows * BLOCK_KEYS], BLOCK_KEYS)
    all_scores = as_matrix(scratch[: num_rows * BLOCK_KEYS], BLOCK_KEYS)
    first, visible = max(0, before + 1 - window), before + (num_rows - 1) // group + 1
    for key in range(first - first % BLOCK_KEYS, visible, BLOCK_KEYS):
        count, low = min(BLOCK_KEYS, visible - key), max(key, first) - key
        scores, weights = all_scores[:, low:count], all_weights[:, low:count]
        load_block(block_rows[low:count], pages, table, key + low, block_tokens, start)
        for m in range(num_rows):
            clear(all_scores[m])
        if num_rows < TRANSPOSE_ROWS and size % LANES == 0:
            score_contiguous_keys(scores, rows, as_row(block_rows[low:]))
        else:
            transpose(transposed, block_rows, low, count)
            add_weighted_rows(all_scores, rows, as_row(transposed), BLOCK_KEYS, 0, _ONE, count, size)
        if scales is not None:
            scale_block(scores, scales, table, key + low, block_tokens, scale_start)
        for m in range(num_rows):
            multiply(all_scores[m], factor)
        update_softmax_of_rows(all_weights, sums, state, all_scores, count, before - key, group, window, cap)
        load_block(block_rows[low:count], pages, table, key + low, block_tokens, start + side)
        if scales is not None:
            scale_block(weights, scales, table, key + low, block_tokens, scale_start + side // size)
        clear(as_row(block_rows[:low]))
        add_weighted_rows(sums, all_weights, as_row(block_rows), size, 0, _ONE, size, count)


# Fields of an attention job: the fields of the call come first, then the model's rule, then the step.
#
# LAYER_START and SCALE_START are where the layer's elements and scales begin in a page.
# TILES [n, 4] are (sequence, first token, tokens, KV tokens before the first).
# ITEM_HEADS is the number of KV heads of an item, a divisor of KV_HEADS.
# SCALES is used only in fp8. SINKS [1, heads] are `INITIAL_MAX` in a model without sinks.
# SIDES is 1 if values are in keys, so V begins where K does. Each of the KV_HEADS is then the only one in a page, with
# a part of its query heads, and ITEM_HEADS is 1.
(
    Q,
    OUT,
    LAYER_START,
    SCALE_START,
    SINKS,
    SCALE,
    WINDOW,
    SOFTCAP,
    PAGES,
    TILES,
    BLOCK_TABLES,
    SCRATCH,
    OPERANDS,
    STARTS,
    KV_HEADS,
    GROUP,
    HEAD_DIM,
    BLOCK_TOKENS,
    ITEM_HEADS,
    SCALES,
    SIDES,
) = range(21)


def attend_worker(job: Job) -> None:
    """Computes attention for tiles of queries. Each item of the job is one tile and ITEM_HEADS consecutive KV heads."""
    attend_items(job, read_model_matrix(job, PAGES), None, 0)


def attend_fp8_worker(job: Job) -> None:
    """Like `attend_worker`, for KV in fp8."""
    scales = read_bfloat16_matrix(job, SCALES)
    attend_items(job, read_byte_matrix(job, PAGES), scales, read_int(job, SCALE_START))


@compiled
def attend_items(job: Job, pages: Array, scales: Array | None, scale_start: Int) -> None:
    q, out = read_model_matrix(job, Q), read_model_matrix(job, OUT)
    tiles, block_tables = read_int32_matrix(job, TILES), read_int32_matrix(job, BLOCK_TABLES)
    kv_heads, group, size = read_int(job, KV_HEADS), read_int(job, GROUP), read_int(job, HEAD_DIM)
    block_tokens, factor = read_int(job, BLOCK_TOKENS), read_float(job, SCALE) * LOG2_E
    window, cap = read_int(job, WINDOW), read_float(job, SOFTCAP) * LOG2_E
    item_heads, sinks = read_int(job, ITEM_HEADS), read_float_matrix(job, SINKS)[0]
    sides = read_int(job, SIDES)
    # From one KV head to the next.
    head_elements, head_scales = (block_tokens * size, block_tokens) if sides > 1 else (0, 0)
    side = kv_heads * head_elements
    worker = take_thread_index(job)
    scratch, operands = read_float_matrix(job, SCRATCH)[worker], read_operand_matrix(job, OPERANDS)[worker]
    starts = read_int64_matrix(job, STARTS)[worker]
    all_queries = as_matrix(operands[: TILE_ROWS * size], size)
    all_sums = as_matrix(scratch[: TILE_ROWS * size], size)
    all_state = as_matrix(scratch[TILE_ROWS * size : TILE_ROWS * (size + 3)], 3)
    rest, rest_operands = scratch[TILE_ROWS * (size + 3) :], operands[TILE_ROWS * size :]
    item = take_item(job)
    while item < count_items(job):
        tile, head = item * item_heads // kv_heads, item * item_heads % kv_heads
        b, first, tokens, before = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        head_rows = tokens * group
        num_rows = item_heads * head_rows
        own_q, sums, state = q[first : first + tokens], all_sums[:num_rows], all_state[:num_rows]
        for m in range(num_rows):
            clear(sums[m])
            sink = sinks[(head + m // head_rows) * group + m % group] * LOG2_E
            state[m, 0], state[m, 1], state[m, 2] = sink, _ONE, _ZERO
        start, table = read_int(job, LAYER_START) + head * head_elements, block_tables[b]
        # Elements in fp8 are only multiplied in pairs after they were copied as bfloat16.
        if tokens == 1 and size % LANES == 0 and not (HAS_BFLOAT16_DOT and scales is not None):
            copy_queries(all_queries[:num_rows], own_q, head * group, group * item_heads)
            attend_token(
                all_queries[:num_rows],
                sums,
                state,
                rest,
                rest_operands,
                starts,
                pages,
                scales,
                table,
                before,
                group,
                factor,
                window,
                cap,
                block_tokens,
                start,
                side,
                scale_start + head * head_scales,
            )
        else:
            for h in range(item_heads):
                low, high = h * head_rows, (h + 1) * head_rows
                copy_queries(all_queries[:head_rows], own_q, (head + h) * group, group)
                attend_tile(
                    all_queries[:head_rows],
                    sums[low:high],
                    state[low:high],
                    rest,
                    rest_operands,
                    pages,
                    scales,
                    table,
                    before,
                    group,
                    factor,
                    window,
                    cap,
                    block_tokens,
                    start + h * head_elements,
                    side,
                    scale_start + (head + h) * head_scales,
                )
        for m in range(num_rows):
            row = m % head_rows
            column = ((head + m // head_rows) * group + row % group) * size
            mine = out[first + row // group, column : column + size]
            if state[m, 2] > _ZERO:
                fill(mine, _NAN)
            else:
                write_row(mine, sums[m], _ONE / state[m, 1])
        item = take_item(job)


@compiled
def write_row(out: Array, sums: Array, factor: Float) -> None:
    for i in range(sums.shape[0]):
        out[i] = narrow(sums[i] * factor, out)
