"""An adapter as a library user names it: a PEFT directory, a hub repository or tensors, with a weight.

    LoraAdapter("path/to/adapter", weight=0.5)
    LoraAdapter("hf://org/repo@revision")
    LoraAdapter.from_tensors(get_peft_model_state_dict(model), model.peft_config["default"].to_dict())

The first model that uses the adapter reads and validates it, because its shapes depend on the model.
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

AdapterPath = str | os.PathLike[str]
# Safetensors' names of the dtypes that LoRA weights may have, keyed by their names in torch and numpy (ml_dtypes).
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class TensorAdapter:
    """An adapter's config, in PEFT's format, and a copy of its tensors. Training steps do not change the copy."""

    config: bytes
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, init=False)
class LoraAdapter:
    """An adapter and the weight with which a request uses it.

    weight: a factor on the adapter's own scale. With 0 the adapter has no effect, with 0.5 half of its effect.
    """

    content: Path | HubReference | TensorAdapter
    weight: float

    def __init__(self, directory: AdapterPath | HubReference | TensorAdapter, *, weight: float = 1.0) -> None:
        """directory: a path, or hf://ORG/REPO[@REVISION][/FOLDER]. Raises ValueError for a malformed hf:// address."""
        object.__setattr__(self, "content", _content(directory))
        object.__setattr__(self, "weight", weight)

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, Any], config: Mapping[str, Any], *, weight: float = 1.0
    ) -> "LoraAdapter":
        """Builds an adapter from tensors and the fields of a LoraConfig.

        tensors: torch tensors on any device, or numpy arrays, under the names in PEFT's files. Both arguments are
        copied. Raises AdapterInvalid for values that no file could hold. Everything else is checked on first use.
        """
        reasons: list[Reason] = []
        stored = {name: _store(name, value, reasons) for name, value in tensors.items()}
        raw = _write_config(config, reasons)
        if reasons:
            raise AdapterInvalid(tuple(reasons))
        return LoraAdapter(TensorAdapter(raw, {t.name: t for t in stored.values() if t}), weight=weight)

    def weighted(self, weight: float) -> "LoraAdapter":
        """Returns the same adapter with another weight."""
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
    """A copy in C order. numpy has no bfloat16, so bfloat16 is returned as its 16-bit patterns."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return (copy.view(torch.int16) if copy.dtype == torch.bfloat16 else copy).numpy()


def _write_config(config: Mapping[str, Any], reasons: list[Reason]) -> bytes:
    """Writes adapter_config.json as PEFT does: sets become lists."""
    try:
        return json.dumps(dict(config), default=_listed).encode()
    except (TypeError, ValueError) as error:
        reasons.append(Reason("config_malformed", f"the config cannot be written as JSON: {error}"))
        return b""


def _listed(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
