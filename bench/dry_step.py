"""One step of the real decoder with the real launchers, on tensors that have shapes and no memory.

Every launch that the GPU path makes is taken down instead of made, every operation of torch that computes is counted,
and so are the bytes and multiplications of its matmuls: a model that no machine here could hold is gone through in a
second. Knows no GPU: what a step takes there is for whoever has its rates.
"""

import json
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.made_weights import MadeWeights
from slora.memory.device_memory import DeviceMemory
from slora.models.decoder import Decoder
from slora.models.families import read_model_config
from slora.models.lora_deltas import LoraDeltas
from slora.models.step_batch import StepBatch, cut_rows, max_rows
from slora_kernels.batch import AttentionBatch, KVGeometry, LoraTiles, TileLimits
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.triton_kernels import TritonKernels
from slora_kernels.layout import lay_out_adapter

_META = torch.device("meta")
_BLOCK_TOKENS = 16
_LORA_KERNEL = "_lora_"
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
_ALLOCATIONS = (torch.ops.aten.empty_like.default,)


@dataclass(frozen=True, slots=True)
class StepShape:
    """`batch` sequences that each compute `tokens` behind `context` others, divided evenly among `adapters` of `rank`
    on all linears of the layers; none: the bare base."""

    batch: int
    adapters: int
    tokens: int = 1
    context: int = 1024
    rank: int = 16


@dataclass(frozen=True, slots=True)
class StepCount:
    """What a step launches, and the least that it must read, write and multiply.

    weight_bytes: of the base's matmuls, read once. kv_bytes: of the contexts. adapter_bytes: of the distinct adapters.
    shrunk_bytes: what shrink leaves for expand, written and read once. out_bytes: what expand adds to, read and written
    once more. launches: of the base, kernels of torch's and of ours.
    """

    launches: int
    lora_launches: int
    lora_launches_by_layer: float
    weight_bytes: int
    kv_bytes: int
    adapter_bytes: int
    shrunk_bytes: int
    out_bytes: int
    base_flops: int
    lora_flops: int


class MetaModel:
    """A decoder whose weights are shapes. fields: as in config.json."""

    def __init__(self, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(fields), encoding="utf-8")
            self._config = read_model_config(Path(directory))
        self.shape = self._config.shape(dtype.itemsize)
        self._geometry = KVGeometry(
            self.shape.num_layers,
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            _BLOCK_TOKENS,
            dtype,
        )
        self._decoder = Decoder(self._config, MadeWeights(dtype, _META), _BLOCK_TOKENS)

    def count(self, step: StepShape) -> StepCount:
        launches: list[Launch] = []
        kernels = TritonKernels(launches.append)
        page_bytes = self.shape.layer_page_bytes(_BLOCK_TOKENS) * self.shape.num_layers
        linears = self.shape.num_modules - 2
        layout = lay_out_adapter(self.shape, [step.rank] * linears + [0, 0])
        memory = DeviceMemory(
            self._geometry, self.shape, page_bytes, 2, 1, -(-layout.num_bytes // page_bytes), _META
        )
        batch = _make_batch(step, kernels.tile_limits, layout.targets.max_group_rank)
        with torch.inference_mode(), _TorchOps() as ops:
            hidden = self._decoder.forward(batch, memory, kernels)
            logits = self._decoder.logits(hidden, LoraDeltas(batch.head_lora, memory, kernels))
            kernels.argmax(logits)
        lora = [launch for launch in launches if launch.kernel.__name__.startswith(_LORA_KERNEL)]
        contexts = step.batch * (step.context + step.tokens)
        rows = step.batch * step.tokens if step.adapters else 0
        return StepCount(
            launches=ops.launches + len(launches) - len(lora),
            lora_launches=len(lora),
            lora_launches_by_layer=len(lora) / self.shape.num_layers,
            weight_bytes=ops.weight_bytes,
            kv_bytes=contexts * page_bytes // _BLOCK_TOKENS,
            adapter_bytes=step.adapters * layout.num_bytes,
            shrunk_bytes=sum(_num_bytes(launch, "shrunk") for launch in lora),
            out_bytes=2 * sum(_num_bytes(launch, "out") for launch in lora),
            base_flops=ops.flops,
            lora_flops=2 * rows * layout.num_bytes // self.shape.element_bytes,
        )


def _num_bytes(launch: Launch, name: str) -> int:
    tensor = launch.arguments.get(name)
    return tensor.nbytes if isinstance(tensor, Tensor) else 0


def _make_batch(step: StepShape, limits: TileLimits, max_group_rank: int) -> StepBatch:
    num_tokens, context = step.batch * step.tokens, step.context + step.tokens

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    lora: tuple[LoraTiles, ...] = ()
    if step.adapters:
        counts = [len(range(first, step.batch, step.adapters)) for first in range(step.adapters)]
        decode_tokens = limits.decode_tokens if step.tokens == 1 else None
        most = decode_tokens or limits.tokens
        tiles = [tile for count in counts for tile in cut_rows((0, 1.0), count * step.tokens, most)]
        weights = torch.empty(len(tiles), device=_META)
        num_decodes = len(tiles) if decode_tokens else 0
        lora = (LoraTiles(ints(len(tiles), 3), weights, max_group_rank, max_rows(tiles), num_decodes),)
    attention = AttentionBatch(
        query_starts=ints(step.batch + 1),
        context_lens=ints(step.batch),
        block_tables=ints(step.batch, -(-context // _BLOCK_TOKENS)),
        positions=ints(num_tokens, dtype=torch.int64),
        kv_slots=ints(num_tokens, dtype=torch.int64),
        max_query_len=step.tokens,
        max_context_len=context,
    )
    return StepBatch(
        token_ids=ints(num_tokens, dtype=torch.int64),
        attention=attention,
        lora=lora,
        adapts_embedding=False,
        adapts_norms=False,
        head_lora=(),
        output_rows=ints(step.batch, dtype=torch.int64),
        sampling_rows=ints(0, dtype=torch.int64),
        sampling=[],
        prompts=[],
        pooled=[],
    )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


class _TorchOps(TorchDispatchMode):
    """Counts operations that compute: those that return a view, or take no tensor, launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.flops = self.weight_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        first = result[0] if isinstance(result, tuple) else result
        writes = any(
            value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns
        )
        is_view = not writes and any(_share_memory(first, tensor) for tensor in tensors)
        if tensors and not is_view and func not in _ALLOCATIONS:
            self.launches += 1
        if func in _MATMULS:
            weight = [value for value in tensors if value.ndim == 2][1]  # a bias has one dimension
            self.flops += 2 * result.shape[0] * prod(weight.shape)
            self.weight_bytes += weight.nbytes
        return result
