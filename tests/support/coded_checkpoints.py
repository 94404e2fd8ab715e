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
    """method: compressed-tensors, gptq, gptq_v2 or awq. group: columns that share a scale; None: all of a row."""

    method: str
    group: int | None
    dtype: torch.dtype
    is_symmetric: bool = True
    has_order: bool = False  # Whether the group of each column is stored.

    def config(self) -> dict[str, Any]:
        """quantization_config."""
        size = -1 if self.group is None else self.group
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
            written[exact][name] = round_to_codes(tensor, form).decode()
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
