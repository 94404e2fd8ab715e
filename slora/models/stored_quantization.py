"""Reads how a config.json describes weights that are stored as numbers of 8 or 4 bits.

Supported with 8 bits are symmetric int8 and float8 e4m3 weights. They have one scale per row, per tensor, or per block
of rows and columns. The formats are compressed-tensors (LLM Compressor), fp8 (DeepSeek, Qwen3-FP8, AutoFP8) and
fbgemm_fp8. If such a checkpoint also quantizes activations, only its weights are read as quantized. Activations stay
exact, and their scales are not used.

Supported with 4 bits are integers with a scale for each group of columns or each row, and maybe a zero point. The
formats are compressed-tensors, GPTQ and AWQ. bitsandbytes has tables of 16 numbers (nf4, fp4) instead of integers.

All supported formats are numbers times scales, which need no library. Formats that need a library (codebooks of
vectors, rotations) are refused by name.

This module does not import torch, like all modules that read config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slora.models.config_fields import ConfigFields

Form = Literal["int8", "fp8", "int4"]
_REMEDY = "use the unquantized checkpoint, and set quantization to int8 or fp8 to round it while it is read"
_METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "gptq", "awq", "bitsandbytes")
# The formats of compressed-tensors for 8-bit numbers, stored one per byte or four per 32-bit word.
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_FORMS: dict[object, Form] = {"int": "int8", "float": "fp8"}
# Groups of other sizes do not suit `slora_kernels.coded_weight`.
_GROUP_UNIT = 32
# gptq stores zero points less 1, and gptq_v2 as they are. nf4 and fp4 are those of bitsandbytes.
CodeFormat = Literal["compressed-tensors", "gptq", "gptq_v2", "awq", "nf4", "fp4"]
# bitsandbytes writes the size of a block beside each weight. This is the size that it chooses itself.
_USUAL_BLOCK = 64


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """How weights of 4 bits are stored."""

    format: CodeFormat
    # Columns that share a scale. None: a row has one scale. For nf4 and fp4, the usual number.
    group: int | None
    has_zero_points: bool


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint stores its quantized weights."""

    method: str
    form: Form
    block: (
        tuple[int, int] | None
    )  # Rows and columns that share a scale. None: one scale per row or per tensor.
    codes: StoredCodes | None = None  # For int4 only.
    # Beginnings or ends of the paths of linears that bitsandbytes left in the model's dtype.
    kept: tuple[str, ...] = ()


def read_quantization(fields: ConfigFields) -> StoredQuantization | None:
    """Reads quantization_config if the config has one. Raises ConfigError naming the unsupported field."""
    if "quantization_config" not in fields:
        return None
    inner = fields.within("quantization_config", fields.table("quantization_config"))
    method = inner.text("quant_method", "")
    if method in _READERS:
        return _READERS[method](inner)
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
    stored = found.pop()
    if stored.form == "int4" and fields.text("format", "") != "pack-quantized":
        raise fields.refusal("format", f"; 4-bit numbers are served only as pack-quantized; {_REMEDY}")
    return stored


