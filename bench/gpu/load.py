"""Load in real time on the engine itself: no HTTP, one loop that adds what is due and runs steps.

`serving_cases`: S-LoRA's generator in its setting S1 (rank 8 on the four linears of attention, equally popular
adapters) with 5 and 2,000 adapters. Saturated, the load runs until none of the last hundred steps had a new shape,
so the figures are those of a full batch; the requests that are left at the end are aborted. Then 0.8 of the rate that
was reached. Then 1,000 adapters of rank 16 on all linears, equally popular and by Zipf's law.
`cold_cases`: 32 requests decode on 4 adapters that are in the pool. Every 50 ms another request comes, for an adapter
of 84 MB that no request has used before, or for the base model, which loads nothing and computes the same.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu.decode import R16, S1_KIND, MakeEngine, profile_kernels
from bench.gpu.random_engine import RandomAdapter, RandomEngine
from bench.gpu.resumed_table import Case
from bench.simulation.request_log import percentile
from bench.simulation.traces import Trace, TraceRequest, slora_trace, zipf_trace
from bench.table import Row
from bench.workload import prompts
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest

DEFAULT_SEQS = EngineConfig(Path("random")).max_num_seqs
# Of the saturated rate of the same number of adapters.
_CALM = 0.8
# A load is steady when so many steps in a row had shapes that were recorded before.
_STEADY_STEPS = 100
# How many times as long a load may take if it waits for that.
_MOST_WAITING = 3
ALONE, BESIDE_COLD, BESIDE_BASE = COLD_CASES = ("alone", "beside cold adapters", "beside the base")


@dataclass(frozen=True, slots=True)
class LoadScale:
    """adapters: few and many. rate: requests per second, more than can be served. lengths: of prompts and answers.
    cold_*: of `cold_cases`; `cold_every_s` apart, for `cold_s` seconds.
    """

    adapters: tuple[int, int]
    popular: int
    rate: float
    saturated_s: float
    calm_s: float
    lengths: tuple[int, int]
    cold_decoding: int
    cold_warm: int
    cold_every_s: float
    cold_s: float
    cold_rounds: int
    warm_steps: int
    profiled_steps: int


WHOLE = LoadScale((5, 2000), 1000, 100.0, 10.0, 12.0, (8, 512), 32, 4, 0.05, 3.0, 2, 150, 8)
SMALL = LoadScale((2, 6), 4, 30.0, 1.0, 1.0, (3, 6), 3, 2, 0.01, 0.3, 1, 2, 2)


@dataclass(slots=True)
class _Progress:
    """What one request has got so far, in seconds of the run."""

    asked: TraceRequest
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float | None = None


@dataclass(slots=True)
class Replay:
    """A run from `start_s` to `end_s`, both in seconds of the run. gaps: times between the tokens of a request.

    busy_s: in steps. distinct: adapters of a step's tokens, summed over the steps.
    """

    start_s: float
    end_s: float = 0.0
    tokens: int = 0
    completed: int = 0
    steps: int = 0
    busy_s: float = 0.0
    distinct: int = 0
    errors: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def row(self) -> Row:
        seconds, steps = max(1e-9, self.end_s - self.start_s), max(1, self.steps)
        return {
            "requests/s": self.completed / seconds,
            "tokens/s": self.tokens / seconds,
            "step ms": 1e3 * self.busy_s / steps,
            **{f"p{p} TTFT s": percentile(sorted(self.ttfts), p) for p in (50, 99)},
            **{f"p{p} ITL ms": 1e3 * percentile(sorted(self.gaps), p) for p in (50, 99)},
            "adapters a step": self.distinct / steps,
            "steps": self.steps,
            "completed": self.completed,
            "errors": self.errors,
        }


def replay(
    made: RandomEngine,
    trace: Trace,
    kind: int,
    *,
    start_s: float = 0.0,
    end_s: float = float("inf"),
    waits: bool = False,
) -> Replay:
    """Open loop: requests come when the trace says, whatever became of the requests before. Ends with the last answer,
    or at `end_s`. Counts from `start_s` on.

    waits: whether both times move until the load is steady, but not past the end of the trace.
    """
    engine = made.engine
    vocab_size = engine.info.vocab_size
    # Before the clock starts.
    requests = [_make(made, request, kind, vocab_size) for request in trace]
    known = {request.request_id: _Progress(asked) for request, asked in zip(requests, trace, strict=True)}
    position, now, start = 0, 0.0, time.perf_counter()
    earliest_s, window_s = start_s, end_s - start_s
    num_delayed, num_steady = made.num_delayed, 0
    if waits:
        end_s = trace[-1].arrival_s
        start_s = end_s - window_s
    counted = Replay(start_s)
    while now < end_s and (position < len(trace) or made.has_work):
        now = time.perf_counter() - start
        while position < len(trace) and trace[position].arrival_s <= now:
            engine.add(requests[position])
            position += 1
        if not made.has_work:
            time.sleep(
                min(1e-3, max(0.0, trace[position].arrival_s - now)) if position < len(trace) else 1e-4
            )
            continue
        outputs = engine.step()
        then = time.perf_counter() - start
        if waits:
            num_steady = num_steady + 1 if made.num_delayed == num_delayed else 0
            num_delayed = made.num_delayed
            if num_steady >= _STEADY_STEPS and then >= earliest_s:
                waits, start_s = False, min(start_s, then)
                counted.start_s, end_s = start_s, start_s + window_s
        adapters = set()
        for output in outputs:
            progress = known[output.request_id]
            if output.error is not None:
                counted.errors += 1
                continue
            assert output.delta is not None
            adapters.add(progress.asked.adapter)
            if progress.first_s is None:
                progress.first_s = then
            if then >= start_s:
                if progress.first_s == then:
                    counted.ttfts.append(then - progress.asked.arrival_s)
                elif output.delta.token_ids:
                    counted.gaps.append((then - progress.last_s) / len(output.delta.token_ids))
                counted.tokens += len(output.delta.token_ids)
                counted.completed += output.delta.finish_reason is not None
            progress.last_s = then
        if outputs and then >= start_s:
            counted.steps += 1
            counted.busy_s += then - now
            counted.distinct += len(adapters - {None})
        now = then
    counted.end_s = now
    made.drop_all()
    return counted


def _make(made: RandomEngine, asked: TraceRequest, kind: int, vocab_size: int) -> EngineRequest:
    """The trace's tokens as ids that the model has."""
    prompt = [token % vocab_size for token in asked.prompt()]
    adapter = None if asked.adapter is None else RandomAdapter(asked.adapter, kind)
    return made.make_request(prompt, adapter, asked.output_tokens)


