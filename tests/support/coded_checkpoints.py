"""Writes checkpoints of 4-bit weights as the tools of their formats do, and the same weights dequantized."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# The columns or rows of eight codes in a word, from its lowest bits on.
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class CodedForm:
    """method: compressed-tensors, gptq, gptq_v2, awq, nf4 or fp4. group: columns that share a scale; None: a row."""

    method: str
    group: int | None
    dtype: torch.dtype
    is_symmetric: bool = True
    has_order: bool = False  # Whether the group of each column is stored.
    is_nested: bool = False  # Whether the scales of nf4 and fp4 are stored in 8 bits.
    storage: torch.dtype = torch.uint8  # In which the codes of nf4 and fp4 are stored.

    def config(self) -> dict[str, Any]:
        """quantization_config."""
        size = -1 if self.group is None else self.group
        if self.method in ("nf4", "fp4"):
            return {
                "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
                "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": self.method,
                "bnb_4bit_use_double_quant": self.is_nested, "llm_int8_enable_fp32_cpu_offload": False,
                "bnb_4bit_quant_storage": str(self.storage).removeprefix("torch."), "llm_int8_threshold": 6.0,
                "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
            }  # fmt: skip
        if self.method.startswith("gptq"):
            return {
                "quant_method": "gptq", "bits": 4, "group_size": size, "sym": self.is_symmetric, "desc_act": False,
                "checkpoint_format": self.method, "damp_percent": 0.01, "true_sequential": True, "lm_head": False,
                "pack_dtype": "int32", "dynamic": None, "meta": {"quantizer": ["some:1.0"]},
            }  # fmt: skip
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": None,
            }  # fmt: skip
        weights = {
            "num_bits": 4, "type": "int", "symmetric": self.is_symmetric, "dynamic": False,
            "strategy": "channel" if self.group is None else "group", "group_size": self.group,
            "actorder": "group" if self.has_order else None, "observer": "minmax",
        }  # fmt: skip
        group = {
            "targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None,
            "format": "pack-quantized",
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.20.0",
        }  # fmt: skip


def find_normal_quantiles() -> Tensor:
    """The 16 numbers of nf4: quantiles of the normal distribution, eight above zero, divided by the largest."""
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n)[:-1].double()) for n in (9, 8))
    quantiles = torch.cat((above, -below, torch.zeros(1))).float().sort().values
    return quantiles / quantiles.max()


FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
TABLES = {"nf4": find_normal_quantiles(), "fp4": FP4}
# The blocks of which double quantization rounds the scales to the numbers of a map.
NESTED_BLOCK = 256
NESTED_MAP = torch.linspace(-1, 1, 256) ** 3


@dataclass(frozen=True)
class BlockCodes:
    """A weight as bitsandbytes rounds it: the codes of its flattened numbers, int64 [N * K]."""

    codes: Tensor
    table: Tensor
    scales: Tensor  # float32 [blocks]
    tensors: dict[str, Tensor]  # How the scales are stored, by the end of the name.
    offset: float | None

    def decode(self, shape: torch.Size) -> Tensor:
        return (self.table[self.codes].view(len(self.scales), -1) * self.scales[:, None]).view(shape)


def find_nearest(numbers: Tensor, table: Tensor) -> Tensor:
    return torch.cat([(part[:, None] - table).abs().argmin(1) for part in numbers.flatten().split(1 << 14)])


def round_to_blocks(weight: Tensor, form: CodedForm) -> BlockCodes:
    assert form.group is not None
    blocks, table = weight.float().view(-1, form.group), TABLES[form.method]
    scales, offset = blocks.abs().amax(1), None
    tensors = {"absmax": scales}
    if form.is_nested:
        offset = float(scales.mean())
        parts = (scales - offset).split(NESTED_BLOCK)
        largest = torch.stack([part.abs().max() for part in parts])
        codes = [find_nearest(part / most, NESTED_MAP) for part, most in zip(parts, largest, strict=True)]
        scales = torch.cat(
            [NESTED_MAP[part] * most + offset for part, most in zip(codes, largest, strict=True)]
        )
        tensors = {
            "absmax": torch.cat(codes).to(torch.uint8),
            "nested_absmax": largest,
            "nested_quant_map": NESTED_MAP,
        }
    return BlockCodes(find_nearest(blocks / scales[:, None], table), table, scales, tensors, offset)


def write_blocks(path: str, weight: Tensor, form: CodedForm) -> dict[str, Tensor]:
    stored = round_to_blocks(weight, form)
    state = {
        "quant_type": form.method, "blocksize": form.group, "dtype": "bfloat16", "shape": list(weight.shape),
    }  # fmt: skip
    if stored.offset is not None:
        state |= {
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": stored.offset,
        }  # fmt: skip
    codes = (stored.codes[::2] * 16 + stored.codes[1::2]).to(torch.uint8)
    return {
        path: codes.view(form.storage).view(-1, 1),
        **{f"{path}.{end}": tensor.clone() for end, tensor in stored.tensors.items()},
        f"{path}.quant_map": stored.table.clone(),
        f"{path}.quant_state.bitsandbytes__{form.method}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


@dataclass(frozen=True)
class Codes:
    """codes: int64 [N, K]. zeros: int64 [N, groups]. scales: [N, groups] in the stored dtype."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    def decode(self) -> Tensor:
        """float32 [N, K]."""
        grouped = self.codes.view(*self.scales.shape, -1)
        return ((grouped - self.zeros[:, :, None]) * self.scales.float()[:, :, None]).view_as(self.codes)


