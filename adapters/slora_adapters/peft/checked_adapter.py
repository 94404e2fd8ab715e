"""An adapter that passed every check, without its tensors, as `Catalog.store_blob` and `Catalog.commit` need it.

Untrusted tensors are opened only in a separate process (`inspection_process.py`), which returns this summary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.adapter import Adapter, AdapterExtras, LoraPair
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME
from slora_adapters.peft.tensor_file import StoredTensor, tensor_file_parts
from slora_kernels.layout import ModelShape, lay_out_adapter

# Columns multiplied at a time. At rank 128, they take 8 MB in float64.
_COLUMNS = 1 << 13


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """A summary of all modules of the base model that share a name, such as q_proj."""

    adapted: int  # how many of the `total` modules the adapter changes
    total: int
    min_rank: int
    max_rank: int
    max_norm: float  # the greatest Frobenius norm of these modules' deltas


@dataclass(frozen=True, slots=True)
class Certificate:
    """A summary of an accepted adapter, which its owner can compare with the training run. An adapter that covers only
    half of the trained modules, or whose delta is zero in some modules, passes every check but is wrong.
    """

    modules: Mapping[str, ModuleSummary]  # summaries by module name, in the model's order
    base_modules: int  # number of adaptable modules of the base model
    pool_bytes: int  # size of the adapter in the page pool of an engine without tensor parallelism
    # Name of the base model in the config, without folders; None if the config has none.
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


Members = Mapping[str, Path | bytes]


def bundle(adapter: Adapter, directory: Path | str, scratch: Path) -> Members:
    """Returns the members to put into a store, for an adapter that `read_adapter` read from `directory`.

    A blob has two members: the config and the tensor file. The config is rewritten from the fields that change the
    arithmetic. The uploaded tensor file is kept if its tensors are in name order and all of them are needed. Otherwise
    it is rewritten in name order, without the tensors that PEFT copied into it from the base model. The digest hashes
    tensors in name order too, so a loader can hash a blob while it reads the file sequentially.

    The key of a blob is the digest of the arithmetic (`digest.py`), not of the bytes. The reader of a blob
    (`stored_adapter.py`) recomputes that digest from the bytes that it has read. So exactly the weights that will be
    served are verified. All blobs of one digest compute the same results, so tenants that upload the same weights share
    one stored blob. Data of one tenant (names, chat template, sampling defaults, origin) is kept in the registry.

    scratch: another directory, for a tensor file that has to be rewritten.
    """
    # The JSON is not sorted, because the order of patterns decides which pattern wins.
    config = json.dumps(adapter.config.to_json(), indent=1).encode()
    if adapter.has_unused or not adapter.is_sorted:
        factors = [tensor for pair in adapter.pairs.values() for tensor in (pair.a, pair.b)]
        with (scratch / TENSORS_NAME).open("xb") as file:
            file.writelines(tensor_file_parts(factors))
        return {CONFIG_NAME: config, TENSORS_NAME: scratch / TENSORS_NAME}
    return {CONFIG_NAME: config, TENSORS_NAME: Path(directory) / TENSORS_NAME}


_NUM_EMBEDDED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """The summary of an adapter that passed the inspection."""

    digest: str
    rank: int  # the greatest rank of any module
    target_modules: tuple[str, ...]
    tensor_bytes: int  # size of the uploaded factors
    blob_bytes: int  # size of the blob in a store, including the config and the header of the tensor file
    extras: AdapterExtras
    certificate: Certificate
    config: str  # the config as a store keeps it
    # Path of the tensor file to store. The caller of the inspection decides how long the file exists.
    tensors: Path
    # Ids of a few tokens whose embeddings the adapter changes most; empty if it does not adapt the embedding.
    embedded_tokens: tuple[int, ...]

    @property
    def members(self) -> Members:
        """The members to put into a store."""
        return {CONFIG_NAME: self.config.encode(), TENSORS_NAME: self.tensors}

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "CheckedAdapter":
        """Rebuilds an adapter from `dataclasses.asdict` after a round trip through JSON, with paths as strings."""
        return CheckedAdapter(
            **{
                **fields,
                "target_modules": tuple(fields["target_modules"]),
                "extras": AdapterExtras(**fields["extras"] | {"uses": tuple(fields["extras"]["uses"])}),
                "certificate": Certificate.from_plain(fields["certificate"]),
                "tensors": Path(fields["tensors"]),
                "embedded_tokens": tuple(fields["embedded_tokens"]),
            }
        )


def summarise(
    adapter: Adapter, directory: Path, scratch: Path, shape: ModelShape, base_name: str | None = None
) -> CheckedAdapter:
    """Summarises an adapter that `read_adapter` read from `directory`.

    scratch: another directory, for a tensor file that has to be rewritten.
    """
    members = bundle(adapter, directory, scratch)
    config, tensors = members[CONFIG_NAME], members[TENSORS_NAME]
    assert isinstance(config, bytes) and isinstance(tensors, Path)
    return CheckedAdapter(
        adapter.digest,
        adapter.max_rank,
        adapter.target_modules,
        adapter.tensor_bytes,
        len(config) + tensors.stat().st_size,
        adapter.extras,
        certify(adapter, shape, base_name),
        config.decode(),
        tensors,
        _find_embedded_tokens(adapter, shape),
    )


def _find_embedded_tokens(adapter: Adapter, shape: ModelShape) -> tuple[int, ...]:
    """Returns the ids of the tokens with the largest columns of A. A token that did not occur in training has a zero
    column.
    """
    pair = adapter.pairs.get(shape.embedding_module)
    if pair is None:
        return ()
    magnitudes = np.abs(convert(pair.a.values, pair.a.dtype, "float32")).max(axis=0)
    likely = np.argsort(magnitudes)[::-1][:_NUM_EMBEDDED_TOKENS]
    return tuple(int(token) for token in likely if magnitudes[token] > 0)
