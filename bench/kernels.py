"""What LoRA adds to a step on a GPU: bytes, multiplications and launches, and the least time that these can take.

    python -m bench.kernels --floor [--models llama-8b llama-70b] [--context 1024] [--rank 16] [--json FILE]

Nothing is run: the real decoder goes through the real launchers on tensors without memory (bench/dry_step.py), so the
launches are those of this code. Base and adapters are read once, which nobody can undercut; what shrink leaves for
expand and what expand adds to stands apart, since most of it stays in the GPU's cache. Launches of vLLM 0.33 and SGLang
0.5.23 are as their sources have them: a memset, a shrink and an expand for each fused linear, and the latter two.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.dry_step import MetaModel, StepCount, StepShape
from bench.table import Row, print_table, write_json

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


def main() -> None:
    rates = GpuRates()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--floor", action="store_true", required=True, help="only count bytes and operations; run nothing"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--context", type=int, default=1024, help="context tokens of each sequence")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bytes-per-s", type=float, default=rates.bytes_per_s)
    parser.add_argument("--flops", type=float, default=rates.flops)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rates = GpuRates(options.bytes_per_s, options.flops)
    tables = floor_tables(options.models, options.context, options.rank, rates)
    for title, rows in tables.items():
        print_table(title, rows)
    if options.json:
        chosen = {"context": options.context, "rank": options.rank, "rates": rates}
        write_json(options.json, tables, chosen)


if __name__ == "__main__":
    main()
