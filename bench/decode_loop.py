"""Decode steps and nothing else, for a sampling profiler to look at: a flame graph of a step.

    py-spy record --format raw --output step.folded -- python -m bench.decode_loop --adapters 32 --seconds 20

Start-up and prompts are in it, too; the steps are what lies under `decode`: `grep "decode (bench"`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.stepped_engine import SteppedEngine
from bench.workload import prompts, write_adapter, write_model

_OUTPUT_TOKENS = 64


def run_steps(
    stepped: SteppedEngine, asked: Sequence[list[int]], given: Sequence[tuple[int, ...]], seconds: float
) -> list[float]:
    """Seconds of each step in which all requests decoded. given: the adapters of each prompt, see `SteppedEngine`."""
    end, do_all_decode = time.monotonic() + seconds, False
    taken: list[float] = []
    while (began := time.monotonic()) < end:
        if not stepped.engine.num_unfinished:
            stepped.add(asked, given, _OUTPUT_TOKENS)
        num_tokens = decode(stepped) if do_all_decode else len(stepped.step())
        if do_all_decode:
            taken.append(time.monotonic() - began)
        do_all_decode = num_tokens == stepped.engine.num_unfinished == len(asked)
    stepped.drop()
    return taken


def decode(stepped: SteppedEngine) -> int:
    """A step of its own name, so that it can be told from those that compute prompts."""
    return len(stepped.step())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "numba", "torch"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        root = Path(directory)
        write_model(root / "model", dtype)
        adapters = [root / f"adapter-{index}" for index in range(options.adapters)]
        for index, path in enumerate(adapters):
            write_adapter(path, index, dtype)
        settings = {
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "kernels": options.kernels,
            "pool_bytes": 2 << 30,
            "swap_bytes": 0,
        }
        stepped = SteppedEngine(root / "model", adapters, settings)
    asked = prompts(options.batch, options.input_tokens)
    given = [(index % options.adapters,) if options.adapters else () for index in range(options.batch)]
    taken = run_steps(stepped, asked, given, options.seconds)
    print(f"{len(taken)} steps in {options.seconds:g} s, the median {1e3 * statistics.median(taken):.2f} ms")


if __name__ == "__main__":
    main()
