"""The Triton implementation of `Kernels`. It never synchronises with the host and prepares nothing per step.

LoRA needs eight launches per layer: one shrink and one expand for each of four linear groups. In a decode step, both
run beside the base model's matmul, and the kernel that reads the matmul's output adds the delta. Decode rows have an
expand kernel of their own, so a step that also contains prefill chunks launches expand twice per group. Such a step is
bound by arithmetic, and the extra launches matter little.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slora_kernels.batch import (
    Activation,
    AdapterTables,
    AttentionBatch,
    AttentionRule,
    AttentionStep,
    KVGeometry,
    LoraStep,
    LoraTiles,
    QueryKeyNorm,
    TileLimits,
    TokenRows,
)
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.gpu.act_mul import bind_act_mul
from slora_kernels.gpu.argmax import bind_argmax
from slora_kernels.gpu.coded_linear import bind_coded_linear
from slora_kernels.gpu.grouped_linear import bind_grouped_linear
from slora_kernels.gpu.gumbel_sample import bind_gumbel_sample
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.lora_affine import bind_lora_affine
from slora_kernels.gpu.lora_expand import bind_lora_expand
from slora_kernels.gpu.lora_expand_rows import ROW_TILE_TOKENS
from slora_kernels.gpu.lora_shrink import TILE_TOKENS, bind_lora_shrink
from slora_kernels.gpu.lora_shrink_embedding import bind_lora_shrink_embedding
from slora_kernels.gpu.lora_sizes import LoraSizes, load_sizes, name_architecture
from slora_kernels.gpu.mask_logits import bind_mask_logits
from slora_kernels.gpu.paged_attention_decode import bind_paged_attention_decode
from slora_kernels.gpu.paged_attention_prefill import bind_paged_attention_prefill
from slora_kernels.gpu.quantized_linear import bind_quantized_linear
from slora_kernels.gpu.rms_norm import bind_rms_norm
from slora_kernels.gpu.rotate_and_write_kv import bind_rotate_and_write_kv
from slora_kernels.gpu.token_cutoffs import bind_token_cutoffs
from slora_kernels.gpu.token_weights import bind_token_weights
from slora_kernels.layout import LoraSite
from slora_kernels.sampling_tensors import SamplingTensors
from slora_kernels.torch.token_rows import token_logits


class TritonKernels:
    """The Triton implementation of `Kernels`.

    The shrink output is [splits, T, rank] of the model's dtype, and expand sums the splits.

    launch: the function that is called with every launch. By default, it runs the launch. Tests and measurements pass a
    function that records launches.
    sizes: block sizes of the LoRA kernels. None: the package's defaults.
    """

    name = "triton"

    def __init__(
        self,
        launch: Callable[[Launch], None] = Launch.run,
        sizes: LoraSizes | None = None,
    ) -> None:
        self._launch = launch
        self._sizes = sizes or load_sizes()

    @staticmethod
    def on(device: torch.device) -> "TritonKernels":
        """Kernels with the LoRA sizes tuned for this GPU."""
        return TritonKernels(sizes=load_sizes(name_architecture(device)))

    @property
    def tile_limits(self) -> TileLimits:
        return TileLimits(TILE_TOKENS, ROW_TILE_TOKENS)

    def warm_up(self, geometry: KVGeometry) -> float:
        """Returns 0 without compiling: Triton compiles at the first launch, which needs real tensors."""
        return 0.0

    def collecting_jobs(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, None)

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        return LoraStep(tiles, tables, None)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        launch, out = bind_rms_norm(x, None, weight, eps)
        self._launch(launch)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        launch, out = bind_rms_norm(x, residual, weight, eps, delta)
        self._launch(launch)
        return out

    def act_mul(self, gate_up: Tensor, activation: Activation, delta: Tensor | None = None) -> Tensor:
        launch, out = bind_act_mul(gate_up, activation, delta)
        self._launch(launch)
        return out

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        launch, out = bind_quantized_linear(x, values, scales, bias)
        self._launch(launch)
        return out

    def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        launch, out = bind_coded_linear(x, weight, bias)
        self._launch(launch)
        return out

    def grouped_linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
        launch, out = bind_grouped_linear(x, weight, scales, starts)
        self._launch(launch)
        return out

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        norms: QueryKeyNorm | None = None,
        delta: Tensor | None = None,
    ) -> Tensor:
        self._launch(bind_rotate_and_write_kv(qkv, cos_sin, pages, geometry, layer, step.batch, norms, delta))
        heads = qkv.view(qkv.shape[0], qkv.shape[1] // geometry.head_dim, geometry.head_dim)
        return heads[:, : geometry.num_heads]

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> Tensor:
        batch = step.batch
        out = torch.empty(q.shape[0], geometry.num_heads * geometry.head_dim, dtype=q.dtype, device=q.device)
        # Both kernels get all sequences. On the device, decode skips sequences of several queries, and prefill skips
        # sequences of one query.
        if batch.max_query_len == 1 or batch.context_lens.shape[0] > 1:
            for launch in bind_paged_attention_decode(q, pages, out, geometry, layer, batch, rule):
                self._launch(launch)
        if batch.max_query_len > 1:
            self._launch(bind_paged_attention_prefill(q, pages, out, geometry, layer, batch, rule))
        return out

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        self._launch(bind_mask_logits(logits, rows, masks))

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        launches, best, tokens = bind_argmax(logits)
        for launch in launches:
            self._launch(launch)
        return best, tokens

    def sample(self, logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
        launch, weights = bind_token_weights(logits, max_logits, sampling)
        self._launch(launch)
        cutoffs = None
        if sampling.has_filters:
            launch, cutoffs = bind_token_cutoffs(weights, sampling)
            self._launch(launch)
        launch, tokens = bind_gumbel_sample(weights, cutoffs, sampling, logits.shape[1])
        self._launch(launch)
        return tokens

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Tensor:
        launch, shrunk = bind_lora_shrink(x, pages, step.tables, site, step.tiles, self._sizes)
        if step.tiles.max_group_rank:
            self._launch(launch)
        return shrunk

    def shrink_embedding(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Tensor:
        launch, shrunk = bind_lora_shrink_embedding(token_ids, pages, step.tables, site, step.tiles, dtype)
        if step.tiles.max_group_rank:
            self._launch(launch)
        return shrunk

    def expand(self, out: Tensor, shrunk: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        if step.tiles.max_group_rank:
            for launch in bind_lora_expand(out, shrunk, pages, step.tables, site, step.tiles, self._sizes):
                self._launch(launch)

    def apply_affine(self, out: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        self._launch(bind_lora_affine(out, pages, step.tables, site, step.tiles))

    def token_logits(self, hidden: Tensor, rows: TokenRows) -> Tensor:
        return token_logits(hidden, rows)

    def write_delta(
        self, delta: Tensor, shrunk: Tensor, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        for launch in bind_lora_expand(
            delta, shrunk, pages, step.tables, site, step.tiles, self._sizes, adds=False
        ):
            self._launch(launch)
