"""Every Triton launch of a step, for the shapes of real models, bound to tensors of zeros.

The models stress the kernels in different ways:

- Llama-3.1-8B: grouped heads of 128, and LoRA of three ranks.
- Gemma-2-9B: heads of 256, soft cap, window, norms in float32, GELU.
- Phi-3-mini: heads of 96, which is not a power of two, and one KV head per query head.
- Qwen3-8B: norms of q and k heads.
- gpt-oss-20b: sinks, and heads of 64. LongCat-Flash and Gemma-4-E4B: heads of 192 and 512.
- DeepSeek-V3 and MiniCPM3: latents of 512 and 256.
- Qwen3-30B-A3B: 128 experts in each layer.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from slora_kernels.batch import (
    AdapterTables,
    AttentionBatch,
    AttentionRule,
    KVGeometry,
    LoraTiles,
    QueryKeyNorm,
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
from slora_kernels.gpu.lora_shrink import TILE_TOKENS, bind_lora_shrink
from slora_kernels.gpu.lora_shrink_embedding import bind_lora_shrink_embedding
from slora_kernels.gpu.lora_sizes import LoraSizes
from slora_kernels.gpu.mask_logits import bind_mask_logits
from slora_kernels.gpu.paged_attention_decode import bind_paged_attention_decode
from slora_kernels.gpu.paged_attention_prefill import bind_paged_attention_prefill
from slora_kernels.gpu.quantized_linear import bind_quantized_linear
from slora_kernels.gpu.rms_norm import bind_rms_norm
from slora_kernels.gpu.rotate_and_write_kv import bind_rotate_and_write_kv
from slora_kernels.gpu.token_cutoffs import bind_token_cutoffs
from slora_kernels.gpu.token_weights import bind_token_weights
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import AdapterLayout, Affine, LoraSite, ModelShape, lay_out_adapter, llama_shape
from slora_kernels.sampling_tensors import NO_TOP_K, SamplingTensors

RANKS = (8, 16, 64)
_TOKENS = 16
_CONTEXT = 8192
_BLOCK_TOKENS = 16
_INTERMEDIATE = 14336
_INTEGERS = torch.arange(-8.0, 8.0)
# The table of bitsandbytes' nf4. No 16-bit dtype holds its numbers.
_NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022833334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip

Launches = Iterator[tuple[str, Launch]]


def bind_lora_site(
    shape: ModelShape,
    pages: Tensor,
    dtype: torch.dtype,
    site: LoraSite,
    rank: int,
    tokens: int,
    sizes: LoraSizes,
) -> list[Launch]:
    """The LoRA launches of one site, for a step with one tile of decode rows and one tile of a prefill chunk.

    Returns a launch of shrink (`lora_shrink_embedding` at the embedding), then two launches of expand, one per tile.
    """
    layout = lay_out_adapter(shape, [rank] * shape.num_modules)
    tables = _make_tables(shape, layout)
    rows = torch.tensor([[0, 0, _TOKENS], [0, _TOKENS, tokens]], dtype=torch.int32)
    tiles = LoraTiles(rows, torch.ones(2), 3 * rank, tokens, num_decodes=1)
    tokens += _TOKENS
    if site == shape.embedding_site:
        token_ids = torch.zeros(tokens, dtype=torch.int64)
        first, shrunk = bind_lora_shrink_embedding(token_ids, pages, tables, site, tiles, dtype)
    else:
        x = torch.zeros(tokens, site.in_width, dtype=dtype)
        first, shrunk = bind_lora_shrink(x, pages, tables, site, tiles, sizes)
    out = torch.zeros(tokens, sum(site.widths), dtype=dtype)
    return [first, *bind_lora_expand(out, shrunk, pages, tables, site, tiles, sizes)]


def _bind_delta(
    shape: ModelShape,
    pages: Tensor,
    dtype: torch.dtype,
    site: LoraSite,
    rank: int,
    sizes: LoraSizes,
) -> list[Launch]:
    """The LoRA launches of one site that runs beside the base model's matmul."""
    layout = lay_out_adapter(shape, [rank] * shape.num_modules)
    tables = _make_tables(shape, layout)
    rows = torch.tensor([[0, 0, _TOKENS], [0, _TOKENS, TILE_TOKENS]], dtype=torch.int32)
    tiles = LoraTiles(rows, torch.ones(2), 3 * rank, TILE_TOKENS, num_decodes=1)
    x = torch.zeros(_TOKENS + TILE_TOKENS, site.in_width, dtype=dtype)
    delta = torch.zeros(len(x), sum(site.widths), dtype=dtype)
    first, shrunk = bind_lora_shrink(x, pages, tables, site, tiles, sizes)
    return [
        first,
        *bind_lora_expand(delta, shrunk, pages, tables, site, tiles, sizes, adds=False),
    ]


