"""Compiles every Triton kernel for GPUs that are not here, and reports what each needs.

    python -P -m slora_kernels.ahead_of_time sm_90 gfx942

Triton is given a driver that names a target and nothing else; the launchers then bind real tensors of a real
model's shapes, and Triton works out signature, alignments and options exactly as it does when it launches. Runs
in a process without TRITON_INTERPRET: an interpreted kernel cannot be compiled.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget

from slora_kernels.act_mul import bind_act_mul
from slora_kernels.batch import AdapterTables, AttentionBatch, AttentionRule, KVGeometry, LoraTiles
from slora_kernels.launch import Launch
from slora_kernels.layout import LoraSite, ModelShape, lay_out_adapter, llama_shape
from slora_kernels.lora_expand import bind_lora_expand
from slora_kernels.lora_look_up import bind_lora_look_up
from slora_kernels.lora_shrink import bind_lora_shrink
from slora_kernels.paged_attention_decode import bind_paged_attention_decode
from slora_kernels.paged_attention_prefill import bind_paged_attention_prefill
from slora_kernels.quantized_linear import bind_quantized_linear
from slora_kernels.rms_norm import bind_rms_norm
from slora_kernels.rotate_and_write_kv import bind_rotate_and_write_kv

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# mma.sync, wgmma and tcgen05.mma on NVIDIA, v_mfma on AMD.
_MATRIX_INSTRUCTION = re.compile(r"mma\S*\.(bf16|f16|kind::f16)|v_mfma_f32_\w*(bf16|f16)")
_TOKENS = 16
_CONTEXT = 4096
_INTERMEDIATE = 14336


@dataclass(frozen=True, slots=True)
class _AbsentGpu:
    """What Triton asks of a driver before it compiles. Triton keeps compiled kernels by device: one per target."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)

    def get_current_stream(self, device: str) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled launch. shared_bytes: shared memory (LDS) of a program; binary_bytes: machine code.

    matrix_cores: whether its products of 16-bit operands became matrix instructions.
    """

    target: str
    dtype: str
    kernel: str
    num_warps: int
    shared_bytes: int
    binary_bytes: int
    matrix_cores: bool


def _shape_of_llama_8b(dtype: torch.dtype) -> ModelShape:
    return llama_shape(1, 4096, 32, 8, 128, _INTERMEDIATE, 128256, dtype.itemsize)


def _bind_lora(shape: ModelShape, pages: torch.Tensor, dtype: torch.dtype, site: LoraSite) -> list[Launch]:
    layout = lay_out_adapter(shape, [16] * shape.num_modules)
    tables = AdapterTables(
        torch.zeros(1, 64, dtype=torch.int32),
        torch.from_numpy(layout.groups)[None],
        torch.from_numpy(layout.modules)[None],
        torch.ones(1, shape.num_modules),
    )
    tiles = LoraTiles(torch.tensor([[0, 0, _TOKENS]], dtype=torch.int32), torch.ones(1), 48)
    if site == shape.embedding_site:
        token_ids = torch.zeros(_TOKENS, dtype=torch.int64)
        first, bridge = bind_lora_look_up(token_ids, pages, tables, site, tiles, dtype)
    else:
        x = torch.zeros(_TOKENS, site.in_width, dtype=dtype)
        first, bridge = bind_lora_shrink(x, pages, tables, site, tiles)
    out = torch.zeros(_TOKENS, sum(site.widths), dtype=dtype)
    return [first, bind_lora_expand(out, bridge, pages, tables, site, tiles)]


def _bind_attention(shape: ModelShape, pages: torch.Tensor, dtype: torch.dtype) -> list[Launch]:
    geometry = KVGeometry(1, shape.num_heads, shape.num_kv_heads, shape.head_dim, 16, dtype)
    batch = AttentionBatch(
        torch.tensor([0, 1, _TOKENS], dtype=torch.int32),
        torch.tensor([_CONTEXT, _TOKENS], dtype=torch.int32),
        torch.zeros(2, _CONTEXT // 16, dtype=torch.int32),
        torch.zeros(_TOKENS, dtype=torch.int64),
        torch.zeros(_TOKENS, dtype=torch.int64),
        _TOKENS - 1,
        _CONTEXT,
    )
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.zeros(_TOKENS, heads * shape.head_dim, dtype=dtype)
    q = qkv.view(_TOKENS, heads, shape.head_dim)[:, : shape.num_heads]
    out = torch.zeros(_TOKENS, shape.num_heads * shape.head_dim, dtype=dtype)
    angles = torch.zeros(_CONTEXT, shape.head_dim)
    return [
        *bind_paged_attention_decode(q, pages, out, geometry, 0, batch, AttentionRule(0.1)),
        bind_paged_attention_prefill(q, pages, out, geometry, 0, batch, AttentionRule(0.1)),
        bind_rotate_and_write_kv(qkv, angles, pages, geometry, 0, batch),
    ]


def _bind_quantized_linears(shape: ModelShape, dtype: torch.dtype, forms: list[torch.dtype]) -> list[Launch]:
    """Of a decode step, a mixed one and a prefill, with 8-bit weights of each form."""
    launches = []
    for form in forms:
        values = torch.zeros(shape.hidden_size, shape.hidden_size, dtype=torch.int8).view(form)
        scales = torch.ones(shape.hidden_size)
        for num_tokens in (_TOKENS, 4 * _TOKENS, 64 * _TOKENS):
            x = torch.zeros(num_tokens, shape.hidden_size, dtype=dtype)
            launches.append(bind_quantized_linear(x, values, scales, None)[0])
    return launches


def _quantized_forms(target: GPUTarget) -> list[torch.dtype]:
    """float8_e4m3fn is known from sm_89 up, and in software on gfx942."""
    has_float8 = target.backend == "hip" or target.arch >= 89
    return [torch.int8, torch.float8_e4m3fn] if has_float8 else [torch.int8]


def bind_all(dtype: torch.dtype, forms: list[torch.dtype]) -> list[Launch]:
    """Every kernel as Llama-3.1-8B launches it. forms: the 8-bit numbers that weights may be."""
    shape = _shape_of_llama_8b(dtype)
    pages = torch.zeros(2, shape.page_bytes(16), dtype=torch.uint8)
    x = torch.zeros(_TOKENS, shape.hidden_size, dtype=dtype)
    launches = [launch for site in shape.sites for launch in _bind_lora(shape, pages, dtype, site)]
    launches += _bind_attention(shape, pages, dtype)
    launches += [bind_rms_norm(x, None, x[0], 1e-5)[0], bind_rms_norm(x, x, x[0], 1e-5)[0]]
    launches.append(bind_act_mul(torch.zeros(_TOKENS, 2 * _INTERMEDIATE, dtype=dtype), "silu")[0])
    return launches + _bind_quantized_linears(shape, dtype, forms)


def compile_all(target: str, dtype: str) -> Iterator[CompiledKernel]:
    """Compiles every kernel for one of `TARGETS`; what Triton raises passes through."""
    triton.runtime.driver.set_active(_AbsentGpu(TARGETS[target]))
    for launch in bind_all(DTYPES[dtype], _quantized_forms(TARGETS[target])):
        compiled = launch.compile()
        metadata = compiled.metadata
        assembly = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        yield CompiledKernel(
            target,
            dtype,
            metadata.name,
            metadata.num_warps,
            metadata.shared,
            len(compiled.kernel),
            _MATRIX_INSTRUCTION.search(assembly) is not None,
        )


def main(targets: list[str]) -> None:
    for target in targets or TARGETS:
        for compiled in compile_all(target, "bfloat16"):
            print(
                json.dumps({name: getattr(compiled, name) for name in CompiledKernel.__slots__}), flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
