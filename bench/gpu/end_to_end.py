"""Tokens and requests per second of the whole engine on this GPU, beside its floors and transformers + peft.

    python -m bench.gpu.end_to_end FILE [--seconds 300] [--kinds copy decode serving popular contest] [--tiny]

FILE gets a row for each case as it is measured; run again, it goes on behind the last one: three or four runs fill it.
The model has Llama-3.1-8B's shape and random weights, adapters are random, and requests go straight to the engine.

decode   64 requests that all decode: the bare base, then 1, 8 and 32 adapters of rank 16 on all seven linears, with
         recorded steps (graphs) and without. Floor: the base's bytes over those and the distinct adapters'.
serving  S-LoRA's generator in its setting S1 (rank 8 on the four linears of attention, all equally popular), requests
         in real time. With 5 adapters at raising rates until throughput grows no more; then with 2,000 at that rate,
         and with both at 0.8 of what 5 reached. Floor of 2,000: what 5 reach, each step longer by the bytes of the
         adapters that it has more of, at the speed of this machine's copies.
popular  the same with 1,000 adapters of rank 16 on all seven linears, equally popular and by Zipf's law (alpha 1.5), at
         the rate that saturated 5 adapters of rank 8.
contest  1,200 requests of 100 adapters that are all there, ours beside peft's two ways (bench/gpu/peft_generation.py).

--tiny goes through the same on a CPU in seconds: to see that it runs.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.gpu.peft_generation import ADAPTER_NAMES, ONE_ADAPTER, PeftGeneration
from bench.gpu.random_engine import LLAMA_8B, TINY, EngineSize, RandomEngine
from bench.gpu.replay import replay
from bench.gpu.resumed_table import ResumedTable
from bench.machines import ATTENTION
from bench.simulation.traces import S1, Trace, slora_trace, zipf_trace
from bench.table import Row, print_table
from bench.workload import prompts

KINDS = ("copy", "decode", "serving", "popular", "contest")
DECODE_RANK = 16
# Of the rate of 5 adapters at which time to the first token is compared.
_CALM = 0.8
# Throughput that grows less than this from a rate to the next, while the rate grows by half, is all there is.
_GROWTH, _STILL_GROWING = 1.5, 1.1
Case = tuple[Row, Callable[[], Row]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it. lengths: of prompts and answers in `serving` and `contest`, S-LoRA's [8, 512)."""

    size: EngineSize
    batch: int
    decode_adapters: tuple[int, ...]
    prompt_tokens: int
    steps: int
    few: int
    many: int
    popular: int
    first_rate: float
    duration_s: float
    lengths: tuple[int, int]
    copy_bytes: int
    contest_adapters: int
    contest_requests: int
    peft_batch: int
    peft_batches: int


WHOLE = Scale(
    LLAMA_8B,
    batch=64,
    decode_adapters=(0, 1, 8, 32),
    prompt_tokens=128,
    steps=128,
    few=5,
    many=2000,
    popular=1000,
    first_rate=16.0,
    duration_s=20.0,
    lengths=(8, 512),
    copy_bytes=4 << 30,
    contest_adapters=100,
    contest_requests=1200,
    peft_batch=32,
    peft_batches=1,
)
SMALL = Scale(
    TINY,
    batch=4,
    decode_adapters=(0, 1, 2),
    prompt_tokens=8,
    steps=3,
    few=2,
    many=6,
    popular=6,
    first_rate=8.0,
    duration_s=0.5,
    lengths=(3, 6),
    copy_bytes=1 << 20,
    contest_adapters=3,
    contest_requests=6,
    peft_batch=2,
    peft_batches=2,
)


