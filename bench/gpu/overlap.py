"""What those who decode notice of adapters that are loaded beside them, on this GPU.

    python -m bench.gpu.overlap FILE [--seconds 300] [--tiny]

32 requests decode for the whole time, on 4 adapters of rank 16 that are in the pool; every 50 ms another comes for an
adapter that nobody has asked for before, of 80 MB, which lies on the host. Told is the time between two tokens of those
who decode: alone, beside the others, and beside as many for the bare base, which bring no adapter but are computed just
the same. Rounds of the three in turn; FILE gets a row for each.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.random_engine import LLAMA_8B, TINY, EngineSize, RandomEngine
from bench.gpu.replay import measure_gaps
from bench.gpu.resumed_table import ResumedTable
from bench.simulation.request_log import percentile
from bench.table import Row, print_table
from bench.workload import prompts
from slora.request import EngineRequest

RANK = 16
ALONE, BESIDE_COLD, BESIDE_BASE = CASES = ("alone", "beside cold adapters", "beside the base")


@dataclass(frozen=True, slots=True)
class Scale:
    size: EngineSize
    decoding: int
    warm: int
    output_tokens: int
    every_s: float
    rounds: int


WHOLE = Scale(LLAMA_8B, decoding=32, warm=4, output_tokens=500, every_s=0.05, rounds=3)
SMALL = Scale(TINY, decoding=3, warm=2, output_tokens=20, every_s=0.005, rounds=1)


class Overlap:
    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._engine: RandomEngine | None = None
        self._num_cold = 0

    def cases(self) -> Iterator[tuple[Row, Callable[[], Row]]]:
        for number in range(self._scale.rounds):
            for case in CASES:
                yield {"case": case, "round": number}, lambda case=case: self._measure(case)

    def _measure(self, case: str) -> Row:
        scale = self._scale
        if self._engine is None:
            self._engine = RandomEngine(scale.size, RANK)
            for other in CASES:  # whatever a first step of each kind sets up
                self._run(other)
        loads = self._engine.engine.stats().adapter_loads
        gaps, seconds, others = self._run(case)
        loads = self._engine.engine.stats().adapter_loads - loads
        return {
            "seconds": seconds,
            "others": others,
            "loads": loads,
            "loaded GB/s": loads * self._engine.adapters.layout.num_bytes / seconds / 1e9,
            **{f"p{percent} ms": 1e3 * percentile(gaps, percent) for percent in (50, 90, 99)},
            "max ms": 1e3 * gaps[-1],
        }

    def _run(self, case: str) -> tuple[list[float], float, int]:
        scale, made = self._scale, self._engine
        assert made is not None
        vocab_size = made.engine.info.vocab_size
        decoding = [
            made.make_request(prompt, number % scale.warm, scale.output_tokens)
            for number, prompt in enumerate(prompts(scale.decoding, 64, vocab_size))
        ]
        (short,) = prompts(1, 8, vocab_size)
        come = 0

        def arrive(seconds: float) -> list[EngineRequest]:
            nonlocal come
            due = 0 if case == ALONE else int(seconds / scale.every_s) - come
            come += due
            return [made.make_request(short, self._next_adapter(case), 4) for _ in range(due)]

        gaps, seconds = measure_gaps(made, decoding, arrive)
        return gaps, seconds, come

    def _next_adapter(self, case: str) -> int | None:
        if case == BESIDE_BASE:
            return None
        self._num_cold += 1
        return self._scale.warm + self._num_cold


def compare(rows: list[Row]) -> list[Row]:
    """p99 over that of the same round alone: the bar is 1.2."""
    alone = {row["round"]: row["p99 ms"] for row in rows if row["case"] == ALONE}
    return [
        row | {"over alone": row["p99 ms"] / alone[row["round"]] if row["round"] in alone else None}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="file for the rows, as JSON lines; new rows are appended")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after this time")
    parser.add_argument("--tiny", action="store_true", help="a quick run on a CPU, to check that it works")
    options = parser.parse_args()
    scale = SMALL if options.tiny else WHOLE
    table = ResumedTable(options.table, torch.device(scale.size.device))
    is_whole = table.fill(Overlap(scale).cases(), options.seconds)
    print_table("time between two tokens", compare(table.rows()))
    print("\nall cases are measured" if is_whole else "\nnot all cases are measured yet: run this again")


if __name__ == "__main__":
    main()
