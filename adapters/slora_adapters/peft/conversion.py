"""Converts adapters whose initialisation changed the base model (PiSSA, OLoRA, CorDA) to plain LoRA.

Such an initialisation sets A and B to A0 and B0, and subtracts s B0 A0 from the base weight. So the trained model has
the weight W - s B0 A0 + s B A. For the unchanged base model, the delta is s (B A - B0 A0), which has at most twice the
rank.

PEFT writes the factors [B, -B0] and [A; A0]. Their products almost cancel, because training changes the factors little.
That loses digits where factors are served in 16 bits. The factors written here are balanced: with the singular values
S of the delta they are U sqrt(S) and sqrt(S) V. They are computed in float64 and rounded once.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import AdapterInvalid, AdapterNotFound, Reason, abbreviate
from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.extras import EXTRA_NAMES
from slora_adapters.peft.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from slora_adapters.peft.strict_json import parse_object
from slora_adapters.peft.tensor_file import (
    StoredTensor,
    convert,
    is_finite,
    largest_magnitude_bits,
    map_file,
    read_tensors,
    tensor_file_parts,
)

CONVERTIBLE_INITS = ("pissa", "corda", "olora")
# Fields that must be the same at the beginning and at the end of the training.
_SAME = (
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "peft_type",
    "use_dora",
    "lora_bias",
)
_NUM_PROBES = 8
_A, _B = ".lora_A.", ".lora_B."

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion.

    num_modules: converted modules. rank: the rank in the config, twice that of the source.
    deviation: the largest error of a module's output for random inputs, relative to the largest output of its delta.
    cancellation: the largest ratio of the norm of B0 A0 to the norm of the delta.
    """

    num_modules: int
    rank: int
    deviation: float
    cancellation: float


def convert_adapter(trained: Path, initial: Path, output: Path) -> Conversion:
    """Writes the adapter in `trained` as plain LoRA of twice the rank into the new directory `output`.

    initial: a directory with the same adapter, as it was saved before the training.

    Raises AdapterNotFound, FileExistsError, or AdapterInvalid with every reason.
    """
    for directory in (trained, initial):
        if not directory.is_dir():
            raise AdapterNotFound(f"there is no adapter directory {str(directory)!r}")
    config, before = _read_config(trained), _read_config(initial)
    reasons = _refuse_configs(config, before)
    tensors, first = _read_tensors(trained), _read_tensors(initial)
    pairs = sorted(name for name in tensors if _A in name)
    for name in pairs:
        for part in (name, name.replace(_A, _B)):
            if part not in tensors or part not in first or tensors[part].shape != first[part].shape:
                message = f"{part[:120]!r} must be in both adapters, with the same shape"
                reasons.append(Reason("missing_tensors", message))
    if not pairs:
        reasons.append(Reason("missing_tensors", "the adapter has no LoRA factors"))
    reasons += [
        Reason("embeddings", f"{name[:120]!r}: factors of an embedding have no such initialisation")
        for name in tensors
        if ".lora_embedding_" in name
    ]
    reasons += [
        Reason("non_finite", f"tensor {tensor.name!r} contains NaN or infinity")
        for tensor in (*tensors.values(), *first.values())
        if not is_finite(tensor.dtype, largest_magnitude_bits(tensor.values))
    ]
    if reasons:
        raise AdapterInvalid(tuple(reasons))
    found, deviation, cancellation = dict(tensors), 0.0, 0.0
    for name in pairs:
        other = name.replace(_A, _B)
        delta = _Delta(*(_widen(part) for part in (tensors[name], tensors[other], first[name], first[other])))
        a, b = delta.factor()
        found[name], found[other] = StoredTensor(name, "F32", a), StoredTensor(other, "F32", b)
        deviation = max(deviation, delta.measure(a, b))
        cancellation = max(cancellation, delta.cancellation)
    output.mkdir(parents=True)
    converted = _double_rank(config)
    (output / CONFIG_NAME).write_text(json.dumps(converted, indent=2), encoding="utf-8")
    with (output / TENSORS_NAME).open("xb") as file:
        file.writelines(tensor_file_parts(found.values()))
    for name in EXTRA_NAMES:
        if (trained / name).is_file():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trained / name, output / name)
    return Conversion(len(pairs), int(converted["r"]), deviation, cancellation)


