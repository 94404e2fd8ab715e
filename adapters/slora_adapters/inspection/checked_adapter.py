"""An adapter that passed every check, without its tensors, as `Catalog.store_blob` and `Catalog.commit` need it.

Untrusted tensors are opened only in a separate process (`inspection_process.py`), which returns this summary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slora_adapters.inspection.certificate import Certificate, certify
from slora_adapters.peft.adapter import Adapter, AdapterExtras
from slora_adapters.peft.bundle import Members, bundle
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME
from slora_kernels.layout import ModelShape

__all__ = ["CheckedAdapter", "summarise"]

_NUM_EMBEDDED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """The summary of an adapter that passed the inspection.

    rank: the greatest rank of any module.
    tensor_bytes: size of the uploaded factors.
    blob_bytes: size of the blob in a store, including the config and the header of the tensor file.
    config: the config as a store keeps it.
    tensors: path of the tensor file to store. The caller of the inspection decides how long the file exists.
    embedded_tokens: ids of a few tokens whose embeddings the adapter changes most; empty if it does not adapt the
      embedding.
    """

    digest: str
    rank: int
    target_modules: tuple[str, ...]
    tensor_bytes: int
    blob_bytes: int
    extras: AdapterExtras
    certificate: Certificate
    config: str
    tensors: Path
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
