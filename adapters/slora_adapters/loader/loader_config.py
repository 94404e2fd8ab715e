"""The configuration of a loader process, passed as one JSON object on its command line."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from slora_adapters.limits import AdapterLimits
from slora_adapters.loader.loader import LOADS_PER_TENANT, NUM_THREADS, ServedFormat
from slora_adapters.peft.number_format import STORAGE
from slora_kernels.layout import ModelShape


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """Settings of a loader process.

    socket: path of the Unix socket to which engines connect.
    store, warm: URLs for `open_store`.
    shape, dtype: shape and dtype of the base model, as the engine determined them.
    num_ranks: the number of tensor-parallel ranks of the engine.
    host_cache_bytes: size of the arena that is shared with engines.
    """

    socket: Path
    store: str
    shape: ModelShape
    dtype: str
    warm: str | None = None
    host_cache_bytes: int = 2 << 30
    max_lora_rank: int = 64
    num_threads: int = NUM_THREADS
    loads_per_tenant: int = LOADS_PER_TENANT
    num_ranks: int = 1

    def served(self) -> ServedFormat:
        limits = AdapterLimits(max_lora_rank=self.max_lora_rank, served_dtype=self.dtype)
        return ServedFormat(self.shape, self.dtype, limits, self.num_ranks)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "socket": str(self.socket)})

    @staticmethod
    def from_json(text: str) -> "LoaderConfig":
        """Parses a config. Raises ValueError if the text is not a valid config."""
        raw = json.loads(text)
        unknown = raw.keys() - {field.name for field in fields(LoaderConfig)}
        if unknown:
            raise ValueError(f"unknown loader settings: {', '.join(sorted(unknown))}")
        try:
            shape = ModelShape.from_plain(raw["shape"])
            config = LoaderConfig(**{**raw, "socket": Path(raw["socket"]), "shape": shape})
        except (KeyError, TypeError) as error:
            raise ValueError(f"loader settings are missing or have the wrong type: {error}") from error
        if config.dtype not in STORAGE:
            raise ValueError(f"dtype {config.dtype!r} is not one of {', '.join(STORAGE)}")
        return config
