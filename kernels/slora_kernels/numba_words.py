"""What a worker is called with, as the 64-bit words of its job (see `numba_language`)."""

import struct
from array import array

from torch import Tensor

from slora_kernels.numba_language import NEXT_ITEM, NEXT_WORKER, NUM_ITEMS, NUM_WORDS

# A field as a job holds it.
Words = tuple[int, int, int]
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
        return struct.unpack("q", struct.pack("d", field))[0], 0, 0
    if field.dim() == 1:
        return field.data_ptr(), 1, field.shape[0]
    assert field.stride(-1) == 1, f"rows of stride {field.stride(-1)}"
    return field.data_ptr(), field.shape[0], field.stride(0)


def pack_all(*fields: Field) -> "array[int]":
    """The words of fields that follow each other."""
    return array("q", (word for field in fields for word in pack(field)))


def begin_job(items: int, *words: int) -> "array[int]":
    """The first words of a job, none of whose items is taken yet."""
    return array("q", (0, 0, items, *words))


def as_numbers(rows: Tensor, element_bytes: int) -> Words:
    """Rows of something else, the pool's pages say, as the model's numbers."""
    return rows.data_ptr(), rows.shape[0], rows.stride(0) * rows.element_size() // element_bytes
