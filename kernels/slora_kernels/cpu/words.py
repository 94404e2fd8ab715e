"""What a worker is called with, as the 64-bit words of its job (see `language`)."""

import struct
from array import array
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from slora_kernels.cpu.language import NEXT_ITEM, NEXT_WORKER, NUM_ITEMS, NUM_WORDS

# A field as a job holds it, and fields that follow each other.
Words = tuple[int, int, int]
JobWords: TypeAlias = "array[int]"
Field = Words | Tensor | int | float
# In place of a tensor that is not there.
NOTHING: Words = (0, 1, 0)
assert (NEXT_ITEM, NEXT_WORKER, NUM_ITEMS, NUM_WORDS) == (0, 1, 2, 3)


def pack(field: Field) -> Words:
    """Numbers first: asking whether they are tensors is slow."""
    if isinstance(field, tuple):
        return field
    if isinstance(field, int):
        return field, 0, 0
    if isinstance(field, float):
        return _pack_float(field)
    return pack_rows(field) if field.dim() > 1 else pack_row(field)


@cache
def _pack_float(number: float) -> Words:
    """Of as many as a model's constants are."""
    return struct.unpack("q", struct.pack("d", number))[0], 0, 0


def pack_rows(rows: Tensor) -> Words:
    strides = rows.stride()
    assert strides[-1] == 1, f"rows of stride {strides[-1]}"
    return rows.data_ptr(), len(rows), strides[0]


def pack_row(row: Tensor) -> Words:
    return row.data_ptr(), 1, len(row)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of what a model's numbers are multiplied by, bridges and weights of attention: bfloat16 in a model of bfloat16,
    where two products may be one instruction; else float32, for weights times scales of V in fp8 reach below what a
    float16 can be."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def pack_all(*fields: Field) -> JobWords:
    return array("q", (word for field in fields for word in pack(field)))


def begin_job(items: int, *words: int) -> JobWords:
    """The first words of a job, none of whose items is taken yet."""
    return array("q", (0, 0, items, *words))


def as_numbers(rows: Tensor, element_bytes: int) -> Words:
    """Rows of something else, the pool's pages say, as the model's numbers."""
    return rows.data_ptr(), rows.shape[0], rows.stride(0) * rows.element_size() // element_bytes
