"""Packs the arguments of a worker into the 64-bit words of a job (see `workers.intrinsics`)."""

import struct
from array import array
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from slora_kernels.cpu.worker_sizes import MAX_SHARES, NEXT_ITEM, NUM_ITEMS, NUM_SHARES, NUM_WORDS

# FieldWords: the words of one field of a job. JobWords: the words of consecutive fields.
FieldWords = tuple[int, int, int]
JobWords: TypeAlias = "array[int]"
Field = FieldWords | Tensor | int | float
# The field of an absent tensor.
NO_TENSOR: FieldWords = (0, 1, 0)
assert (NUM_ITEMS, NUM_SHARES, NEXT_ITEM, NUM_WORDS) == (1, 3, 4, 4 + MAX_SHARES)
_NONE_TAKEN = (0,) * MAX_SHARES
# The fewest rows of a share. See `workers.intrinsics`.
LEAST_SHARED_ROWS = 128


def pack_field(field: Field) -> FieldWords:
    """Packs one field. The tests for numbers come first, because a test for a tensor is slow."""
    if isinstance(field, tuple):
        return field
    if isinstance(field, int):
        return field, 0, 0
    if isinstance(field, float):
        return _pack_float(field)
    return pack_rows(field) if field.dim() > 1 else pack_row(field)


@cache
def _pack_float(number: float) -> FieldWords:
    """Packs a float. The cache is unbounded, because a model only has a few constants."""
    return struct.unpack("q", struct.pack("d", number))[0], 0, 0


def pack_rows(rows: Tensor) -> FieldWords:
    strides = rows.stride()
    assert strides[-1] == 1, f"rows of stride {strides[-1]}"
    # `len` takes three times as long as `shape[0]`.
    return rows.data_ptr(), rows.shape[0], strides[0]


def pack_row(row: Tensor) -> FieldWords:
    return row.data_ptr(), 1, row.shape[0]


@cache
def name_dtype(dtype: torch.dtype) -> str:
    """The name by which `machine_code` knows a dtype."""
    return str(dtype).removeprefix("torch.")


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of values that are multiplied with the model's weights or KV: shrink outputs and attention weights.

    It is bfloat16 in a bfloat16 model, because some CPUs add two bfloat16 products in one instruction. Otherwise it is
    float32, because an attention weight times an fp8 scale of V may underflow float16.
    """
    return dtype if dtype == torch.bfloat16 else torch.float32


def pack_fields(*fields: Field) -> JobWords:
    return array("q", (word for field in fields for word in pack_field(field)))


def begin_job(items: int, *words: int) -> JobWords:
    """A new job with `items` items in one share, none of which is taken. words: the words of its first fields."""
    return array("q", (0, items, 0, 1, *_NONE_TAKEN, *words))


def share_rows(job: JobWords, num_rows: int, num_threads: int) -> None:
    """Divides the items of a job, which are in the order of the rows, into a share for each thread if there are many
    rows.
    """
    if num_rows >= LEAST_SHARED_ROWS * num_threads:
        job[NUM_SHARES] = min(num_threads, MAX_SHARES)


def pack_pages(rows: Tensor, element_bytes: int) -> FieldWords:
    """Like `pack_rows`, but the stride is counted in elements of `element_bytes` bytes.

    The tensor of the pool's pages is uint8, whatever dtype the pages store.
    """
    return rows.data_ptr(), rows.shape[0], rows.stride(0) * rows.element_size() // element_bytes
