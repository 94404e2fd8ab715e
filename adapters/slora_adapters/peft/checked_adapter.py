"""An adapter that passed every check, as whoever publishes it needs to know it: without its tensors.

Tensors of people whom nobody vets are opened in a process of their own (`inspection_process.py`); this is what comes
out of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slora_adapters.peft.adapter import Adapter, AdapterExtras
from slora_adapters.peft.bundle import Members, bundle
from slora_adapters.peft.certificate import Certificate, certify
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.peft_config import CONFIG_NAME
from slora_adapters.peft.peft_directory import TENSORS_NAME
from slora_kernels.layout import ModelShape

__all__ = ["CheckedAdapter", "summarise"]

_NUM_EMBEDDED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """rank: the greatest of any module. tensor_bytes: as they were uploaded. config: as a store keeps it.

    blob_bytes: what a store keeps in all, the header of the tensor file and the config included.

    embedded_tokens: a few whose embedding it changes most; none if it does not adapt the embedding.

    tensors: the file of theirs that a store keeps; whoever made it says how long it lies there.
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
        """What to put into a store."""
        return {CONFIG_NAME: self.config.encode(), TENSORS_NAME: self.tensors}

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "CheckedAdapter":
        """From what `dataclasses.asdict` gives, after it was JSON with paths as texts."""
        return CheckedAdapter(
            **{
                **fields,
                "target_modules": tuple(fields["target_modules"]),
                "extras": AdapterExtras(**fields["extras"]),
                "certificate": Certificate.from_plain(fields["certificate"]),
                "tensors": Path(fields["tensors"]),
                "embedded_tokens": tuple(fields["embedded_tokens"]),
            }
        )


def summarise(
    adapter: Adapter, directory: Path, scratch: Path, shape: ModelShape, base_name: str | None = None
) -> CheckedAdapter:
    """What is known of an adapter that `read_adapter` read from `directory`.

    scratch: another directory, for a tensor file that has to be written anew.
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
    """Training changes the columns of the tokens that it saw; the others' are zero, as they began."""
    pair = adapter.pairs.get(shape.embedding_module)
    if pair is None:
        return ()
    magnitudes = np.abs(convert(pair.a.values, pair.a.dtype, "float32")).max(axis=0)
    likely = np.argsort(magnitudes)[::-1][:_NUM_EMBEDDED_TOKENS]
    return tuple(int(token) for token in likely if magnitudes[token] > 0)
