"""Properties of the compiled kernels for GPUs that this machine lacks: spills, shared memory, wide loads, matrix
products.

The kernels are compiled in separate processes without TRITON_INTERPRET, with the launchers' own arguments. The tables
below hold the requirements of each kernel, and the limits of the targets with their sources.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slora_kernels.gpu.compiled_kernel import CompiledKernel

# Maximum shared memory of one program. NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability", maximum shared memory per thread block: 163 KB for 8.0, 227 KB for 9.0 and 10.0. AMD: CDNA 3 instruction
# set architecture, local data share: 64 KiB per work-group.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# The instruction for products of 16-bit numbers: for 16 rows, and for the rows of a whole warp group.
SMALL_PRODUCTS = {"sm_80": "mma.sync", "sm_90": "mma.sync", "sm_100": "mma.sync", "gfx942": "v_mfma"}
LARGE_PRODUCTS = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
# The tensors that a kernel reads in bulk, by their names in the source. Every load from them has 16 bytes. Tensors that
# are not named are small: page ids, ranks, and start offsets of 4 or 8 bytes. Expand's input from shrink is not named
# either, because its rows begin wherever a module's rank ends.
WIDE_LOADS = {
    "_lora_shrink_kernel": {"x_rows", "pages"},
    "_lora_expand_kernel": {"pages", "target"},
    "_lora_expand_rows_kernel": {"pages"},
    # Each of 128 threads reads four scales and four offsets.
    "_lora_affine_kernel": set(),
    "_paged_attention_decode_kernel": {"source", "place"},
    "_merge_splits_kernel": {"source"},
    "_paged_attention_prefill_kernel": {"source", "place"},
    "_rms_norm_kernel": {"x", "weight"},
    "_act_mul_kernel": {"source"},
    "_block_argmax_kernel": {"logits"},
    # A row has a few blocks.
    "_merge_argmax_kernel": set(),
    "_token_weights_kernel": {"logits"},
    "_token_cutoffs_kernel": {"source"},
    "_gumbel_sample_kernel": {"source"},
    # It gathers single numbers, because the rows of A are the embedding's columns.
    "_lora_shrink_embedding_kernel": set(),
    # Each thread reads a few numbers of a head, and a step has few of them.
    "_rotate_and_write_kv_kernel": set(),
    # It reads one bit for each token.
    "_mask_logits_kernel": set(),
    # Prefill is bound by its matrix product. The conversion of numbers in registers decides the data layout.
    "_quantized_linear_kernel": set(),
    # As for `_quantized_linear_kernel`.
    "_coded_linear_kernel": set(),
    # Scales are read beside the codes, 2 bytes each. The test below checks the codes and x.
    "_coded_linear_groups_kernel": set(),
    # As above for 8-bit weights. `test_bulk_loads_of_every_kernel_are_16_bytes_wide` checks the other weights.
    "_grouped_linear_kernel": {"token_starts"},
}
PRODUCTS = {
    "_lora_shrink_kernel": SMALL_PRODUCTS,
    "_lora_expand_kernel": SMALL_PRODUCTS,
    "_paged_attention_decode_kernel": SMALL_PRODUCTS,
    "_paged_attention_prefill_kernel": LARGE_PRODUCTS,
}
# Kernels whose products run on matrix units in all cases, but not always with the same instruction.
LINEARS = (
    "_quantized_linear_kernel",
    "_coded_linear_kernel",
    "_coded_linear_groups_kernel",
    "_grouped_linear_kernel",
)
FP8_KV = "KV in fp8"
# Each target takes one core for a minute.
# The quick run leaves out cases whose kernels differ from others only in widths, in the number of modules or by a
# parameter that the interpreter shows, and combinations of the dtype of weights with the number of tokens. Of attention
# over latents and over KV in fp8, it compiles only the kernel of decode steps.
LEFT_OUT = (
    r"site [01235], tiles|site 4, tiles of 32|delta of site [123]|DoRA at site [1-5]|_expand_rows_kernel: .* site 4"
    r"|Phi-3-mini|LongCat-Flash|MiniCPM3|gpt-oss|Gemma-|Qwen3-8B|DeepSeek-V3, KV|_merge_splits_kernel: .*, KV"
    r"|_merge_splits_kernel: D|_lora_expand_kernel: .* delta of site 0"
    r"|int8 weights, (64|1024) |float8\w* weights, (16|64) |groups of 32, (64|1024) |groups of 128, "
    r"|groups of 64, (16|64) |bfloat16 experts, (1|64) |int8 experts, (1|256) |float8\w* experts, "
    r"|(_attention_prefill|_rotate_and_write_kv)_kernel: (DeepSeek-V3|.*, KV in fp8)"
)
QUICK = (("sm_90", "bfloat16"),)
THOROUGH = tuple((target, dtype) for target in SHARED_LIMITS for dtype in ("bfloat16", "float16", "float32"))


def make_environment(cache: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # The launcher states whether multiply-adds are fused. This variable must have no effect.
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_DEFAULT_FP_FUSION": "0"}
    # The cache belongs to this checkout, because Triton's cache key is a kernel's text and line, not its file. A kernel
    # that another checkout compiled would name source files that may be gone. Loads could then not be assigned to
    # their tensors.
    return environment | {"TRITON_CACHE_DIR": str(cache)}


def start_compiling(target: str, dtype: str, cache: Path, soak: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "slora_kernels.gpu.ahead_of_time", target, dtype]
    command += [] if soak else ["--without", LEFT_OUT]
    environment = make_environment(cache)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish_compiling(process: subprocess.Popen[bytes]) -> list[CompiledKernel]:
    printed, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    rows = [json.loads(line) for line in printed.splitlines()]
    loads = [{pointer: tuple(sizes) for pointer, sizes in row["load_bytes"].items()} for row in rows]
    return [CompiledKernel(**row | {"load_bytes": load}) for row, load in zip(rows, loads, strict=True)]


@pytest.fixture(scope="module")
def compiled(soak: bool, pytestconfig: pytest.Config) -> list[CompiledKernel]:
    """All kernels compiled for the targets of this run, two targets at a time."""
    work, kernels = (THOROUGH if soak else QUICK), []
    cache = pytestconfig.cache.mkdir("triton")
    for at in range(0, len(work), 2):
        processes = [start_compiling(*pair, cache, soak) for pair in work[at : at + 2]]
        for process in processes:
            kernels += finish_compiling(process)
    return kernels


def test_every_kernel_is_compiled_for_every_target_of_the_run(
    compiled: list[CompiledKernel], soak: bool
) -> None:
    pairs = {(kernel.target, kernel.dtype) for kernel in compiled}
    assert pairs == set(THOROUGH if soak else QUICK)
    for pair in pairs:
        assert {k.kernel for k in compiled if (k.target, k.dtype) == pair} == set(WIDE_LOADS)


def test_shared_memory_fits_the_target(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_LIMITS[kernel.target], kernel


def test_a_step_of_other_sizes_compiles_nothing(
    compiled: list[CompiledKernel], pytestconfig: pytest.Config
) -> None:
    """Compiling a kernel takes up to a second, in which all streams wait."""
    environment = make_environment(pytestconfig.cache.mkdir("triton"))
    command = [sys.executable, "-P", "-m", "tests.support.shifted_launches", *QUICK[0], LEFT_OUT]
    printed = subprocess.run(
        command, env=environment, check=True, capture_output=True, encoding="utf-8"
    ).stdout
    found = dict(line.split() for line in printed.splitlines())
    assert len(found) > 12
    assert [name for name, verdict in found.items() if verdict != "same"] == []


def count_tolerated_spills(kernel: CompiledKernel) -> float:
    """The number of spills that a kernel may have.

    Two cases have no limit: float32 products, which only serve checks and are unrolled into all registers, and fp8 on
    gfx942, which converts float8_e4m3fn in software. With two programs per multiprocessor, each thread has 128
    registers. Converting e4m3 to float16 beside tcgen05 needs a few more. With 200 registers nothing would spill, but
    only one program would fit. Prefill attention spills a few on gfx942. With half as many context tokens per iteration
    it would spill none, but take 1.5 times as long for chunks behind a long context (H200).
    """
    if kernel.dtype == "float32" or (kernel.target == "gfx942" and "float8" in kernel.case):
        return math.inf
    if (kernel.target, kernel.kernel) == ("gfx942", "_paged_attention_prefill_kernel"):
        return 8
    is_tight = (kernel.target, kernel.dtype, kernel.kernel) == (
        "sm_100",
        "float16",
        "_paged_attention_prefill_kernel",
    )
    return 24 if is_tight and FP8_KV in kernel.case else 0


def test_no_register_is_spilled(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        assert kernel.spills <= count_tolerated_spills(kernel), kernel
        assert 0 < kernel.registers <= 512 and kernel.binary_bytes > 0, kernel


def has_latents(kernel: CompiledKernel) -> bool:
    return re.match("DeepSeek-V3|MiniCPM3", kernel.case) is not None


def test_bulk_loads_of_every_kernel_are_16_bytes_wide(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        loads = kernel.load_bytes
        # The assembly assigns a load to its own source line, or to its consumer's line in some of the input of ptxas.
        wide = {pointer: loads.get(pointer, loads.get("", ())) for pointer in WIDE_LOADS[kernel.kernel]}
        if "delta of" in kernel.case:
            wide.pop("target", None)  # It is written, but not read.
        if kernel.kernel == "_paged_attention_decode_kernel" and FP8_KV in kernel.case:
            # Triton loads half a row of V at a time for the operand that it converts, unless it converts it twice.
            is_whole = kernel.dtype == "float32" or has_latents(kernel)
            assert wide.pop("place") == ((16,) if is_whole else (8, 16)), kernel
        for pointer, sizes in wide.items():
            assert sizes == (16,) or (pointer not in loads and 16 in sizes), kernel
        # Scales of KV are read singly: 2 bytes for a whole row of numbers.
        others = [sizes for pointer, sizes in loads.items() if pointer != "scale_place"]
        least = 2 if "_lora_expand" in kernel.kernel else 4
        assert not wide or all(min(sizes) >= least for sizes in others), kernel
    decodes = [k for k in compiled if k.kernel == "_quantized_linear_kernel" and " 16 tokens" in k.case]
    for kernel in decodes:
        assert kernel.load_bytes["row_starts"] == kernel.load_bytes["token_starts"] == (16,), kernel
    for kernel in compiled:
        if kernel.kernel == "_coded_linear_groups_kernel" and kernel.dtype != "float32":
            least = 8 if kernel.target == "gfx942" and "nf4" in kernel.case else 16
            assert min(kernel.load_bytes["row_places"] + kernel.load_bytes["token_places"]) >= least, kernel
    experts = [k for k in compiled if f"torch.{k.dtype} experts" in k.case]
    assert experts and all(kernel.load_bytes["row_starts"] == (16,) for kernel in experts)


def test_kv_in_fp8_is_compiled_where_it_is_served(compiled: list[CompiledKernel]) -> None:
    """GPUs older than sm_89 do not support e4m3, and a gfx942 supports only its own variant."""
    served = {kernel.target for kernel in compiled} & {"sm_90", "sm_100"}
    assert served == {kernel.target for kernel in compiled if FP8_KV in kernel.case}


def test_products_of_16_bit_numbers_run_on_matrix_units(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        if kernel.kernel in LINEARS and kernel.dtype != "float32":
            assert kernel.product is not None, kernel
        elif kernel.dtype != "float32":
            # Heads and latents of 512 leave registers for 32 rows.
            is_narrow = re.search("Gemma-4|DeepSeek-V3", kernel.case) and kernel.kernel in PRODUCTS
            products = SMALL_PRODUCTS if is_narrow else PRODUCTS.get(kernel.kernel, {})
            assert kernel.product == products.get(kernel.target), kernel


def test_multiply_adds_are_fused_regardless_of_the_environment(compiled: list[CompiledKernel]) -> None:
    assert all(kernel.fuses_multiply_add for kernel in compiled)


def test_adapters_of_any_rank_run_the_same_machine_code(compiled: list[CompiledKernel]) -> None:
    ranks = {"rank 8", "rank 16", "rank 64"}
    by_site: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for kernel in compiled:
        place, _, rank = kernel.case.rpartition(", ")
        if rank in ranks:
            key = (kernel.target, kernel.dtype, kernel.kernel, place)
            by_site.setdefault(key, {})[rank] = kernel.digest
    assert by_site
    for digests in by_site.values():
        assert set(digests) == ranks and len(set(digests.values())) == 1
