"""Reads how a config.json describes weights that are stored as 8-bit numbers.

Supported are symmetric int8 and float8 e4m3 weights. They have one scale per row, per tensor, or per block of rows and
columns. The formats are compressed-tensors (LLM Compressor), fp8 (DeepSeek, Qwen3-FP8, AutoFP8) and fbgemm_fp8.

If a checkpoint also quantizes activations, only its weights are read as quantized. Activations stay exact, and their
scales are not used. All supported formats are numbers times scales, which need no library. Formats that need a library
(packed 4-bit numbers, codebooks, rotations) are refused by name.

This module does not import torch, like all modules that read config.json.
"""

from dataclasses import dataclass
from typing import Any, Literal

from slora.models.config_fields import ConfigFields

Form = Literal["int8", "fp8"]
_REMEDY = "use the unquantized checkpoint, and set quantization to int8 or fp8 to round it while it is read"
_METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8")
# The formats of compressed-tensors for 8-bit numbers, stored one per byte or four per 32-bit word.
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_FORMS: dict[object, Form] = {"int": "int8", "float": "fp8"}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint stores its quantized weights."""

    method: str
    form: Form
    block: (
        tuple[int, int] | None
    )  # Rows and columns that share a scale. None: one scale per row or per tensor.


def read_quantization(fields: ConfigFields) -> StoredQuantization | None:
    """Reads quantization_config if the config has one. Raises ConfigError naming the unsupported field."""
    if "quantization_config" not in fields:
        return None
    inner = fields.within("quantization_config", fields.table("quantization_config"))
    method = inner.text("quant_method", "")
    if method == "compressed-tensors":
        return _read_compressed_tensors(inner)
    if method not in _METHODS:
        raise inner.refusal("quant_method", f"; supported are {', '.join(_METHODS)}; {_REMEDY}")
    if inner.text("fmt", "e4m3") != "e4m3":
        raise inner.refusal("fmt", f"; only e4m3 is served; {_REMEDY}")
    return StoredQuantization(method, "fp8", _read_block(inner, "weight_block_size"))


def _read_compressed_tensors(fields: ConfigFields) -> StoredQuantization:
    if fields.text("format", "naive-quantized") not in _FORMATS:
        raise fields.refusal("format", f"; supported are {', '.join(_FORMATS)}; {_REMEDY}")
    if fields.within("sparsity_config", fields.table("sparsity_config")).text("format", "dense") != "dense":
        raise fields.refusal("sparsity_config", f"; sparse weights are not served; {_REMEDY}")
    if fields.table("transform_config"):
        raise fields.refusal("transform_config", f"; transformed weights are not served; {_REMEDY}")
    groups = fields.table("config_groups")
    found = {
        _read_group(fields.within(f"config_groups.{name}", group)) for name, group in _tables(fields, groups)
    }
    if len(found) != 1:
        raise fields.refusal(
            "config_groups", f"; all linear layers must be quantized in the same way; {_REMEDY}"
        )
    return found.pop()


def _tables(fields: ConfigFields, groups: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if not all(isinstance(group, dict) for group in groups.values()):
        raise fields.refusal("config_groups", "; it must hold objects")
    return list(groups.items())


def _read_group(group: ConfigFields) -> StoredQuantization:
    weights = group.within("weights", group.table("weights"))
    form = _FORMS.get(weights.text("type", "int"))
    if form is None or weights.whole("num_bits") != 8 or not weights.flag("symmetric", default=True):
        raise group.refusal("weights", f"; only symmetric 8-bit numbers are served; {_REMEDY}")
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.refusal("strategy", f"; supported are tensor, channel and block; {_REMEDY}")
    block = _read_block(weights, "block_structure") if strategy == "block" else None
    return StoredQuantization("compressed-tensors", form, block)


def _read_block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    if name not in fields:
        return None
    rows, columns = fields.numbers(name, 2)
    if rows % 1 or columns % 1:
        raise fields.refusal(name, "; it must have whole numbers")
    return int(rows), int(columns)