class _Delta:
    """B A - B0 A0 of one module. a, a0: [r, in]. b, b0: [out, r]."""

    def __init__(self, a: Matrix, b: Matrix, a0: Matrix, b0: Matrix) -> None:
        self._rows, self._columns = np.concatenate((a, a0)), np.concatenate((b, -b0), axis=1)
        self._initial = (a0, b0)

    def factor(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Returns balanced factors, float32 [2r, in] and [out, 2r]."""
        (left, left_r), (right, right_r) = np.linalg.qr(self._columns), np.linalg.qr(self._rows.T)
        u, values, v = np.linalg.svd(left_r @ right_r.T)
        count, rank = len(values), len(self._rows)
        root = np.sqrt(values)
        a, b = np.zeros((rank, right.shape[0])), np.zeros((left.shape[0], rank))
        a[:count] = root[:, None] * (v[:count] @ right.T)
        b[:, :count] = left @ (u[:, :count] * root)
        return a.astype(np.float32), b.astype(np.float32)

    def measure(self, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
        """Returns the largest error of the factors' output for random inputs, relative to the largest output."""
        inputs = np.random.default_rng(0).standard_normal((self._rows.shape[1], _NUM_PROBES))
        exact = self._columns @ (self._rows @ inputs)
        ours = b @ (a @ inputs.astype(np.float32))
        largest = float(np.abs(exact).max())
        return float(np.abs(ours - exact).max()) / largest if largest else 0.0

    @property
    def cancellation(self) -> float:
        a0, b0 = self._initial
        return _norm(b0, a0) / (_norm(self._columns, self._rows) or 1.0)


def _norm(b: Matrix, a: Matrix) -> float:
    """The Frobenius norm of b @ a."""
    return float(np.linalg.norm(np.linalg.qr(b)[1] @ np.linalg.qr(a.T)[1].T))


def _widen(tensor: StoredTensor) -> Matrix:
    return convert(tensor.values, tensor.dtype, "float32").astype(np.float64)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise AdapterInvalid((Reason("missing_file", f"{path} is missing"),))
    try:
        return parse_object(map_file(path), source=str(path), max_bytes=MAX_CONFIG_BYTES)
    except ValueError as error:
        raise AdapterInvalid((Reason("config_malformed", str(error)),)) from None


def _read_tensors(directory: Path) -> dict[str, StoredTensor]:
    path = directory / TENSORS_NAME
    if not path.is_file():
        raise AdapterInvalid((Reason("missing_file", f"{path} is missing"),))
    try:
        return read_tensors(map_file(path))
    except ValueError as error:
        raise AdapterInvalid((Reason("tensors_malformed", f"{path}: {error}"),)) from None


def _refuse_configs(config: Mapping[str, Any], before: Mapping[str, Any]) -> list[Reason]:
    init = config.get("init_lora_weights")
    reasons = []
    if not isinstance(init, str) or not init.lower().startswith(CONVERTIBLE_INITS):
        message = (
            f"init_lora_weights is {abbreviate(init)}; only {', '.join(CONVERTIBLE_INITS)} can be converted"
        )
        reasons.append(Reason("init_lora_weights", message))
    reasons += [
        Reason(
            name,
            f"{name} is {abbreviate(config.get(name))}, but it was {abbreviate(before.get(name))} at first",
        )
        for name in _SAME
        if (config.get(name) or None) != (before.get(name) or None)
    ]
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        reasons.append(Reason("rank", "r and lora_alpha must be numbers"))
    reasons += [
        Reason(name, f"{name} must be an object with numbers")
        for name in ("rank_pattern", "alpha_pattern")
        if not isinstance(config.get(name) or {}, dict)
        or not all(isinstance(value, int | float) for value in (config.get(name) or {}).values())
    ]
    return reasons


def _double_rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the converted adapter: twice the ranks, and the same scales."""
    factor = 2**0.5 if config.get("use_rslora") else 2
    return {
        **config,
        "init_lora_weights": True,
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {name: 2 * rank for name, rank in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {
            name: factor * alpha for name, alpha in (config.get("alpha_pattern") or {}).items()
        },
    }
