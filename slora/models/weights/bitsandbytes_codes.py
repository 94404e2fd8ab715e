"""Weights that transformers saved with bitsandbytes in 4 bits, as QLoRA has them.

The codes of a linear [N, K] are those of its flattened weight, in which each block of adjacent numbers has a scale.
Blocks divide the rows, so a block is a group of a `CodedWeight`.

With double quantization, scales are stored as codes of 8 bits. A scale is nested_quant_map[code] * nested_absmax of its
own block + nested_offset. Here as in bitsandbytes, the product and the sum are rounded to float32 one after the other.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.stored_codes import (
    REMEDY,
    FindTensor,
    GroupNumbers,
    StoredCodesTarget,
    check_columns,
)
from slora.models.weights.tensor_place import ELEMENT_BYTES, TensorPlace
from slora.models.weights.weight_blocks import WeightTarget, read_tensor
from slora_kernels.coded_weight import BLOCK_COLUMNS

_FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
# The numbers of the codes. Recent versions of bitsandbytes compute with these, whatever a stored quant_map has.
TABLES: Mapping[str, Tensor] = {
    "nf4": torch.tensor(
        [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ]
    ),
    "fp4": torch.cat((_FP4, -_FP4)),
}  # fmt: skip
# The dtypes of bnb_4bit_quant_storage. All hold the same bytes.
_STORAGE = ("U8", "I8", "F16", "BF16", "F32", "F64")
_DTYPES = {"U8": torch.uint8, "F32": torch.float32}
_FIELDS = ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset")


@dataclass(frozen=True, slots=True)
class _Nesting:
    """How scales are stored as codes. block: the codes that share a nested_absmax."""

    block: int
    offset: float


class BlocksReader:
    """Reads weights of bitsandbytes. form: nf4 or fp4."""

    def __init__(self, checkpoint: Checkpoint, form: str, find: FindTensor) -> None:
        self.table = TABLES[form]
        self._checkpoint = checkpoint
        self._form = form
        self._find = find

    def holds(self, name: str) -> bool:
        return any(_name_state(name, form) in self._checkpoint for form in TABLES)

    def find_codes(self, name: str, shape: tuple[int, int], columns: range) -> TensorPlace:
        """Returns the place of bytes [N, K / 2], whatever their stored dtype and shape are."""
        block, _ = self._read_state(name, shape)
        check_columns(f"{self._checkpoint.directory}: {name}", shape[1], columns, block)
        place = self._checkpoint.find(name)
        if place.dtype not in _STORAGE:
            raise ConfigError(
                f"{place.path}: {name} is {place.dtype}; codes of bitsandbytes are read in {', '.join(_STORAGE)}"
            )
        num_bytes = shape[0] * shape[1] // 2
        place = self._find(name, (num_bytes // ELEMENT_BYTES[place.dtype], 1))
        return TensorPlace(name, place.path, "U8", (shape[0], shape[1] // 2), place.offset)

    def read_numbers(
        self, name: str, shape: tuple[int, int], rows: Sequence[range], columns: range
    ) -> GroupNumbers:
        block, nesting = self._read_state(name, shape)
        if not torch.equal(self._read(f"{name}.quant_map", "F32", 16), self.table):
            raise ConfigError(
                f"{self._checkpoint.directory}: {name}.quant_map has other numbers than {self._form}, which some "
                f"versions of bitsandbytes use and others do not; {REMEDY}"
            )
        count = shape[0] * shape[1] // block
        scales = (
            self._read(f"{name}.absmax", "F32", count)
            if nesting is None
            else self._read_nested(name, count, nesting)
        )
        if not scales.isfinite().all():
            raise ConfigError(
                f"{self._checkpoint.directory}: {name} has scales (absmax) that are not finite; the checkpoint is "
                "damaged"
            )
        groups = range(columns.start // block, columns.stop // block)
        return GroupNumbers(scales.view(shape[0], -1), None).cut(rows, groups)

    def make_target(
        self, codes: Tensor, rows: Sequence[range], columns: range
    ) -> tuple[WeightTarget, Sequence[range], int]:
        return StoredCodesTarget(codes, columns, is_first_high=True), rows, 1

    def _read_nested(self, name: str, count: int, nesting: _Nesting) -> Tensor:
        """The scales of `count` blocks."""
        codes = self._read(f"{name}.absmax", "U8", count)
        factors = self._read(f"{name}.nested_absmax", "F32", -(-count // nesting.block))
        numbers = self._read(f"{name}.nested_quant_map", "F32", 256)[codes.int()]
        numbers *= factors.repeat_interleave(nesting.block)[:count]
        return numbers.add_(torch.tensor(nesting.offset))

    def _read(self, name: str, dtype: str, count: int) -> Tensor:
        place = self._find(name, (count,))
        if place.dtype != dtype:
            raise ConfigError(f"{place.path}: {name} is {place.dtype}; it must be {dtype}")
        tensor = torch.empty(count, dtype=_DTYPES[dtype])
        read_tensor(place, tensor)
        return tensor

    def _read_state(self, name: str, shape: tuple[int, int]) -> tuple[int, _Nesting | None]:
        """Reads the size of a block, and how scales are stored. Raises ConfigError if a field is not as expected."""
        state_name = _name_state(name, self._form)
        if state_name not in self._checkpoint:
            other = next(form for form in TABLES if form != self._form)
            raise ConfigError(
                f"{self._checkpoint.directory}: {name} is stored in {other}, but quantization_config says "
                f"{self._form} (bnb_4bit_quant_type); correct it in config.json, or {REMEDY}"
            )
        place = self._checkpoint.find(state_name)
        state = self._parse_state(place)
        expected: dict[str, Any] = {"quant_type": self._form, "shape": [*shape]}
        is_nested = "nested_offset" in state or f"{name}.nested_absmax" in self._checkpoint
        if is_nested:
            expected["nested_dtype"] = "float32"
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(
                    f"{place.path}: {state_name}: {key} is {state.get(key)!r}; it must be {value!r}"
                )
        block = _read_size(place, state, "blocksize", BLOCK_COLUMNS)
        if not is_nested:
            return block, None
        offset = state.get("nested_offset")
        if not isinstance(offset, float):
            raise ConfigError(f"{place.path}: {state_name}: nested_offset is {offset!r}; it must be a number")
        return block, _Nesting(_read_size(place, state, "nested_blocksize", 1), offset)

    def _parse_state(self, place: TensorPlace) -> dict[str, Any]:
        content = bytes(self._read(place.name, "U8", place.num_bytes).tolist())
        try:
            state = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{place.path}: {place.name} is not JSON: {error}") from error
        if not isinstance(state, dict):
            raise ConfigError(
                f"{place.path}: {place.name} holds a {type(state).__name__}; it must be a JSON object"
            )
        for key in state:
            if key not in _FIELDS:
                raise ConfigError(
                    f"{place.path}: {place.name} has the unknown field {key!r}; known are {', '.join(_FIELDS)}: "
                    f"{REMEDY}"
                )
        return state


def _name_state(weight: str, form: str) -> str:
    return f"{weight}.quant_state.bitsandbytes__{form}"


def _read_size(place: TensorPlace, state: Mapping[str, Any], key: str, unit: int) -> int:
    value = state.get(key)
    if type(value) is not int or value < 1 or value % unit:
        kind = "a positive whole number" if unit == 1 else f"a multiple of {unit}"
        raise ConfigError(f"{place.path}: {place.name}: {key} is {value!r}; it must be {kind}: {REMEDY}")
    return value
