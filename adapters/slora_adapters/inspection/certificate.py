"""The certificate of an adapter that passed every check. The owner can compare the certificate with the training run.

An adapter that covers only half of the trained modules, or whose delta is zero in some modules, passes every check but
is wrong. The certificate shows such mistakes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.adapter import Adapter, LoraPair
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.tensor_file import StoredTensor
from slora_kernels.layout import ModelShape, lay_out_adapter

# Columns multiplied at a time. At rank 128, they take 8 MB in float64.
_COLUMNS = 1 << 13


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """A summary of all modules of the base model that share a name, such as q_proj.

    adapted: how many of the `total` modules the adapter changes. max_norm: the greatest Frobenius norm of these
    modules' deltas.
    """

    adapted: int
    total: int
    min_rank: int
    max_rank: int
    max_norm: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """A summary of an accepted adapter.

    modules: summaries by module name, in the model's order.
    base_modules: number of adaptable modules of the base model.
    pool_bytes: size of the adapter in the page pool of an engine without tensor parallelism.
    base_name: name of the base model in the config, without folders; None if the config has none.
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
        """Rebuilds a certificate from `dataclasses.asdict` after a round trip through JSON."""
        modules = {name: ModuleSummary(**summary) for name, summary in fields["modules"].items()}
        return Certificate(**{**fields, "modules": modules})


def certify(adapter: Adapter, shape: ModelShape, base_name: str | None) -> Certificate:
    """Returns the certificate of a valid adapter."""
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
    # Four significant digits: the number is for people, and further digits depend on the machine's arithmetic.
    norm = float(f"{max(map(delta_norm, found)):.4g}")
    return ModuleSummary(len(found), total, min(ranks), max(ranks), norm)


def delta_norm(pair: LoraPair[StoredTensor]) -> float:
    """Returns the Frobenius norm of scale * B A without computing that matrix.

    It uses |BA|^2 = trace((B'B)(AA')), where both factors are [rank, rank].
    """
    a = _gram(pair.a.values, pair.a.dtype)
    b = _gram(pair.b.values.T, pair.b.dtype)
    # Rounding may leave a square slightly below zero.
    return abs(pair.scale) * float(np.sqrt(max(0.0, float(np.sum(a * b)))))


def _gram(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Returns rows @ rows.T, [rank, rank], in float64, because squares of float32 values may overflow in float32."""
    gram = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], _COLUMNS):
        block = _widen(rows[:, start : start + _COLUMNS], dtype)
        gram += block @ block.T
    return gram


def _widen(block: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    return convert(block, dtype, "float32").astype(np.float64)
