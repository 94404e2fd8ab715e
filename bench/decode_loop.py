"""Decode steps and nothing else, for a sampling profiler to look at: a flame graph of a step.

    py-spy record --format raw --output step.folded -- python -m bench.decode_loop --adapters 32 --seconds 20

Start-up and prompts are in it, too; the steps are what lies under `decode`: `grep "decode (bench"`.

It also compares forms of the base model's weights. Their steps take turns, because the speed of a machine changes:

    python -m bench.decode_loop --quantizations auto int8 int4 --size large --batch 1 --adapters 0

Or adapters with DoRA, or with output heads of their own, and plain ones of the same ranks:

    python -m bench.decode_loop --kinds lora dora --batch 16 --adapters 8
    python -m bench.decode_loop --kinds lora head --batch 16 --adapters 2
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.stepped_engine import SteppedEngine
from bench.workload import SMALL, prompts, write_adapter, write_model

_OUTPUT_TOKENS = 64
_ROUNDS = 5
# In the large model, the output head has a tenth of the numbers.
SIZES = {
    "small": SMALL,
    "large": replace(SMALL, hidden=2048, layers=10, heads=16, kv_heads=16, head_dim=128, intermediate=5632),
}


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


def time_prompts(
    stepped: SteppedEngine, asked: Sequence[list[int]], given: Sequence[tuple[int, ...]]
) -> float:
    """Seconds until each prompt has a token."""
    begin = time.monotonic()
    stepped.add(asked, given, 1)
    stepped.finish()
    return time.monotonic() - begin


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
    parser.add_argument("--kernels", default="auto", choices=["auto", "cpu", "torch"])
    parser.add_argument(
        "--quantizations", nargs="+", default=["auto"], choices=["auto", "int8", "fp8", "int4"]
    )
    parser.add_argument("--kinds", nargs="+", default=["lora"], choices=["lora", "dora", "head"])
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        root = Path(directory)
        write_model(root / "model", dtype, SIZES[options.size])
        adapters = {
            kind: [root / f"{kind}-{index}" for index in range(options.adapters)] for kind in options.kinds
        }
        for kind, paths in adapters.items():
            for index, path in enumerate(paths):
                write_adapter(path, index, dtype, SIZES[options.size], kind=kind)
        settings = {
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "kernels": options.kernels,
            "pool_bytes": 2 << 30,
            "swap_bytes": 0,
        }
        engines = {
            f"{form} {kind}": SteppedEngine(root / "model", paths, {**settings, "quantization": form})
            for form in options.quantizations
            for kind, paths in adapters.items()
        }
    asked = prompts(options.batch, options.input_tokens)
    given = [(index % options.adapters,) if options.adapters else () for index in range(options.batch)]
    rounds = _ROUNDS if len(engines) > 1 else 1
    steps: dict[str, list[float]] = {form: [] for form in engines}
    prompt_times: dict[str, list[float]] = {form: [] for form in engines}
    for _ in range(rounds):
        for form, stepped in engines.items():
            prompt_times[form].append(time_prompts(stepped, asked, given))
            steps[form] += run_steps(stepped, asked, given, options.seconds / rounds / len(engines))
    first = next(iter(engines))
    for form in engines:
        step, prompt = statistics.median(steps[form]), min(prompt_times[form])
        line = f"{form}: {len(steps[form])} steps, the median {1e3 * step:.2f} ms; prompts in {1e3 * prompt:.1f} ms"
        if form != first:
            line += (
                f"; {first} takes {statistics.median(steps[first]) / step:.2f} times as long for a step, and "
                f"{min(prompt_times[first]) / prompt:.2f} times for prompts"
            )
        print(line)


if __name__ == "__main__":
    main()
