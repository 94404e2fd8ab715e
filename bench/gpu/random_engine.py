"""An engine with a random model and random adapters, which are made in memory and never read from a file.

Weights are made on the device. Packed adapters lie in page-locked host memory if there is a GPU, as the loader leaves
them. All adapters of a kind are copies of a few. Each is loaded separately, and the time of a load depends only on its
bytes.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.kernels import MODELS
from bench.machines import ALL_LINEARS
from bench.made_weights import MadeWeights
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest, StepOutput, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine import process
from slora.engine.engine import Engine
from slora.models.decoder import Decoder
from slora.models.model_spec import ModelSpec, read_model_spec
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

_DISTINCT = 2
_STD = 0.02
_KIND_DIGITS = 2


class AdapterKind(NamedTuple):
    """adapted: the paths of the linears that these adapters change."""

    rank: int
    adapted: Sequence[str] = ALL_LINEARS


class RandomAdapter(NamedTuple):
    """kind: its position among the kinds of the engine."""

    number: int
    kind: int = 0


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
        (directory / "config.json").write_text(json.dumps(dict(self.fields)), encoding="utf-8")

    def layout(self, kind: AdapterKind) -> AdapterLayout:
        shape = self.spec().shape(self.dtype)
        ranks = [kind.rank if linear.path in kind.adapted else 0 for linear in shape.linears]
        return lay_out_adapter(shape, [*ranks * shape.num_layers, 0, 0])

    def weight_bytes(self) -> int:
        """Size of the weights that a decode step reads: all but the embedding, of which it reads single rows."""
        shape = self.spec().shape(self.dtype)
        return shape.element_bytes * (shape.num_weights + shape.hidden_size * shape.vocab_size)


# Weights of 16 GB and a pool of 48 GiB leave 10 GB of an 80 GB card for activations and graphs.
LLAMA_8B = EngineSize(MODELS["llama-8b"], "cuda", 48 << 30, 8192)
# The widths of the whole model, and so its kernels. Four layers and a small pool start in seconds.
FOUR_LAYERS = EngineSize(MODELS["llama-8b"] | {"num_hidden_layers": 4}, "cuda", 6 << 30, 8192)
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


SIZES = {"whole": LLAMA_8B, "warm": FOUR_LAYERS, "tiny": TINY}


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
    layouts: list[AdapterLayout]
    device: str
    capacity_bytes: int | None = None
    paces: Mapping[str, float] = field(default_factory=dict)
    _copies: list[list[PackedAdapter]] = field(default_factory=list)
    _arrived: list[Fetched | FetchFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._copies = [[self._make(layout) for _ in range(_DISTINCT)] for layout in self.layouts]

    def _make(self, layout: AdapterLayout) -> PackedAdapter:
        content = torch.empty(
            layout.num_bytes // getattr(torch, self.dtype).itemsize,
            dtype=getattr(torch, self.dtype),
            device=self.device,
        )
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self.device == "cuda")
        buffer.copy_(content.normal_(std=_STD).view(torch.uint8))
        return PackedAdapter(layout, (layout.modules[:, 0] > 0).astype(np.float32), buffer.numpy())

    def version(self, adapter: RandomAdapter) -> AdapterVersion:
        """Returns the version of an adapter. Each adapter has a tenant of its own, as in S-LoRA's benchmark."""
        digest = f"{adapter.kind:0{_KIND_DIGITS}x}{adapter.number:0{64 - _KIND_DIGITS}x}"
        return AdapterVersion(f"tenant-{adapter.number}", digest)

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        return CacheCounts()

    def request(self, version: AdapterVersion) -> None:
        kind, number = version.digest[:_KIND_DIGITS], version.digest[_KIND_DIGITS:]
        copies = self._copies[int(kind, 16)]
        self._arrived.append(Fetched(version, copies[int(number, 16) % len(copies)]))

    def poll(self) -> list[Fetched | FetchFailed]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def release(self, version: AdapterVersion) -> None: ...

    def discard(self, version: AdapterVersion) -> None: ...

    def purge(self, tenant: str) -> None: ...


class RandomEngine:
    """settings: further fields of EngineConfig."""

    def __init__(self, size: EngineSize, kinds: Sequence[AdapterKind], **settings: Any) -> None:
        self.size = size
        spec = size.spec()
        layouts = [size.layout(kind) for kind in kinds]
        self.adapters = RandomSource(spec.shape(size.dtype), size.dtype, layouts, size.device)
        config = EngineConfig(
            Path("random"),
            dtype=size.dtype,
            device=size.device,
            pool_bytes=size.pool_bytes,
            max_model_len=size.max_model_len,
            swap_bytes=0,
            prefix_cache="off",
            max_lora_rank=max(kind.rank for kind in kinds),
            **settings,
        )
        self.engine = Engine(config, spec, self.adapters, load=make_weights)
        self._numbers = itertools.count()
        self._made: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether a step may do something. An adapter that is requested arrives in the next step."""
        return self.engine.has_work or self.engine.num_unfinished > 0

    @property
    def num_delayed(self) -> int:
        """See `StepGraphs.num_delayed`."""
        return self.engine.runner.num_delayed

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return self.engine.info.full_page_bytes // self.engine.info.block_tokens

    def adapter_bytes(self, kind: int = 0) -> int:
        return self.adapters.layouts[kind].num_bytes

    def make_request(
        self, prompt: list[int], adapter: RandomAdapter | None, output_tokens: int
    ) -> EngineRequest:
        """Makes a greedy request for exactly `output_tokens` tokens. adapter: None is the base model."""
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        version = None if adapter is None else self.adapters.version(adapter)
        tenant = "base" if version is None else version.tenant
        self._made.append(str(next(self._numbers)))
        return EngineRequest(self._made[-1], tenant, prompt, single_adapter(version), params)

    def run_until(self, is_enough: Callable[[list[StepOutput]], bool]) -> None:
        """Runs steps until their outputs are enough. Raises the error of a request that fails."""
        while self.has_work:
            outputs = self.engine.step()
            for output in outputs:
                if output.error is not None:
                    raise output.error
            if is_enough(outputs):
                return
        raise RuntimeError("the engine has no more work, and its outputs were not enough")

    def drop_all(self) -> None:
        """Aborts all requests, and finishes the step that may still run."""
        for request_id in self._made:
            self.engine.abort(request_id)
        self._made.clear()
        while self.engine.has_work:
            self.engine.step()


if __name__ == "__main__":
    # The engine process of `slora serve` with a random model: see bench/gpu/random_server.py.
    process.Engine = partial(Engine, load=make_weights)  # type: ignore[misc, assignment]
    sys.exit(process.main())