def _tables(fields: ConfigFields, groups: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if not all(isinstance(group, dict) for group in groups.values()):
        raise fields.refusal("config_groups", "; it must hold objects")
    return list(groups.items())


def _read_group(group: ConfigFields) -> StoredQuantization:
    weights = group.within("weights", group.table("weights"))
    kind, num_bits = weights.text("type", "int"), weights.whole("num_bits")
    if kind == "int" and num_bits == 4:
        return _read_codes(group, weights)
    form = _FORMS.get(kind)
    if form is None or num_bits != 8 or not weights.flag("symmetric", default=True):
        raise group.refusal(
            "weights", f"; only symmetric 8-bit numbers and 4-bit integers are served; {_REMEDY}"
        )
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.refusal(
            "strategy", f"; supported for 8-bit numbers are tensor, channel and block; {_REMEDY}"
        )
    block = _read_block(weights, "block_structure") if strategy == "block" else None
    return StoredQuantization("compressed-tensors", form, block)


def _read_codes(group: ConfigFields, weights: ConfigFields) -> StoredQuantization:
    for name in ("input_activations", "output_activations"):
        if group.table(name):
            raise group.refusal(
                name, f"; with 4-bit weights, only activations that are not quantized are served; {_REMEDY}"
            )
    strategy = weights.text("strategy", "group")
    if strategy not in ("group", "channel"):
        raise weights.refusal("strategy", f"; supported for 4-bit numbers are group and channel; {_REMEDY}")
    size = _read_group_size(weights) if strategy == "group" else None
    codes = StoredCodes(
        "compressed-tensors", size, has_zero_points=not weights.flag("symmetric", default=True)
    )
    return StoredQuantization("compressed-tensors", "int4", None, codes)


def _read_gptq(fields: ConfigFields) -> StoredQuantization:
    group = _read_bits(fields)
    kind = fields.text("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise fields.refusal("checkpoint_format", f"; supported are gptq and gptq_v2; {_REMEDY}")
    if fields.table("dynamic"):
        raise fields.refusal("dynamic", f"; all linear layers must be quantized in the same way; {_REMEDY}")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.refusal("pack_dtype", f"; only int32 is served; {_REMEDY}")
    is_symmetric = fields.flag("sym")
    codes = StoredCodes("gptq_v2" if kind == "gptq_v2" else "gptq", group, has_zero_points=not is_symmetric)
    return StoredQuantization("gptq", "int4", None, codes)


def _read_awq(fields: ConfigFields) -> StoredQuantization:
    group = _read_bits(fields)
    if fields.text("version", "gemm").lower() != "gemm":
        raise fields.refusal("version", f"; only gemm is served; {_REMEDY}")
    if fields.text("backend", "autoawq") != "autoawq":
        raise fields.refusal("backend", f"; only autoawq is served; {_REMEDY}")
    if not fields.flag("zero_point", default=True):
        raise fields.refusal("zero_point", f"; AWQ is served only with zero points; {_REMEDY}")
    return StoredQuantization("awq", "int4", None, StoredCodes("awq", group, has_zero_points=True))


def _read_bitsandbytes(fields: ConfigFields) -> StoredQuantization:
    if fields.flag("load_in_8bit"):
        raise fields.refusal(
            "load_in_8bit",
            "; LLM.int8 rounds activations too, and only 4 bits of bitsandbytes are served; use the unquantized "
            "checkpoint, and set quantization to int8",
        )
    if not fields.flag("load_in_4bit"):
        raise fields.refusal("load_in_4bit", f"; only 4 bits of bitsandbytes are served; {_REMEDY}")
    kind = fields.text("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise fields.refusal("bnb_4bit_quant_type", f"; supported are nf4 and fp4; {_REMEDY}")
    codes = StoredCodes("nf4" if kind == "nf4" else "fp4", _USUAL_BLOCK, has_zero_points=False)
    kept = fields.texts("llm_int8_skip_modules") or ()
    return StoredQuantization("bitsandbytes", "int4", None, codes, kept)


def _read_bits(fields: ConfigFields) -> int | None:
    """Checks the number of bits. Returns the size of a group; None: a row has one scale."""
    if fields.whole("bits") != 4:
        raise fields.refusal("bits", f"; of this quant_method, only 4 bits are served; {_REMEDY}")
    if fields.whole("group_size", least=-1) == -1:
        return None
    return _read_group_size(fields)


def _read_group_size(fields: ConfigFields) -> int:
    size = fields.whole("group_size")
    if size % _GROUP_UNIT:
        raise fields.refusal("group_size", f"; it must be a multiple of {_GROUP_UNIT}; {_REMEDY}")
    return size


def _read_block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    if name not in fields:
        return None
    rows, columns = fields.numbers(name, 2)
    if rows % 1 or columns % 1:
        raise fields.refusal(name, "; it must have whole numbers")
    return int(rows), int(columns)


_READERS: Mapping[str, Callable[[ConfigFields], StoredQuantization]] = {
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "bitsandbytes": _read_bitsandbytes,
}
