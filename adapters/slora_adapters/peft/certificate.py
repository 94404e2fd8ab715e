"""What was found in an adapter that passed every check, for its owner to compare with what was meant.

An adapter that covers half of the modules that its training touched, or whose norm is zero, is valid and yet wrong;
here that can be seen.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.adapter import Adapter, LoraPair
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.tensor_file import StoredTensor
from slora_kernels.layout import ModelShape, lay_out_adapter

__all__ = ["Certificate", "ModuleSummary", "certify", "delta_norm"]

# Columns multiplied at a time: 128 ranks of them in float64 are 8 MB.
_COLUMNS = 1 << 13


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """All modules of one name, such as q_proj. adapted: in how many of `total` layers. max_norm: the greatest Frobenius
    norm of their deltas."""

    adapted: int
    total: int
    min_rank: int
    max_rank: int
    max_norm: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """modules: by name, in the model's order. base_modules: how many the base model has. pool_bytes: what the adapter
    takes of the page pool.

    base_name: what the config calls its base model, without folders; None if it says nothing.
    """

    modules: Mapping[str, ModuleSummary]
    base_modules: int
    pool_bytes: int
    base_name: str | None

    @property
    def adapted(self) -> int:
        return sum(summary.adapted for summary in self.modules.values())

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "Certificate":
        """From what `dataclasses.asdict` gives, after it was JSON."""
        modules = {name: ModuleSummary(**summary) for name, summary in fields["modules"].items()}
        return Certificate(**{**fields, "modules": modules})

    def to_json(self) -> dict[str, Any]:
        """As /v1/adapters shows it."""
        return {
            "modules_adapted": self.adapted,
            "modules_total": self.base_modules,
            "modules": {name: asdict(summary) for name, summary in self.modules.items()},
            "pool_bytes": self.pool_bytes,
        }


def certify(adapter: Adapter, shape: ModelShape, base_name: str | None) -> Certificate:
    """The certificate of a valid adapter."""
    by_name: dict[str, list[LoraPair[StoredTensor] | None]] = {}
    for module_id, module in enumerate(shape.modules):
        by_name.setdefault(module.path.rpartition(".")[2], []).append(adapter.pairs.get(module_id))
    modules = {
        name: _summarise(found, len(pairs))
        for name, pairs in by_name.items()
        if (found := [pair for pair in pairs if pair is not None])
    }
    pool_bytes = lay_out_adapter(shape, adapter.ranks(shape)).num_bytes
    return Certificate(modules, shape.num_modules, pool_bytes, base_name)


def _summarise(found: list[LoraPair[StoredTensor]], total: int) -> ModuleSummary:
    ranks = [pair.rank for pair in found]
    # To a few digits: it is for people, and the last ones depend on the machine's arithmetic.
    norm = float(f"{max(map(delta_norm, found)):.4g}")
    return ModuleSummary(len(found), total, min(ranks), max(ranks), norm)


def delta_norm(pair: LoraPair[StoredTensor]) -> float:
    """The Frobenius norm of scale * B A, without making that matrix: |BA|^2 = trace((B'B)(AA')), both [rank, rank]."""
    a = _gram(pair.a.values, pair.a.dtype)
    b = _gram(pair.b.values.T, pair.b.dtype)
    # Rounding may leave a square just below zero.
    return abs(pair.scale) * float(np.sqrt(max(0.0, float(np.sum(a * b)))))


def _gram(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """rows @ rows.T of [rank, width], in float64: squares of what float32 holds would overflow in it."""
    gram = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], _COLUMNS):
        block = _widen(rows[:, start : start + _COLUMNS], dtype)
        gram += block @ block.T
    return gram


def _widen(block: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    return convert(block, dtype, "float32").astype(np.float64)
