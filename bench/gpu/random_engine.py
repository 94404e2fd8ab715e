"""An engine with a random model and random adapters, which are made in memory and never read from a file.

Weights are made on the device. Adapters are packed on the host, in page-locked memory if there is a GPU, as the loader
does it. All adapters are copies of a few. Each is loaded separately, and the time of a load depends only on its bytes.
"""

import itertools
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kernels import MODELS
from bench.machines import ALL_LINEARS
from bench.made_weights import MadeWeights
from slora.engine.engine import Engine
from slora.engine_config import EngineConfig
from slora.models.decoder import Decoder
from slora.models.model_spec import ModelSpec
from slora.models.model_spec_reader import read_model_spec
from slora.request import EngineRequest, single_adapter
from slora.sampling_params import SamplingParams
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

_DISTINCT = 4
_STD = 0.02


@dataclass(frozen=True, slots=True)
class EngineSize:
    """fields: as in config.json. pool_bytes: None takes the free memory of the device."""

    fields: Mapping[str, Any]
    device: str
    pool_bytes: int | None
    max_model_len: int

    @property
    def dtype(self) -> str:
        dtype: str = self.fields["dtype"]
        return dtype

    def spec(self) -> ModelSpec:
        with tempfile.TemporaryDirectory() as directory:
            self.write_config(Path(directory))
            return read_model_spec(Path(directory))

    def write_config(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(dict(self.fields)))

    def layout(self, rank: int, adapted: Sequence[str] = ALL_LINEARS) -> AdapterLayout:
        shape = self.spec().shape(self.dtype)
        ranks = [rank if linear.path in adapted else 0 for linear in shape.linears]
        return lay_out_adapter(shape, [*ranks * shape.num_layers, 0, 0])

    def weight_bytes(self) -> int:
        """Size of the weights that a decode step reads: all but the embedding, of which it reads single rows."""
        shape = self.spec().shape(self.dtype)
        return shape.element_bytes * (shape.num_weights + shape.hidden_size * shape.vocab_size)


LLAMA_8B = EngineSize(MODELS["llama-8b"], "cuda", 64 << 30, 8192)
TINY = EngineSize(
    MODELS["llama-8b"]
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    },
    "cpu",
    16 << 20,
    1024,
)


def make_weights(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Decoder:
    """Makes a model with random weights. Implements `slora.models.model.LoadModel`."""
    assert spec.decoder is not None, "the bench's models are of our own decoder"
    return Decoder(spec.decoder, MadeWeights(dtype, device), max_model_len)  # type: ignore[arg-type]


@dataclass(slots=True)
class RandomSource:
    """An AdapterSource that has every adapter in memory."""

    shape: ModelShape
    dtype: str
    layout: AdapterLayout
    pinned: bool
    capacity_bytes: int | None = None
    paces: Mapping[str, float] = field(default_factory=dict)
    _copies: list[PackedAdapter] = field(default_factory=list)
    _arrived: list[Fetched | FetchFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        dtype: torch.dtype = getattr(torch, self.dtype)
        scales = (self.layout.modules[:, 0] > 0).astype(np.float32)
        for seed in range(_DISTINCT):
            random = torch.Generator().manual_seed(seed)
            buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            buffer.view(dtype).normal_(std=_STD, generator=random)
            self._copies.append(PackedAdapter(self.layout, scales, buffer.numpy()))

    def version(self, number: int) -> AdapterVersion:
        """Returns the version of an adapter. Each adapter has a tenant of its own, as in S-LoRA's benchmark."""
        return AdapterVersion(f"tenant-{number}", f"{number:064x}")

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        return CacheCounts()

    def request(self, version: AdapterVersion) -> None:
        self._arrived.append(Fetched(version, self._copies[int(version.digest, 16) % _DISTINCT]))

    def poll(self) -> list[Fetched | FetchFailed]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def release(self, version: AdapterVersion) -> None: ...

    def discard(self, version: AdapterVersion) -> None: ...

    def purge(self, tenant: str) -> None: ...


class RandomEngine:
    """rank: of all adapters, which adapt the linears `adapted`. settings: further fields of EngineConfig."""

    def __init__(
        self, size: EngineSize, rank: int, adapted: Sequence[str] = ALL_LINEARS, **settings: Any
    ) -> None:
        self.size = size
        spec, layout = size.spec(), size.layout(rank, adapted)
        self.adapters = RandomSource(spec.shape(size.dtype), size.dtype, layout, size.device == "cuda")
        config = EngineConfig(
            Path("random"),
            dtype=size.dtype,
            device=size.device,
            pool_bytes=size.pool_bytes,
            max_model_len=size.max_model_len,
            swap_bytes=0,
            prefix_cache="off",
            max_lora_rank=rank,
            **settings,
        )
        self.engine = Engine(config, spec, self.adapters, load=make_weights)
        self._numbers = itertools.count()

    def make_request(self, prompt: list[int], adapter: int | None, output_tokens: int) -> EngineRequest:
        """Makes a greedy request for exactly `output_tokens` tokens. adapter: its number; None is the base model."""
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        version = None if adapter is None else self.adapters.version(adapter)
        tenant = "base" if version is None else version.tenant
        return EngineRequest(str(next(self._numbers)), tenant, prompt, single_adapter(version), params)

    def drop_all(self) -> None:
        """Aborts all requests."""
        for number in range(next(self._numbers)):
            self.engine.abort(str(number))
