"""Replaces embeddings and logits of tokens by those of an adapter's own rows, in plain torch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slora_kernels.batch import TokenRows
from slora_kernels.host_copies import upload
from slora_kernels.layout import SEGMENT_BYTES
from slora_kernels.torch.lora_matmuls import read_rows
from slora_kernels.torch.row_blocks import multiply_rows

# Rows of a head that are multiplied at a time, which stay in a core's own cache. There are few sizes, because
# `multiply_rows` makes a trial for each.
_CPU_SIZES = (32, 512)
_GPU_ROWS = 1 << 14


def read_token_ids(rows: TokenRows) -> Tensor:
    """int32 [count], ascending."""
    return read_rows(rows.pages, rows.page_ids, rows.first_id, 1, rows.count, torch.int32)[0]


def replace_embeddings(out: Tensor, token_ids: Tensor, rows: TokenRows, factor: float | Tensor = 1.0) -> None:
    """Overwrites the rows of out [T, H] whose token_ids [T] have a row of their own, by factor times that row."""
    own_ids = read_token_ids(rows)
    places = torch.searchsorted(own_ids, token_ids.to(torch.int32)).clamp_max(rows.count - 1)
    is_replaced = own_ids[places] == token_ids
    width, page_segments = out.shape[1], rows.pages.shape[1] // SEGMENT_BYTES
    row_segments = -(-width * out.element_size() // SEGMENT_BYTES)
    offsets = torch.arange(row_segments, device=out.device)
    segments = rows.first_row + places[:, None] * row_segments + offsets
    pages = upload(np.array(rows.page_ids), out.device)[segments // page_segments]
    found = rows.pages.view(-1, SEGMENT_BYTES)[pages * page_segments + segments % page_segments]
    values = found.flatten(1).view(out.dtype)[:, :width]
    out.copy_(torch.where(is_replaced[:, None], values * factor, out))


def token_logits(hidden: Tensor, rows: TokenRows) -> Tensor:
    """See `Kernels.token_logits`. The rows are copied from the pages, some at a time."""
    on_cpu, width = hidden.device.type == "cpu", hidden.shape[1]
    row_segments = -(-width * hidden.element_size() // SEGMENT_BYTES)
    multiply: Callable[[Tensor, Tensor], Tensor] = multiply_rows if on_cpu else torch.nn.functional.linear
    step, products = _CPU_SIZES[-1] if on_cpu else _GPU_ROWS, []
    for start in range(0, rows.count, step):
        count = min(step, rows.count - start)
        first = rows.first_row + start * row_segments
        weight = read_rows(rows.pages, rows.page_ids, first, count, width, hidden.dtype)
        if on_cpu:
            size = next(size for size in _CPU_SIZES if count <= size)
            padded = weight.new_zeros(size, width)
            padded[:count] = weight
            weight = padded
        products.append(multiply(hidden, weight)[:, :count])
    return torch.cat(products, dim=1)


def replace_logits(logits: Tensor, own_logits: Tensor, places: Tensor, rows: TokenRows) -> None:
    """Overwrites the logits of tokens that have a row of their own, in the rows `places` of logits.

    logits: [N, vocab_size], or [N, vocab_size + MAX_ADDED_ROWS]. own_logits: [n, rows.count], the result of
    `token_logits`. places: int64 [n].
    """
    if rows.count == logits.shape[1]:
        logits[places] = own_logits
    else:
        logits[places[:, None], read_token_ids(rows).long()] = own_logits
