"""Composed adapters against plain ones of the same bytes: every request uses two of rank 8, or one of rank 16.

    python -m bench.composition

A step's time is that of a step in which all requests decode. The cases take turns within one process, so that whatever
slows the machine down slows both. The bar is on the ratio of tokens per second.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.bars import Bar
from bench.decode_loop import run_steps
from bench.parts import Tables, run_parts
from bench.stepped_engine import SteppedEngine
from bench.table import Row
from bench.workload import SMALL, make_adapter, prompts, write_model
from slora_adapters.process.progress_bar import track_progress

BAR = Bar("composed over plain", lambda row: "composed" in row, "of plain", 0.8)
_INPUT_TOKENS = 64


def decode_rows(*, quick: bool) -> list[Row]:
    dtype = torch.bfloat16
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        root = Path(directory)
        write_model(root / "model", dtype)
        widest = 4 if quick else 32
        halves = [_write_adapter(root / f"half-{index}", 8, index, dtype) for index in range(2 * widest)]
        wholes = [_write_adapter(root / f"whole-{index}", 16, index, dtype) for index in range(widest)]
        settings = {"dtype": "bfloat16", "pool_bytes": 2 << 30, "swap_bytes": 0}
        stepped = SteppedEngine(root / "model", [*wholes, *halves], settings)
    cases = [(8, 4)] if quick else [(1, 1), (16, 8), (64, 8), (64, 32)]
    return [_compare(stepped, batch, count, widest, quick=quick) for batch, count in cases]


def _compare(stepped: SteppedEngine, batch: int, count: int, num_wholes: int, *, quick: bool) -> Row:
    """count: plain adapters, or pairs of composed ones. Wholes have the first numbers, halves the next."""
    asked = prompts(batch, _INPUT_TOKENS)
    plain = [(index % count,) for index in range(batch)]
    composed = [(num_wholes + 2 * first, num_wholes + 2 * first + 1) for (first,) in plain]
    rounds, seconds = (1, 2.0) if quick else (6, 10.0)
    taken: dict[str, list[float]] = {"plain": [], "composed": []}
    for _ in track_progress("Rounds", range(rounds), "round"):
        for name, adapters in (("plain", plain), ("composed", composed)):
            taken[name] += run_steps(stepped, asked, adapters, seconds)
    rates = {name: batch / statistics.median(steps) for name, steps in taken.items()}
    return {
        "dtype": "bfloat16",
        "batch": batch,
        "adapters": count,
        "plain": rates["plain"],
        "composed": rates["composed"],
        "of plain": rates["composed"] / rates["plain"],
    }


def _write_adapter(directory: Path, rank: int, index: int, dtype: torch.dtype) -> Path:
    directory.mkdir()
    for name, content in make_adapter(rank, dtype, SMALL, seed=1 + index).items():
        (directory / name).write_bytes(content)
    return directory


def make_tables(*, quick: bool) -> Tables:
    rows = decode_rows(quick=quick)
    verdicts: Sequence[Row] = list(BAR.verdicts(rows))
    return {"Tokens/s of decoding, two adapters of rank 8 or one of rank 16": rows, "Bars": list(verdicts)}


if __name__ == "__main__":
    run_parts(__doc__, {"decode": make_tables})