def round_to_codes(weight: Tensor, form: CodedForm) -> Codes:
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, form.group or columns)
    if form.is_symmetric:
        scales = (groups.abs().amax(2) / 7).to(form.dtype)
        zeros = torch.full(scales.shape, 8)
    else:
        smallest, largest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((largest - smallest) / 15).to(form.dtype)
        # A zero point of 0 can't be stored by gptq.
        least = 1 if form.method == "gptq" else 0
        zeros = (-smallest / scales.float()).round().long().clamp(least, 15)
    codes = (groups / scales.float()[:, :, None]).round().long() + zeros[:, :, None]
    return Codes(codes.clamp(0, 15).view(rows, columns), zeros, scales)


def dequantize(weight: Tensor, form: CodedForm) -> Tensor:
    """float32 [N, K]: the numbers that a checkpoint of this form has for the weight."""
    if form.method in TABLES:
        return round_to_blocks(weight, form).decode(weight.shape)
    return round_to_codes(weight, form).decode()


def pack_words(codes: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """int32 [R, ceil(C / 8)] of codes [R, C]."""
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int64)
    padded[:, :columns] = codes
    eights = padded.view(rows, -1, 8)
    words = sum(eights[:, :, column] << 4 * place for place, column in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def write_codes(path: str, weight: Tensor, form: CodedForm) -> dict[str, Tensor]:
    """The tensors of the linear whose weight is called `path`."""
    if form.method in TABLES:
        return write_blocks(path, weight, form)
    stored = round_to_codes(weight, form)
    columns = weight.shape[1]
    groups = torch.arange(columns, dtype=torch.int32) // (form.group or columns)
    linear = path.removesuffix("weight")
    if form.method.startswith("gptq"):
        return {
            f"{linear}qweight": pack_words(stored.codes).T.contiguous(),
            f"{linear}qzeros": pack_words(stored.zeros.T - int(form.method == "gptq")),
            f"{linear}scales": stored.scales.T.contiguous(),
            f"{linear}g_idx": groups,
        }
    if form.method == "awq":
        return {
            f"{linear}qweight": pack_words(stored.codes.T, AWQ_ORDER),
            f"{linear}qzeros": pack_words(stored.zeros.T, AWQ_ORDER),
            f"{linear}scales": stored.scales.T.contiguous(),
        }
    tensors = {
        f"{path}_packed": pack_words(stored.codes),
        f"{path}_scale": stored.scales,
        f"{path}_shape": torch.tensor(weight.shape),
    }
    if not form.is_symmetric:
        tensors[f"{path}_zero_point"] = pack_words(stored.zeros.T).T.contiguous()
    if form.has_order:
        tensors[f"{path}_g_idx"] = groups
    return tensors


def write_coded_checkpoint(source: Path, root: Path, form: CodedForm, kept: str = "\0") -> tuple[Path, Path]:
    """Writes the model of `source` with linears of 4 bits, and with the same weights dequantized. Returns both paths.

    kept: part of the names of linears that stay unquantized.
    """
    stored, exact = root / "stored", root / "exact"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written: dict[Path, dict[str, Tensor]] = {stored: {}, exact: {}}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight") and kept not in name:
            written[stored] |= write_codes(name, tensor, form)
            written[exact][name] = dequantize(tensor, form)
        else:
            written[stored][name] = written[exact][name] = tensor
    for directory, tensors in written.items():
        directory.mkdir(parents=True)
        fields = config | ({"quantization_config": form.config()} if directory == stored else {})
        (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        generation = (source / "generation_config.json").read_text(encoding="utf-8")
        (directory / "generation_config.json").write_text(generation, encoding="utf-8")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return stored, exact


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_mxfp4(directory: Path, plain: Path) -> None:
    """Draws weights in MXFP4 for the experts of gpt-oss in `plain`, and writes the checkpoint with them to `directory`.

    The experts of `plain` get the same numbers. A weight [E, in, out] is stored as codes [E, out, in / 32, 16] and the
    exponents [E, out, in / 32] of their scales.
    """
    random = torch.Generator().manual_seed(0)
    stored, numbers = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        numbers[name] = stored[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        del stored[name]
        count, width, rows = tensor.shape
        codes = torch.randint(16, (count, rows, width // 32, 32), generator=random, dtype=torch.uint8)
        exponents = torch.randint(122, 126, (count, rows, width // 32), generator=random, dtype=torch.uint8)
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = exponents
        signs = 1 - 2.0 * (codes >= 8)
        scaled = _FP4[(codes % 8).long()] * signs * 2.0 ** (exponents.float() - 127)[..., None]
        numbers[name] = scaled.flatten(2).mT.contiguous()
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
