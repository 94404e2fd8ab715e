"""A tiny model, one adapter of each kind on it, and the oracle that has loaded them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slora.model_spec import read_model_spec
from tests.support.oracle import Oracle
from tests.support.peft_adapters import KINDS, make_adapter
from tests.support.tiny_models import make_model, write_model

# A and B of this size make deltas about as large as the weights that they change.
_ADAPTER_STD = 0.15


@dataclass(frozen=True, slots=True)
class ModelKit:
    directory: Path
    adapters: dict[str, Path]
    oracle: Oracle

    def path(self, adapter: str | None) -> Path | None:
        return self.adapters[adapter] if adapter is not None else None

    def pool_bytes(self, num_pages: int, *, dtype: str = "float32", block_tokens: int = 16) -> int:
        shape = read_model_spec(self.directory).shape(dtype)
        return num_pages * shape.num_layers * shape.page_bytes(block_tokens)


def make_kit(
    root: Path, model: str, kinds: Mapping[str, dict[str, object]] = KINDS, **changes: object
) -> ModelKit:
    """`changes`: fields of the model's config."""
    write_model(root / "base", model, **changes)
    adapters = {}
    for seed, (kind, lora) in enumerate(kinds.items()):
        adapters[kind] = root / kind
        make_adapter(root / kind, make_model(model, **changes), seed=seed, std=_ADAPTER_STD, **lora)
    return ModelKit(root / "base", adapters, Oracle(root / "base", adapters))