class EndToEnd:
    """rows: what is in the table so far, which decides how rates go on."""

    def __init__(self, scale: Scale, rows: Callable[[], list[Row]]) -> None:
        self._scale = scale
        self._rows = rows
        self._engine: tuple[Row, RandomEngine] | None = None

    def cases(self, kinds: list[str]) -> Iterator[Case]:
        makers = {
            "copy": self._copies,
            "decode": self._decodes,
            "serving": self._servings,
            "popular": self._popular,
            "contest": self._contests,
        }
        for kind in kinds:
            for key, measure in makers[kind]():
                yield {"kind": kind, **key}, measure
            self._drop_engine()

    def _copies(self) -> Iterator[Case]:
        yield {}, self._copy

    def _copy(self) -> Row:
        device = torch.device(self._scale.size.device)
        source = torch.ones(self._scale.copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(10):
            _synchronize(device)
            start = time.perf_counter()
            target.copy_(source)
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
        return {"GB/s": 2 * source.nbytes / min(seconds) / 1e9}

    def _decodes(self) -> Iterator[Case]:
        for graphs in (True, False):
            for count in self._scale.decode_adapters:
                yield (
                    {"graphs": graphs, "adapters": count, "batch": self._scale.batch},
                    lambda g=graphs, n=count: self._decode(n, graphs=g),
                )

    def _decode(self, num_adapters: int, *, graphs: bool) -> Row:
        scale = self._scale
        made = self._get_engine(DECODE_RANK, all_linears=True, cuda_graphs=graphs, max_num_seqs=scale.batch)
        asked = prompts(scale.batch, scale.prompt_tokens, made.engine.info.vocab_size)
        # As many steps again before they count: prompts, loads and whatever a first step sets up.
        for number, prompt in enumerate(asked):
            adapter = number % num_adapters if num_adapters else None
            made.engine.add(made.make_request(prompt, adapter, 3 * scale.steps + scale.batch))
        begun: set[str] = set()
        while len(begun) < scale.batch:
            begun |= {output.request_id for output in made.engine.step()}
        for _ in range(scale.steps):
            made.engine.step()
        start = time.perf_counter()
        tokens = sum(len(made.engine.step()) for _ in range(scale.steps))
        seconds = time.perf_counter() - start
        made.drop_all()
        adapter_bytes = num_adapters * made.adapters.layout.num_bytes
        kv_bytes = scale.batch * (scale.prompt_tokens + 2 * scale.steps) * _token_bytes(made)
        base_bytes = scale.size.weight_bytes() + kv_bytes
        return {
            "tokens/s": tokens / seconds,
            "step ms": 1e3 * seconds / scale.steps,
            "base GB": base_bytes / 1e9,
            "adapters GB": adapter_bytes / 1e9,
            "floor": base_bytes / (base_bytes + adapter_bytes),
        }

    def _servings(self) -> Iterator[Case]:
        scale = self._scale
        rate, before = scale.first_rate, 0.0
        while True:
            yield self._serving(scale.few, rate, "raising")
            reached = max(
                row["requests/s"]
                for row in self._rows()
                if row["kind"] == "serving" and row["adapters"] == scale.few and row["rate"] == rate
            )
            if reached < before * _STILL_GROWING:
                break
            before, rate = reached, rate * _GROWTH
        yield self._serving(scale.many, rate, "saturated")
        for count in (scale.few, scale.many):
            yield self._serving(count, _CALM * max(before, reached), "calm")

    def _serving(self, num_adapters: int, rate: float, load: str) -> Case:
        return {"adapters": num_adapters, "load": load, "rate": rate}, lambda: self._serve(num_adapters, rate)

    def _serve(self, num_adapters: int, rate: float) -> Row:
        trace = self._trace(num_adapters, rate, self._scale.duration_s)
        return self._replay(trace, S1.ranks[0], all_linears=False)

    def _replay(self, trace: Trace, rank: int, *, all_linears: bool) -> Row:
        is_new = self._engine is None
        made = self._get_engine(rank, all_linears=all_linears)
        if is_new:  # kernels are compiled and steps recorded before anything counts
            replay(made, trace[: len(trace) // 5])
        return replay(made, trace).row() | {"adapter MB": made.adapters.layout.num_bytes / 1e6}

    def _popular(self) -> Iterator[Case]:
        scale = self._scale
        rate = max(
            (row["rate"] for row in self._rows() if row["kind"] == "serving"), default=scale.first_rate
        )
        even = self._trace(scale.popular, rate, scale.duration_s)
        drawn = zipf_trace(scale.popular, rate, scale.duration_s)
        zipf = [replace(one, adapter=other.adapter) for one, other in zip(even, drawn, strict=True)]
        traces = {"even": even, "zipf": zipf}
        for popularity, trace in traces.items():
            key = {"popularity": popularity, "adapters": scale.popular, "rate": rate}
            yield key, lambda trace=trace: self._replay(trace, DECODE_RANK, all_linears=True)

    def _contests(self) -> Iterator[Case]:
        key = {"adapters": self._scale.contest_adapters}
        yield {"contender": "slora", **key}, self._contend
        for way in (ONE_ADAPTER, ADAPTER_NAMES):
            yield {"contender": way, **key}, lambda way=way: self._contend_with_peft(way)

    def _contend(self) -> Row:
        made = self._get_engine(S1.ranks[0], all_linears=False)
        trace = self._backlog()
        replay(made, trace[: len(trace) // 10])
        row = replay(made, trace).row()
        return {name: row[name] for name in ("requests", "requests/s", "tokens/s")}

    def _contend_with_peft(self, way: str) -> Row:
        self._drop_engine()
        scale = self._scale
        model = PeftGeneration(scale.size, scale.contest_adapters, S1.ranks[0], ATTENTION)
        return model.measure(way, self._backlog(), scale.peft_batch, scale.peft_batches)

    def _trace(self, num_adapters: int, rate: float, seconds: float) -> Trace:
        return slora_trace(num_adapters, rate, seconds, lengths=self._scale.lengths)

    def _backlog(self) -> Trace:
        """Of requests that come within a thousandth of a second."""
        count = self._scale.contest_requests
        return self._trace(self._scale.contest_adapters, 1e3 * count, 1e-3)

    def _get_engine(self, rank: int, *, all_linears: bool, **settings: object) -> RandomEngine:
        """The one of the case before, if it was the same: to make one takes a minute."""
        key = {"rank": rank, "all": all_linears, **settings}
        if self._engine is None or self._engine[0] != key:
            self._drop_engine()
            adapted = {} if all_linears else {"adapted": ATTENTION}
            self._engine = key, RandomEngine(self._scale.size, rank, **adapted, **settings)
        return self._engine[1]

    def _drop_engine(self) -> None:
        self._engine = None
        gc.collect()
        if self._scale.size.device == "cuda":
            torch.cuda.empty_cache()


def _token_bytes(made: RandomEngine) -> int:
    return made.engine.info.full_page_bytes // made.engine.info.block_tokens


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(rows: list[Row]) -> list[Row]:
    """Each over what it is measured by: decoding over the base's, 2,000 adapters over their floor and over 5, ours over
    peft's. None where that was not measured."""

    def find(**wanted: object) -> Row | None:
        return next((row for row in rows if wanted.items() <= row.items()), None)

    compared = []
    copy = find(kind="copy")
    for row in rows:
        more: Row = {}
        if row["kind"] == "decode":
            base = find(kind="decode", graphs=row["graphs"], adapters=0)
            more["of base"] = row["tokens/s"] / base["tokens/s"] if base else None
        if row["kind"] == "serving":
            more |= _compare_serving(row, rows, copy)
        if row["kind"] == "popular":
            zipf = find(kind="popular", popularity="zipf")
            more["of zipf"] = row["tokens/s"] / zipf["tokens/s"] if zipf else None
        if row["kind"] == "contest":
            ours = find(kind="contest", contender="slora")
            more["ours over it"] = ours["requests/s"] / row["requests/s"] if ours else None
        compared.append(row | more)
    return compared


def _compare_serving(row: Row, rows: list[Row], copy: Row | None) -> Row:
    few = next(
        (
            other
            for other in rows
            if other["kind"] == "serving"
            and other["rate"] == row["rate"]
            and other["adapters"] < row["adapters"]
        ),
        None,
    )
    if few is None or copy is None:
        return {"of few": None, "of floor": None, "p99 over few": None}
    extra_ms = (
        1e3 * (row["adapters a step"] - few["adapters a step"]) * row["adapter MB"] / copy["GB/s"] / 1e3
    )
    floor = few["requests/s"] * few["step ms"] / (few["step ms"] + extra_ms)
    return {
        "of few": row["requests/s"] / few["requests/s"],
        "of floor": row["requests/s"] / floor,
        "p99 over few": row["p99 TTFT s"] / few["p99 TTFT s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="file for the rows, as JSON lines; new rows are appended")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after this time")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--first-rate", type=float, help="requests per second of the first case of `serving`")
    parser.add_argument("--tiny", action="store_true", help="a quick run on a CPU, to check that it works")
    options = parser.parse_args()
    scale = SMALL if options.tiny else WHOLE
    if options.first_rate is not None:
        scale = replace(scale, first_rate=options.first_rate)
    table = ResumedTable(options.table, torch.device(scale.size.device))
    is_whole = table.fill(EndToEnd(scale, table.rows).cases(options.kinds), options.seconds)
    rows = compare(table.rows())
    for kind in KINDS:
        if of_kind := [row for row in rows if row["kind"] == kind]:
            print_table(kind, of_kind)
    print("\nall cases are measured" if is_whole else "\nnot all cases are measured yet: run this again")


if __name__ == "__main__":
    main()
