"""A trace replayed against the engine itself, in real time: no HTTP, one loop that adds what is due and steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.gpu.random_engine import RandomEngine
from bench.simulation.request_log import Outcome, Results, summarize
from bench.simulation.traces import Trace, TraceRequest
from bench.table import Row
from slora.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Replay:
    """steps: those that gave tokens. distinct: adapters of a step's tokens, summed over the steps. loads: adapters that
    were copied to the pool."""

    results: Results
    seconds: float
    steps: int
    distinct: int
    loads: int

    def row(self) -> Row:
        results, steps = self.results, max(1, self.steps)
        return {
            "requests": results.requests,
            "requests/s": results.requests_per_s,
            "tokens/s": results.output_tokens_per_s,
            "p50 TTFT s": results.ttft_p50_s,
            "p99 TTFT s": results.ttft_p99_s,
            "attainment": results.attainment,
            "errors": sum(results.errors.values()),
            "steps": self.steps,
            "step ms": 1e3 * self.seconds / steps,
            "adapters a step": self.distinct / steps,
            "loads": self.loads,
        }


def replay(random_engine: RandomEngine, trace: Trace) -> Replay:
    """Open loop: requests come when the trace says, whatever became of those before. Until the last answer ends."""
    engine = random_engine.engine
    vocab_size = engine.info.vocab_size
    # Before the clock starts: prompts are made of one token of each thread, and no two are alike.
    requests = [
        random_engine.make_request(_fold(one, vocab_size), one.adapter, one.output_tokens) for one in trace
    ]
    outcomes = {asked.request_id: Outcome(one) for asked, one in zip(requests, trace, strict=True)}
    loads = engine.stats().adapter_loads
    position = steps = distinct = 0
    start = time.perf_counter()
    busy = 0.0
    while position < len(trace) or engine.num_unfinished:
        now = time.perf_counter() - start
        while position < len(trace) and trace[position].arrival_s <= now:
            engine.add(requests[position])
            position += 1
        if not engine.num_unfinished:
            time.sleep(max(0.0, trace[position].arrival_s - now))
            continue
        outputs = engine.step()
        then = time.perf_counter() - start
        adapters = set()
        for output in outputs:
            outcome = outcomes[output.request_id]
            if output.error is not None:
                outcome.error, outcome.end_s = type(output.error).__name__, then
                continue
            assert output.delta is not None
            if outcome.first_token_s is None:
                outcome.first_token_s = then
            outcome.num_tokens += len(output.delta.token_ids)
            if output.delta.finish_reason is not None:
                outcome.end_s = then
            adapters.add(outcome.request.adapter)
        if outputs:
            steps, busy, distinct = steps + 1, busy + then - now, distinct + len(adapters - {None})
    loads = engine.stats().adapter_loads - loads
    return Replay(summarize(list(outcomes.values())), busy, steps, distinct, loads)


def measure_gaps(
    random_engine: RandomEngine,
    decoding: list[EngineRequest],
    arrive: Callable[[float], list[EngineRequest]],
) -> tuple[list[float], float]:
    """Seconds between two tokens of those who decode, in order of size, and until all of them had ended.

    arrive: who else has come since it was last asked, given the seconds since all who decode had begun.
    """
    engine = random_engine.engine
    waiting = {request.request_id for request in decoding}
    for request in decoding:
        engine.add(request)
    begun: set[str] = set()
    while begun < waiting:
        begun |= {output.request_id for output in engine.step()}
    start = last = time.perf_counter()
    gaps: list[float] = []
    while waiting:
        for request in arrive(time.perf_counter() - start):
            engine.add(request)
        outputs = [output for output in engine.step() if output.request_id in begun]
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
            assert output.delta is not None
            gaps.append(now - last)
            if output.delta.finish_reason is not None:
                waiting.discard(output.request_id)
        last = now if outputs else last
    seconds = time.perf_counter() - start
    random_engine.drop_all()
    return sorted(gaps), seconds


def _fold(request: TraceRequest, vocab_size: int) -> list[int]:
    """The trace's tokens as ids that the model has."""
    return [token % vocab_size for token in request.prompt()]