def _bind_affine(shape: ModelShape, pages: Tensor, dtype: torch.dtype, site: LoraSite) -> Launch:
    affine = dict.fromkeys(range(shape.num_modules), Affine(has_magnitude=True, replaces_bias=False))
    tables = _make_tables(shape, lay_out_adapter(shape, [1] * shape.num_modules, affine))
    tiles = LoraTiles(torch.tensor([[0, 0, _TOKENS]], dtype=torch.int32), torch.ones(1), 3, _TOKENS)
    out = torch.zeros(_TOKENS, sum(site.widths), dtype=dtype)
    return bind_lora_affine(out, pages, tables, site, tiles)


def _make_tables(shape: ModelShape, layout: AdapterLayout) -> AdapterTables:
    return AdapterTables(
        torch.zeros(1, 64, dtype=torch.int32),
        torch.from_numpy(layout.groups)[None],
        torch.from_numpy(layout.modules)[None],
        torch.ones(1, shape.num_modules),
        torch.from_numpy(layout.affine)[None],
    )


def _bind_attention(geometry: KVGeometry, rule: AttentionRule, norms: QueryKeyNorm | None) -> list[Launch]:
    """The attention launches of a step in which one sequence decodes and another computes a prefill chunk."""
    dtype, head_dim = geometry.dtype, geometry.head_dim
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, _TOKENS], dtype=torch.int32),
        context_lens=torch.tensor([_CONTEXT, _TOKENS], dtype=torch.int32),
        block_tables=torch.zeros(2, _CONTEXT // _BLOCK_TOKENS, dtype=torch.int32),
        positions=torch.zeros(_TOKENS, dtype=torch.int64),
        kv_slots=torch.zeros(_TOKENS, dtype=torch.int64),
        max_query_len=_TOKENS - 1,
        max_context_len=_CONTEXT,
    )
    pages = torch.zeros(2, geometry.layout.num_bytes, dtype=torch.uint8)
    num_vectors = geometry.num_heads + geometry.num_sides * geometry.num_kv_heads
    qkv = torch.zeros(_TOKENS, num_vectors * head_dim, dtype=dtype)
    q = qkv.view(_TOKENS, -1, head_dim)[:, : geometry.num_heads]
    out = torch.zeros(_TOKENS, geometry.num_heads * head_dim, dtype=dtype)
    attention = [
        *bind_paged_attention_decode(q, pages, out, geometry, 0, batch, rule),
        bind_paged_attention_prefill(q, pages, out, geometry, 0, batch, rule),
    ]
    if geometry.latent_width:
        # The model's own class rotates.
        return [*attention, bind_rotate_and_write_kv(qkv, None, pages, geometry, 0, batch)]
    angles = torch.zeros(_CONTEXT, head_dim)
    return [
        *attention,
        bind_rotate_and_write_kv(qkv, angles, pages, geometry, 0, batch, norms, qkv.float()),
        bind_rotate_and_write_kv(qkv, angles, pages, geometry, 0, batch, norms),
    ]


