"""What LoRA adds to a step on a GPU: bytes, multiplications and launches, and the least time that these can take.

    python -m bench.kernels --floor [--models llama-8b llama-70b] [--context 1024] [--rank 16] [--json FILE]
    python -m bench.kernels --blocks [--dtypes bfloat16 float32] [--rounds 5] [--json FILE]

--blocks: what a CPU pays for rows whose bits do not depend on the batch. Times the linears and the head of a 110M model
with our blocks of rows, beside one call of the library with all rows.

Nothing is run: the real decoder goes through the real launchers on tensors without memory (bench/dry_step.py), so the
launches are those of this code. Base and adapters are read once, which nobody can undercut; what shrink leaves for
expand and what expand adds to stands apart, since most of it stays in the GPU's cache. Launches of vLLM 0.33 and SGLang
0.5.23 are as their sources have them: a memset, a shrink and an expand for each fused linear, and the latter two.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slora_kernels  # noqa: F401  # It applies SLORA_CPU_ISA, before torch is loaded.

# isort: split
import torch
from torch import Tensor

from bench.dry_step import MetaModel, StepCount, StepShape
from bench.table import Row, print_table, write_json
from slora.models.weights.linear import multiply
from slora.models.weights.packed_weight import PackedWeight, multiply_freely, pack_weight
from slora_kernels.cpu_isa import VARIABLE, check_cpu_isa

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
# Llama 3.1.
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "llama-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
}
BATCHES = (1, 8, 32, 64, 128, 256)
ADAPTERS = (1, 8, 32, 64)
PREFILL_TOKENS = 512
_FUSED_LINEARS = 4
_VLLM_LAUNCHES, _SGLANG_LAUNCHES = 3, 2


@dataclass(frozen=True, slots=True)
class GpuRates:
    """An H200, measured: a device copy (reads and writes together) and bfloat16 products."""

    bytes_per_s: float = 4.3e12
    flops: float = 790e12

    def least_s(self, num_bytes: int, flops: int) -> float:
        """Whichever of the two takes longer; they overlap at best."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops)


def floor_row(model: MetaModel, step: StepShape, rates: GpuRates) -> Row:
    count = model.count(step)
    base_bytes = count.weight_bytes + count.kv_bytes
    base_s = rates.least_s(base_bytes, count.base_flops)
    lora_s = rates.least_s(base_bytes + count.adapter_bytes, count.base_flops + count.lora_flops)
    fused = model.shape.num_layers * _FUSED_LINEARS
    return {
        "batch": step.batch,
        "adapters": step.adapters,
        "base GB": base_bytes / 1e9,
        "adapters GB": count.adapter_bytes / 1e9,
        "between GB": _between_bytes(count) / 1e9,
        "base GFLOP": count.base_flops / 1e9,
        "LoRA GFLOP": count.lora_flops / 1e9,
        "base launches": count.launches,
        "LoRA launches": count.lora_launches,
        "a layer": count.lora_launches_by_layer,
        "vLLM": fused * _VLLM_LAUNCHES,
        "SGLang": fused * _SGLANG_LAUNCHES,
        "base ms": base_s * 1e3,
        "with LoRA ms": lora_s * 1e3,
        "keeps %": 100 * base_s / lora_s,
    }


def _between_bytes(count: StepCount) -> int:
    return count.shrunk_bytes + count.out_bytes


def decode_rows(model: MetaModel, context: int, rank: int, rates: GpuRates) -> list[Row]:
    pairs = [(batch, adapters) for batch in BATCHES for adapters in ADAPTERS if adapters <= batch]
    return [floor_row(model, StepShape(batch, n, 1, context, rank), rates) for batch, n in pairs]


def prefill_rows(model: MetaModel, context: int, rank: int, rates: GpuRates) -> list[Row]:
    steps = [StepShape(n, n, PREFILL_TOKENS, context, rank) for n in (1, 4, 16)]
    return [floor_row(model, step, rates) for step in steps]


def floor_tables(names: Sequence[str], context: int, rank: int, rates: GpuRates) -> dict[str, list[Row]]:
    tables = {}
    for name in names:
        model = MetaModel(MODELS[name])
        where = f"{name}, bf16, rank {rank} on all linears, behind {context} tokens"
        tables[f"decode: {where}"] = decode_rows(model, context, rank, rates)
        tables[f"chunks of {PREFILL_TOKENS} tokens: {where}"] = prefill_rows(model, context, rank, rates)
    return tables


# (output width, input width) of the linears of the 110M model of `bench.offline`, and its head.
LINEARS = ((2304, 768), (768, 768), (4096, 768), (768, 2048))
HEAD = (32000, 768)
NUM_LAYERS = 12
BLOCK_ROWS = (1, 16, 64, 512)


def time_products(product: Callable[[Tensor, Tensor | PackedWeight], Tensor], work: list[Any]) -> float:
    start = time.perf_counter()
    for x, weight in work:
        product(x, weight)
    return time.perf_counter() - start


def block_rows(dtype: torch.dtype, threads: int, rounds: int) -> list[Row]:
    """Medians of the rounds, in which both ways take turns; the ratio is the median of those within a round."""
    torch.set_num_threads(threads)
    shapes = [*(shape for _ in range(NUM_LAYERS) for shape in LINEARS), HEAD]
    weights = [pack_weight(torch.randn(shape).to(dtype)) for shape in shapes]
    rows: list[Row] = []
    for num_rows in BLOCK_ROWS:
        inputs = {width: torch.randn(num_rows, width).to(dtype) for _, width in shapes}
        work = [(inputs[shape[1]], weight) for shape, weight in zip(shapes, weights, strict=True)]
        times = [
            (time_products(multiply_freely, work), time_products(multiply, work)) for _ in range(rounds + 1)
        ]
        free, ours = (statistics.median(side) for side in zip(*times[1:], strict=True))
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "threads": threads,
                "rows": num_rows,
                "free ms": free * 1e3,
                "ours ms": ours * 1e3,
                "speed": statistics.median(one / other for one, other in times[1:]),
            }
        )
    return rows


def find_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def measure_blocks(dtypes: Sequence[torch.dtype], rounds: int, path: Path | None) -> None:
    rows = [row for dtype in dtypes for threads in (1, 2) for row in block_rows(dtype, threads, rounds)]
    title = "linears and head, 110M: the speed of our blocks over one call of the library"
    print_table(title, rows)
    if path:
        facts = {"cpu": find_cpu_name(), "isa": os.environ.get(VARIABLE, "best"), "torch": torch.__version__}
        write_json(path, {title: rows}, {**facts, "rounds": rounds})


def main() -> None:
    rates = GpuRates()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--floor", action="store_true", help="only count bytes and operations; run nothing")
    kind.add_argument("--blocks", action="store_true", help="time a CPU's linears, in blocks and at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --blocks")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="dtypes of --blocks")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--context", type=int, default=1024, help="context tokens of each sequence")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bytes-per-s", type=float, default=rates.bytes_per_s)
    parser.add_argument("--flops", type=float, default=rates.flops)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.blocks:
        check_cpu_isa()
        measure_blocks([getattr(torch, name) for name in options.dtypes], options.rounds, options.json)
        return
    rates = GpuRates(options.bytes_per_s, options.flops)
    tables = floor_tables(options.models, options.context, options.rank, rates)
    for title, rows in tables.items():
        print_table(title, rows)
    if options.json:
        chosen = {"context": options.context, "rank": options.rank, "rates": rates}
        write_json(options.json, tables, chosen)


if __name__ == "__main__":
    main()