def serving_cases(
    scale: LoadScale, make: MakeEngine, rows: Callable[[], list[Row]], listing: Path
) -> Iterator[Case]:
    """rows: those that are measured so far; the calm rate follows from them. listing: see `profile_cases`."""
    for count in scale.adapters:
        yield {"load": "saturated", "adapters": count}, lambda n=count: _saturate(scale, make(), n)
    key = {"case": "profile", "adapters": scale.adapters[1]}
    yield key, lambda: _profile_saturated(scale, make(), scale.adapters[1], listing)
    # Twice as many sequences as the default make longer steps, but share their fixed costs.
    for count in reversed(scale.adapters):
        yield (
            {"load": "saturated, wide", "adapters": count},
            lambda n=count: _saturate(scale, make(max_num_seqs=2 * DEFAULT_SEQS), n),
        )
    few = scale.adapters[0]
    for count in scale.adapters:
        key = {"load": "calm", "adapters": count}
        yield key, lambda n=count: _run_calm(scale, make(), n, _find_rate(rows(), few))
    yield {"load": "even r16", "adapters": scale.popular}, lambda: _run_popular(scale, make(), zipf=False)
    yield {"load": "Zipf r16", "adapters": scale.popular}, lambda: _run_popular(scale, make(), zipf=True)


def _saturate(scale: LoadScale, made: RandomEngine, num_adapters: int) -> Row:
    end_s = scale.saturated_s
    trace = slora_trace(num_adapters, scale.rate, _MOST_WAITING * end_s, lengths=scale.lengths)
    row = _count_loads(
        made, lambda: replay(made, trace, S1_KIND, start_s=0.4 * end_s, end_s=end_s, waits=True)
    )
    return row | {"delayed": made.num_delayed}


def _profile_saturated(scale: LoadScale, made: RandomEngine, num_adapters: int, listing: Path) -> Row:
    """Steps of a full batch with a queue."""
    engine = made.engine
    for request in slora_trace(num_adapters, scale.rate, scale.saturated_s, lengths=scale.lengths):
        engine.add(_make(made, request, S1_KIND, engine.info.vocab_size))
    for _ in range(scale.warm_steps):
        engine.step()

    def run() -> None:
        for _ in range(scale.profiled_steps):
            engine.step()

    before = engine.stats().step_tokens
    row = profile_kernels(run, scale.profiled_steps, f"saturated, {num_adapters} adapters", listing)
    after = engine.stats().step_tokens
    made.drop_all()
    return row | {
        "tokens a step": (after.total - before.total) / max(1, sum(after.counts) - sum(before.counts))
    }


