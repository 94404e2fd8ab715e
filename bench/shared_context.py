"""Time to the first token of several adapters over one long context, activated adapters beside plain ones.

    python -m bench.shared_context --tokens 16384 --adapters 8

An activated adapter has no effect before its invocation, so the blocks of the context are the base model's, which the
first of the adapters computes for all. With plain adapters, each computes the whole context.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.stepped_engine import SteppedEngine
from bench.workload import SMALL, prompts, write_adapter, write_model

_INVOCATION = [5, 6, 7]


def write_adapters(root: Path, kind: str, count: int, dtype: torch.dtype) -> list[Path]:
    paths = [root / f"{kind}-{index}" for index in range(count)]
    for index, path in enumerate(paths):
        write_adapter(path, index, dtype)
        if kind == "activated":
            config = path / "adapter_config.json"
            fields = json.loads(config.read_text(encoding="utf-8"))
            config.write_text(json.dumps(fields | {"alora_invocation_tokens": _INVOCATION}), encoding="utf-8")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (context,) = prompts(1, options.tokens)
    for kind in ("activated", "plain"):
        with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
            root = Path(directory)
            write_model(root / "model", torch.bfloat16, replace(SMALL, positions=2 * options.tokens))
            adapters = write_adapters(root, kind, options.adapters, torch.bfloat16)
            settings = {"dtype": "bfloat16", "pool_bytes": 4 << 30, "swap_bytes": 0, "prefix_cache": "tenant"}
            stepped = SteppedEngine(root / "model", adapters, settings)
        seconds = []
        for number in range(options.adapters):
            begin = time.monotonic()
            stepped.add([[*context, *_INVOCATION, 9]], [(number,)], 1)
            stepped.finish()
            seconds.append(time.monotonic() - begin)
        later, found = statistics.median(seconds[1:]), stepped.engine.stats().prefix_hits
        print(
            f"{kind}: first {seconds[0]:.2f} s, the others {later:.3f} s (median), {found} tokens found computed",
            flush=True,
        )


if __name__ == "__main__":
    main()