def _bind_sampling(logits: Tensor) -> list[Launch]:
    """The sampling launches of a step in which all rows sample, with and without filters."""
    count = len(logits)
    ints, floats = np.zeros((3, count), np.int64), np.ones((3, count))
    ints[2] = NO_TOP_K
    sampling = SamplingTensors.upload(ints, floats, logits.device)
    launch, weights = bind_token_weights(logits, torch.zeros(count), sampling)
    masks = torch.zeros(count, -(-logits.shape[1] // 32), dtype=torch.int32)
    masked = bind_mask_logits(logits, sampling.rows, masks)
    launches = [masked, *bind_argmax(logits)[0], launch, bind_token_cutoffs(weights, sampling)[0]]
    return launches + [
        bind_gumbel_sample(weights, w, sampling, logits.shape[1])[0] for w in (None, weights[:, 0])
    ]


def _bind_llama(dtype: torch.dtype, sizes: LoraSizes) -> Launches:
    shape = llama_shape(1, 4096, 32, 8, 128, _INTERMEDIATE, 128256, dtype.itemsize)
    # Pages of all 32 layers, because the size of a page decides how kernels look up page ids.
    pages = torch.zeros(2, 32 * shape.layer_page_bytes(_BLOCK_TOKENS), dtype=torch.uint8)
    for rank in RANKS:
        for index, site in enumerate(shape.sites):
            for tokens in (_TOKENS, TILE_TOKENS):
                for launch in bind_lora_site(shape, pages, dtype, site, rank, tokens, sizes):
                    yield f"Llama-3.1-8B, site {index}, tiles of {tokens}, rank {rank}", launch
        for index, site in enumerate(shape.layer_sites(0)):
            for launch in _bind_delta(shape, pages, dtype, site, rank, sizes):
                yield f"Llama-3.1-8B, delta of site {index}, rank {rank}", launch
    for index, site in enumerate(shape.sites):
        yield f"Llama-3.1-8B, DoRA at site {index}", _bind_affine(shape, pages, dtype, site)
    geometry = KVGeometry(1, 32, 8, 128, _BLOCK_TOKENS, dtype)
    x = torch.zeros(_TOKENS, shape.hidden_size, dtype=dtype)
    gate_up = torch.zeros(_TOKENS, 2 * _INTERMEDIATE, dtype=dtype)
    for launch in (
        *_bind_attention(geometry, AttentionRule(0.1), None),
        bind_rms_norm(x, None, x[0], 1e-5)[0],
        bind_rms_norm(x, x, x[0], 1e-5)[0],
        bind_rms_norm(x, x, x[0], 1e-5, x.float())[0],
        bind_act_mul(gate_up, "silu")[0],
        bind_act_mul(gate_up, "silu", gate_up.float())[0],
        *_bind_sampling(torch.zeros(_TOKENS, shape.vocab_size, dtype=dtype)),
    ):
        yield "Llama-3.1-8B", launch


def _bind_gemma(dtype: torch.dtype) -> Launches:
    geometry = KVGeometry(1, 16, 8, 256, _BLOCK_TOKENS, dtype)
    x = torch.zeros(_TOKENS, 3584, dtype=dtype)
    for launch in (
        *_bind_attention(geometry, AttentionRule(1 / 16, window=4096, softcap=50.0), None),
        bind_rms_norm(x, x, torch.ones(3584), 1e-6)[0],
        bind_act_mul(torch.zeros(_TOKENS, 2 * _INTERMEDIATE, dtype=dtype), "gelu_tanh")[0],
    ):
        yield "Gemma-2-9B", launch


def _bind_phi(dtype: torch.dtype) -> Launches:
    geometry = KVGeometry(1, 32, 32, 96, _BLOCK_TOKENS, dtype)
    for launch in _bind_attention(geometry, AttentionRule(0.1, window=2047), None):
        yield "Phi-3-mini", launch


def _bind_qwen(dtype: torch.dtype) -> Launches:
    norm = torch.ones(128, dtype=dtype)
    geometry = KVGeometry(1, 32, 8, 128, _BLOCK_TOKENS, dtype)
    yield "Qwen3-8B", _bind_attention(geometry, AttentionRule(0.1), QueryKeyNorm(norm, norm, 1e-6))[-1]


def _bind_other_attention(dtype: torch.dtype) -> Launches:
    """The attention launches of models that transformers' classes compute. Rotating is the same as for other models."""
    for model, heads, rule in (
        ("gpt-oss-20b", (64, 8, 64), AttentionRule(1 / 8, window=128, sinks=torch.zeros(64))),
        ("LongCat-Flash", (64, 64, 192), AttentionRule(0.1)),
        ("Gemma-4-E4B", (8, 2, 512), AttentionRule(1.0)),
    ):
        geometry = KVGeometry(1, *heads, _BLOCK_TOKENS, dtype)
        for launch in _bind_attention(geometry, rule, None)[:-2]:
            yield model, launch


def _bind_latents(dtype: torch.dtype, kv_format: KVFormat) -> Launches:
    for model, heads, width in (("DeepSeek-V3", (128, 1, 576), 512), ("MiniCPM3", (40, 1, 288), 256)):
        geometry = KVGeometry(1, *heads, _BLOCK_TOKENS, dtype, kv_format, width)
        case = model if kv_format is KVFormat.MODEL else f"{model}, KV in fp8"
        for launch in _bind_attention(geometry, AttentionRule(0.1), None):
            yield case, launch


def _bind_quantized_linears(dtype: torch.dtype, forms: list[torch.dtype]) -> Launches:
    """The launches of a decode step, a mixed step and a prefill step, for each 8-bit weight dtype in `forms`."""
    for form in forms:
        values = torch.zeros(4096, 4096, dtype=torch.int8).view(form)
        for num_tokens in (_TOKENS, 4 * _TOKENS, 64 * _TOKENS):
            x = torch.zeros(num_tokens, 4096, dtype=dtype)
            launch, _ = bind_quantized_linear(x, values, torch.ones(4096), None)
            yield f"Llama-3.1-8B, {form} weights, {num_tokens} tokens", launch


def _bind_coded_linears(dtype: torch.dtype) -> Launches:
    """The launches of a decode step, a mixed step and a prefill step.

    The weights are those of `--quantization int4`, of AWQ with zero points, and of bitsandbytes.
    """
    for name, table, group, scale_dtype, has_minimums in (
        ("int4", _INTEGERS + 8, 32, torch.float16, True),
        ("int4", _INTEGERS, 128, torch.float32, True),
        ("nf4", _NF4, 64, torch.float32, False),
    ):
        scales = torch.ones(4096, 4096 // group, dtype=scale_dtype)
        minimums = scales if has_minimums else scales.new_empty(0, 0)
        weight = CodedWeight(torch.zeros(4096, 2048, dtype=torch.uint8), scales, minimums, table)
        for num_tokens in (_TOKENS, 4 * _TOKENS, 64 * _TOKENS):
            launch, _ = bind_coded_linear(torch.zeros(num_tokens, 4096, dtype=dtype), weight, None)
            yield f"Llama-3.1-8B, {name} weights, groups of {group}, {num_tokens} tokens", launch


def _bind_experts(dtype: torch.dtype, forms: list[torch.dtype]) -> Launches:
    """The launches of experts in a decode step, a mixed step and a prefill step, for weights of each dtype."""
    num_experts, num_rows, width = 128, 1536, 2048
    starts, scales = torch.zeros(num_experts + 1, dtype=torch.int32), torch.ones(num_experts, num_rows)
    for form in (dtype, *forms):
        # One weight stands for all experts, so that they take no memory.
        weight = torch.zeros(1, num_rows, width, dtype=form).expand(num_experts, -1, -1)
        for num_tokens in (1, 4 * _TOKENS, 16 * _TOKENS):
            x = torch.zeros(num_tokens * num_experts, width, dtype=dtype)
            launch, _ = bind_grouped_linear(x, weight, None if form == dtype else scales, starts)
            yield f"Qwen3-30B-A3B, {form} experts, {num_tokens} tokens each", launch


def _bind_fp8_kv(dtype: torch.dtype) -> Launches:
    """The attention launches over fp8 pages, for the most common model and for the model with the widest heads."""
    for model, heads, rule in (
        ("Llama-3.1-8B", (32, 8, 128), AttentionRule(0.1)),
        ("Gemma-2-9B", (16, 8, 256), AttentionRule(1 / 16, window=4096, softcap=50.0)),
    ):
        geometry = KVGeometry(1, *heads, _BLOCK_TOKENS, dtype, KVFormat.FP8)
        for launch in _bind_attention(geometry, rule, None):
            yield f"{model}, KV in fp8", launch


def bind_all(
    dtype: torch.dtype,
    forms: list[torch.dtype],
    kv_formats: list[KVFormat],
    sizes: LoraSizes,
) -> Launches:
    """All launches, each with a description (see `CompiledKernel.case`).

    forms: 8-bit dtypes of weights. kv_formats: formats of KV in pages.
    """
    yield from _bind_llama(dtype, sizes)
    for bound in (_bind_gemma, _bind_phi, _bind_qwen, _bind_other_attention):
        yield from bound(dtype)
    for kv_format in kv_formats:
        yield from _bind_latents(dtype, kv_format)
    yield from _bind_quantized_linears(dtype, forms)
    yield from _bind_coded_linears(dtype)
    yield from _bind_experts(dtype, forms)
    if KVFormat.FP8 in kv_formats:
        yield from _bind_fp8_kv(dtype)