def _find_rate(rows: list[Row], num_adapters: int) -> float:
    saturated = [row for row in rows if row.get("load") == "saturated" and row["adapters"] == num_adapters]
    if not saturated or "requests/s" not in saturated[-1]:
        raise RuntimeError("the saturated rate was not measured")
    return _CALM * max(1.0, float(saturated[-1]["requests/s"]))


def _run_calm(scale: LoadScale, made: RandomEngine, num_adapters: int, rate: float) -> Row:
    trace = slora_trace(num_adapters, rate, scale.calm_s, lengths=scale.lengths)
    row = _count_loads(
        made, lambda: replay(made, trace, S1_KIND, start_s=scale.calm_s / 4, end_s=scale.calm_s)
    )
    return {"rate": rate, **row}


def _run_popular(scale: LoadScale, made: RandomEngine, *, zipf: bool) -> Row:
    end_s = scale.saturated_s
    trace = slora_trace(scale.popular, scale.rate, _MOST_WAITING * end_s, lengths=scale.lengths)
    if zipf:
        drawn = zipf_trace(scale.popular, scale.rate, _MOST_WAITING * end_s)
        trace = [replace(one, adapter=other.adapter) for one, other in zip(trace, drawn, strict=True)]
    return _count_loads(made, lambda: replay(made, trace, R16, start_s=0.4 * end_s, end_s=end_s, waits=True))


def _count_loads(made: RandomEngine, run: Callable[[], Replay]) -> Row:
    loads = made.engine.stats().adapter_loads
    row = run().row()
    return row | {"loads": made.engine.stats().adapter_loads - loads}


def cold_cases(scale: LoadScale, make: MakeEngine) -> Iterator[Case]:
    yield {"case": "warm-up", "round": 0}, lambda: _warm_up_cold(scale, make())
    first = 0
    for number in range(scale.cold_rounds):
        for case in COLD_CASES:
            first += 10_000
            key = {"case": case, "round": number}
            yield key, lambda case=case, first=first: _run_beside(scale, make(), case, first)


def _warm_up_cold(scale: LoadScale, made: RandomEngine) -> Row:
    """Records the steps of each case."""
    start = time.perf_counter()
    for number, case in enumerate(COLD_CASES):
        _run_beside(replace(scale, cold_s=scale.cold_s / 2), made, case, 1000 * (1 + number))
    return {"seconds": time.perf_counter() - start}


def _run_beside(scale: LoadScale, made: RandomEngine, case: str, first_cold: int) -> Row:
    """first_cold: the number of the first adapter that is not in the pool."""
    engine = made.engine
    vocab_size = engine.info.vocab_size
    (short,) = prompts(1, 8, vocab_size)
    waiting = set()
    for number, prompt in enumerate(prompts(scale.cold_decoding, 64, vocab_size)):
        adapter = RandomAdapter(number % scale.cold_warm, R16)
        # More tokens than the run has time for.
        request = made.make_request(prompt, adapter, engine.info.max_model_len - 64)
        engine.add(request)
        waiting.add(request.request_id)
    decoding, begun = frozenset(waiting), set[str]()
    made.run_until(lambda outputs: begun.update(o.request_id for o in outputs) or begun >= decoding)
    loads = engine.stats().adapter_loads
    start = last = time.perf_counter()
    gaps: list[float] = []
    come = 0
    while (now := time.perf_counter()) - start < scale.cold_s and made.has_work:
        due = 0 if case == ALONE else int((now - start) / scale.cold_every_s) - come
        for _ in range(due):
            adapter = RandomAdapter(first_cold + come, R16) if case == BESIDE_COLD else None
            engine.add(made.make_request(short, adapter, 4))
            come += 1
        outputs = [output for output in engine.step() if output.request_id in decoding]
        now = time.perf_counter()
        if outputs:
            gaps += [now - last] * len(outputs)
            last = now
    seconds = time.perf_counter() - start
    loads = engine.stats().adapter_loads - loads
    made.drop_all()
    gaps.sort()
    return {
        "others": come,
        "loads": loads,
        "loaded GB/s": loads * made.adapter_bytes(R16) / seconds / 1e9,
        **{f"p{percent} ms": 1e3 * percentile(gaps, percent) for percent in (50, 90, 99)},
        "max ms": 1e3 * gaps[-1] if gaps else None,
    }
