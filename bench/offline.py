"""The CPU path against its bars: our engine, what the machine allows, and the peers, in one run.

    python -m bench.offline [--parts throughput overhead process] [--quick] [--json FILE]

throughput  tokens per second of the bare base and with adapters of ranks 8/16/32/64 on all seven linears, beside the
            floor of the same run (`bench.floor`) and the peers that `make bench-peers` has set up. Shapes: decode (64
            tokens in, 64 out), prefill (1024 in, 16 out), long (4080 in, 16 out). Greedy, end of sequence ignored;
            generated tokens over the whole wall time. Up to 64 adapters are given out in turn; of 1,000 each request
            draws one, and all lie packed on the host.
overhead    what a decode step consists of, part by part, and the share of it that is no arithmetic.
process     how soon the engine's process serves, and its memory beside weights and pool.

`SLORA_CPU_ISA=avx512_bf16` (or another set) holds all contenders to the instructions of another kind of CPU.

Absolute numbers mean little on a shared machine: contenders run in turn in every round, and the bars are ratios.
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import slora_kernels  # noqa: F401  # It applies SLORA_CPU_ISA, before torch is loaded.

# isort: split
import torch

from bench.bars import verdict_rows
from bench.contender import Launch, slora_launch
from bench.engine_footprint import footprint_row
from bench.machine_rates import RateMeter
from bench.peer_environments import PEERS, find_tcmalloc, launch_peer
from bench.step_profile import Scene, profile_rows
from bench.stepped_engine import SteppedEngine
from bench.table import Row, print_table, write_json
from bench.throughput import SHAPES, Fleet, Plan, throughput_rows
from bench.workload import write_adapter, write_model
from slora_kernels.cpu_isa import find_cpu_isa

DTYPES = ("bfloat16", "float32")
# What more than these many adapters are copies of; each is packed, cached and loaded on its own.
_DISTINCT = 32
_GIB = 1 << 30


def make_fleet(folder: Path, dtype: str, num_adapters: int) -> Fleet:
    torch_dtype = getattr(torch, dtype)
    folder.mkdir()
    write_model(folder / "model", torch_dtype)
    adapters = [folder / f"adapter-{index}" for index in range(min(num_adapters, _DISTINCT))]
    for index, path in enumerate(adapters):
        write_adapter(path, index, torch_dtype)
    return Fleet(folder / "model", adapters, dtype)


def throughput_part(fleet: Fleet, options: argparse.Namespace, folder: Path) -> list[Row]:
    pool_bytes = int(options.pool_gib * _GIB)
    rows: list[Row] = []
    for count in options.adapters:
        launches: dict[str, Launch | str] = {"slora": slora_launch(options.threads)}
        for name in options.peers:
            launches[name] = launch_peer(name, options.threads, pool_bytes)
            if count > options.peer_adapters:
                launches[name] = f"more than {options.peer_adapters} adapters (--peer-adapters)"
        shapes = [SHAPES[name] for name in options.shapes]
        plan = Plan(count, shapes, options.batches, options.rounds, options.threads, pool_bytes, launches)
        made = throughput_rows(fleet, plan, folder)
        print_table(f"{fleet.dtype}, {count} adapters", made)
        rows += made
    return rows


def overhead_part(fleet: Fleet, options: argparse.Namespace, folder: Path) -> list[Row]:
    torch.set_num_threads(options.threads)
    counts = sorted({min(count, _DISTINCT) for count in options.adapters})
    scenes = [Scene(count, batch, 64) for batch in options.batches for count in counts]
    settings = {"dtype": fleet.dtype, "pool_bytes": int(options.pool_gib * _GIB), "swap_bytes": 0}
    stepped = SteppedEngine(fleet.model, fleet.adapters, settings)
    rows = profile_rows(stepped, scenes, 4 if options.quick else 30, options.rounds)
    rows = [{"dtype": fleet.dtype, **row} for row in rows]
    print_table(f"{fleet.dtype}, parts of a decode step in ms", rows)
    return rows


def process_part(fleet: Fleet, options: argparse.Namespace, folder: Path) -> list[Row]:
    sockets = folder / "process"
    sockets.mkdir()
    rows = [footprint_row(fleet.model, fleet.dtype, options.threads, sockets)]
    print_table(f"{fleet.dtype}, the engine's process", rows)
    return rows


PARTS: dict[str, Callable[[Fleet, argparse.Namespace, Path], list[Row]]] = {
    "throughput": throughput_part,
    "overhead": overhead_part,
    "process": process_part,
}


def describe(options: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, float] = {}
    torch.set_num_threads(options.threads)
    for dtype in options.dtypes:
        seen = RateMeter(getattr(torch, dtype)).measure()
        rates[f"matmul GFLOP/s, {dtype}"] = round(seen.flops / 1e9)
        rates["read GB/s"] = round(seen.read_bytes_per_s / 1e9, 1)
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": find_cpu_isa() or "unknown",
        "cores": os.cpu_count() or 0,
        "tcmalloc of vllm": str(find_tcmalloc() or "none"),
        **rates,
        **{name: value for name, value in vars(options).items() if name != "json"},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a quick run, to check that it works")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32, 1000])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--peer-adapters", type=int, default=32, help="omit peers with more adapters than this"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool-gib", type=float, default=4.0, help="of our pool, and of vLLM's KV cache")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.adapters, options.shapes = ["bfloat16"], [0, 8], ["decode"]
        options.batches, options.rounds, options.pool_gib = [4], 1, 0.5
    return options


def main() -> None:
    options = parse_options()
    facts = describe(options)
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        for dtype in options.dtypes:
            fleet = make_fleet(Path(directory) / dtype, dtype, max(options.adapters))
            for part in options.parts:
                folder = Path(directory) / f"{dtype}-{part}"
                folder.mkdir()
                rows += PARTS[part](fleet, options, folder)
                if options.json:  # a long run that is ended leaves what it has measured
                    write_json(options.json, {"rows": rows, "bars": verdict_rows(rows)}, facts)
    if verdicts := verdict_rows(rows):
        print_table("bars", verdicts)


if __name__ == "__main__":
    main()
