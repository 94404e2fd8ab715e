"""An adapter as a library's user names it: a PEFT directory, here or on the hub, or tensors that lie in memory, and how
strongly it counts.

    LoraAdapter("path/to/adapter", weight=0.5)
    LoraAdapter("hf://org/repo@revision")
    LoraAdapter.from_tensors(get_peft_model_state_dict(model), model.peft_config["default"].to_dict())

What it holds is read and validated by the model that is first asked to use it, because only a model knows what fits.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.tensor_file import StoredTensor

__all__ = ["AdapterPath", "LoraAdapter", "TensorAdapter"]

AdapterPath = str | os.PathLike[str]
# Safetensors' names of the dtypes that LoRA weights may have, by the name that torch and numpy (ml_dtypes) give them.
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class TensorAdapter:
    """An adapter's config, as PEFT would write it, and its tensors; a copy, which no training step changes."""

    config: bytes
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, init=False)
class LoraAdapter:
    """weight: a factor on the adapter's own scale, for one request: 0 is the base, 0.5 half the way to the adapter."""

    content: Path | HubReference | TensorAdapter
    weight: float

    def __init__(self, directory: AdapterPath | HubReference | TensorAdapter, *, weight: float = 1.0) -> None:
        """directory: also hf://ORG/REPO[@REVISION][/FOLDER]. Raises ValueError for what only begins like that."""
        object.__setattr__(self, "content", _content(directory))
        object.__setattr__(self, "weight", weight)

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, Any], config: Mapping[str, Any], *, weight: float = 1.0
    ) -> "LoraAdapter":
        """Tensors (torch on any device, or numpy) under the names in PEFT's files, and the fields of a LoraConfig.

        Both are copied. Raises AdapterInvalid for what no file could hold; the rest is checked when it is first used.
        """
        reasons: list[Reason] = []
        stored = {name: _store(name, value, reasons) for name, value in tensors.items()}
        raw = _write_config(config, reasons)
        if reasons:
            raise AdapterInvalid(tuple(reasons))
        return LoraAdapter(TensorAdapter(raw, {t.name: t for t in stored.values() if t}), weight=weight)

    def weighted(self, weight: float) -> "LoraAdapter":
        """The same adapter with another weight."""
        return LoraAdapter(self.content, weight=weight)


def _content(
    directory: AdapterPath | HubReference | TensorAdapter,
) -> Path | HubReference | TensorAdapter:
    if isinstance(directory, HubReference | TensorAdapter):
        return directory
    return HubReference.parse(os.fspath(directory)) or Path(directory)


def _store(name: str, value: Any, reasons: list[Reason]) -> StoredTensor | None:
    array = _to_numpy(value) if isinstance(value, torch.Tensor) else np.array(value, order="C")
    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch.")) if hasattr(value, "dtype") else None
    if dtype is None:
        kind = getattr(value, "dtype", type(value).__name__)
        known = ", ".join(_DTYPES)
        reasons.append(Reason("tensors_malformed", f"tensor {name!r} is {kind}; accepted are {known}"))
        return None
    values = array.view("<u2") if dtype == "BF16" else array
    values.flags.writeable = False
    return StoredTensor(name, dtype, values)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy in C order; numpy has no bfloat16, so that comes as its bits."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return (copy.view(torch.int16) if copy.dtype == torch.bfloat16 else copy).numpy()


def _write_config(config: Mapping[str, Any], reasons: list[Reason]) -> bytes:
    """As PEFT writes adapter_config.json: sets as lists."""
    try:
        return json.dumps(dict(config), default=_listed).encode()
    except (TypeError, ValueError) as error:
        reasons.append(Reason("config_malformed", f"the config can't be written as JSON: {error}"))
        return b""


def _listed(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
