"""Runs the scheduler, page pool, residency and eviction of the engine on a virtual clock, without a model.

A trace's requests are added when they arrive. The scheduler plans every step, and the clock advances by the time that
the step would take (`Machine.costs`). Two runs of the same trace give equal results. Simulations and benchmarks build
and step the scheduler only through this module.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Protocol

from bench.simulation.adapter_fleet import AdapterFleet
from bench.simulation.machine import Machine
from bench.simulation.next_tokens import NextTokens
from bench.simulation.request_log import Outcome, Results, summarize
from bench.simulation.traces import Trace, TraceRequest
from bench.simulation.virtual_source import FetchCosts, VirtualSource
from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.core.request import EngineRequest, StepOutput, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.scheduler.scheduler import Scheduler
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken, StepPlan

STOP_TOKEN = 2


def _default(option: str) -> str:
    return str(next(field.default for field in fields(SchedulerConfig) if field.name == option))


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of the simulated engine; see SchedulerConfig. The defaults are the engine's."""

    scheduling: str = _default("scheduling")
    preemption: str = _default("preemption")
    prefix_cache: str = _default("prefix_cache")


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a simulation.

    ranks, num_tenants: see AdapterFleet.
    num_slots: maximum number of adapters in the pool.
    max_tokens: the max_tokens of every request; its answer ends earlier with a stop token. None sets max_tokens to the
        length of the answer, so the engine knows it, as in S-LoRA's benchmark.
    num_choices: answers to each request, all of the same length.
    beams: proposes the next tokens of beams. Each request then runs a beam search with `num_choices` beams. None:
        answers are sampled.
    deadline_s: the deadline for the first token of every request.
    load_pages: maximum number of adapter pages that a step with decoding sequences loads; None uses the engine's rule.
    swap_share: the number of host pages for swapping, as a fraction of the pool's pages.
    """

    machine: Machine
    ranks: tuple[int, ...]
    num_tenants: int | None = None
    num_slots: int = 256
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    fetch: FetchCosts = field(default_factory=FetchCosts)
    max_tokens: int | None = None
    num_choices: int = 1
    beams: NextTokens | None = None
    deadline_s: float | None = None
    load_pages: int | None = None
    swap_share: float = 0.25
    policies: Policies = Policies()


def build_scheduler(setup: Setup, source: VirtualSource) -> Scheduler:
    machine, policies = setup.machine, setup.policies
    config = SchedulerConfig(
        num_pages=machine.num_pages,
        num_slots=setup.num_slots,
        full_page_bytes=machine.full_page_bytes,
        footprint=KVFootprint(machine.block_tokens),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        load_pages=setup.load_pages,
        swap_pages=int(setup.swap_share * machine.num_pages),
        prefix_cache=policies.prefix_cache,
        preemption=policies.preemption,
        scheduling=policies.scheduling,
    )
    return Scheduler(config, source, machine.costs)


class Gate(Protocol):
    """Decides when an arrived request is passed to the engine."""

    def push(self, request: TraceRequest) -> None:
        """Adds a request that has arrived."""

    def release(self, now: float, num_unfinished: int) -> list[TraceRequest]:
        """Returns the requests to pass to the engine now. num_unfinished: requests that are in the engine."""

    def wake_at(self) -> float | None:
        """Returns the time at which `release` may next return a request without a new event; None: never."""


class Observer(Protocol):
    def observe(self, simulation: "Simulation", plan: StepPlan, seconds: float) -> None:
        """Observes a planned step, which will take `seconds`. Its tokens do not count as computed yet."""


@dataclass(slots=True)
class Totals:
    """Sums over all steps. starts: admissions of sequences with an adapter. loads: number of adapter loads."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    starts: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    swapped_pages: int = 0

    @property
    def hit_share(self) -> float:
        """The share of `starts` that found the adapter in the pool."""
        return 1 - self.loads / self.starts if self.starts else 0.0


class Simulation:
    """Simulates one engine that serves one trace.

    running: the sequences that hold pages, for observers.
    unfinished_tokens: prompt and answer tokens of unfinished requests, computed ones included.
    schedule_s, postprocess_s: CPU seconds of this thread that the scheduler took in the last step.
    """

    def __init__(self, setup: Setup, observers: Iterable[Observer] = ()) -> None:
        self.setup = setup
        self.machine = setup.machine
        self.fleet = AdapterFleet(setup.machine, setup.ranks, setup.num_tenants)
        self.source = VirtualSource(self.fleet, setup.fetch)
        self.scheduler = build_scheduler(setup, self.source)
        self.pool, self.residency = self.scheduler.paging.pool, self.scheduler.paging.residency
        self.totals = Totals()
        self.outcomes: dict[str, Outcome] = {}
        self.running: dict[int, Sequence] = {}
        self._observers = tuple(observers)
        # For each request: the token that is sampled, and the answer's length at which the stop token is sampled.
        self._tokens: dict[str, tuple[SampledToken, int | None]] = {}
        self._stop = SampledToken(STOP_TOKEN)
        self.num_unfinished = self.unfinished_tokens = 0
        self.schedule_s = self.postprocess_s = 0.0

    @property
    def now(self) -> float:
        return self.source.now

    def run(self, trace: Trace, gate: Gate | None = None, *, until_s: float | None = None) -> Results:
        """Replays a trace until all requests have ended, or until the clock reaches `until_s`."""
        position = 0
        while until_s is None or self.now < until_s:
            while position < len(trace) and trace[position].arrival_s <= self.now:
                if gate is None:
                    self.submit(trace[position])
                else:
                    gate.push(trace[position])
                position += 1
            if gate is not None:
                for request in gate.release(self.now, self.num_unfinished):
                    self.submit(request)
            if self.step():
                continue
            arrival = trace[position].arrival_s if position < len(trace) else None
            events = (arrival, self.source.next_arrival, gate.wake_at() if gate is not None else None)
            coming = [event for event in events if event is not None and event > self.now]
            if not coming:
                break
            self.source.now = min(coming)
        else:
            return summarize(list(self.outcomes.values()))
        assert not self.num_unfinished, (
            f"{self.num_unfinished} requests are unfinished, but no event is left (deadlock)"
        )
        return summarize(list(self.outcomes.values()))

    def advance(self, until_s: float) -> None:
        """Runs steps until the clock reaches `until_s`. The last step may end later."""
        while self.now < until_s:
            if self.step():
                continue
            arrival = self.source.next_arrival
            self.source.now = until_s if arrival is None or arrival <= self.now else min(arrival, until_s)

    def submit(self, request: TraceRequest) -> None:
        """Passes a request to the engine. Its waiting time counts from its arrival in the trace."""
        setup = self.setup
        request_id = f"request-{len(self.outcomes)}"
        max_tokens = request.output_tokens if setup.max_tokens is None else setup.max_tokens
        stops_after = None if setup.max_tokens is None else request.output_tokens
        self.outcomes[request_id] = Outcome(request, setup.num_choices)
        self._tokens[request_id] = SampledToken(request.thread_token), stops_after
        self.num_unfinished += 1
        self.unfinished_tokens += request.prompt_tokens + request.output_tokens
        engine_request = EngineRequest(
            request_id,
            f"tenant-{request.tenant}",
            request.prompt(),
            single_adapter(None if request.adapter is None else self.fleet.version(request.adapter)),
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                n=setup.num_choices,
                use_beam_search=setup.beams is not None,
            ),
            deadline_s=setup.deadline_s,
        )
        tenant = self.scheduler.paging.tenants.find(engine_request.tenant)
        stop_ids, block_tokens = frozenset([STOP_TOKEN]), self.machine.block_tokens
        sequence = Sequence(engine_request, tenant, max_tokens, stop_ids, 0, BlockTable(block_tokens))
        self.scheduler.add(sequence, request.arrival_s)

    def step(self) -> bool:
        """Plans and postprocesses one step, and advances the clock by its costs. Returns False if there was nothing to
        do.
        """
        started_s = time.thread_time()
        plan = self.scheduler.schedule(self.now)
        self.schedule_s = time.thread_time() - started_s
        self._take_in(plan.ended)
        if not (plan.chunks or plan.loads or plan.swaps_out):
            self.scheduler.advance(plan)
            self.scheduler.postprocess(plan, [])
            return False
        seconds = self._cost(plan)
        for sequence in plan.rows_to_write:
            self.running[id(sequence)] = sequence
        for observer in self._observers:
            observer.observe(self, plan, seconds)
        self.source.now += seconds
        sampled = [
            self._sample_token(sequence) for chunk in plan.chunks for sequence in chunk.sampled_sequences
        ]
        started_s = time.thread_time()
        self.scheduler.advance(plan)
        outputs = self.scheduler.postprocess(plan, sampled)
        self.postprocess_s = time.thread_time() - started_s
        self._take_in(outputs)
        self.running = {key: s for key, s in self.running.items() if not s.is_finished and s.blocks.num_pages}
        return True

    def _cost(self, plan: StepPlan) -> float:
        work = plan.measure_work(self.machine.full_page_bytes)
        totals = self.totals
        totals.steps += 1
        totals.prefill_tokens += work.prefill_tokens
        totals.decode_tokens += work.decode_rows
        totals.loads += sum(load.is_last for load in plan.loads)
        totals.loaded_bytes += work.loaded_bytes
        totals.swapped_pages += work.swapped_pages
        totals.starts += sum(1 for s in plan.rows_to_write if s.request.adapters and s.index == 0)
        return self.machine.costs.step_seconds(work)

    def _sample_token(self, sequence: Sequence) -> SampledToken:
        token, stops_after = self._tokens[sequence.request.request_id]
        if sequence.search is not None and self.setup.beams is not None:
            thread = self.outcomes[sequence.request.request_id].request.thread
            answer = sequence.token_ids[sequence.num_prompt :]
            proposal = self.setup.beams.propose(thread, answer, sequence.search.width)
            return token._replace(proposal=proposal)
        return self._stop if sequence.num_generated + 1 == stops_after else token

    def _take_in(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            outcome = self.outcomes[output.request_id]
            if output.error is not None:
                outcome.error = type(output.error).__name__
                self._end(outcome)
            elif output.delta is not None:
                if outcome.first_token_s is None:
                    outcome.first_token_s = self.now
                elif outcome.last_token_s is not None:
                    outcome.gaps_s.append(self.now - outcome.last_token_s)
                outcome.last_token_s = self.now
                outcome.num_tokens += len(output.delta.token_ids)
                if output.delta.finish_reason is not None:
                    outcome.num_ended += 1
                    if outcome.num_ended == outcome.num_choices:
                        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        outcome.end_s = self.now
        self.num_unfinished -= 1
        self.unfinished_tokens -= outcome.request.prompt_tokens + outcome.request.output_tokens


@dataclass(frozen=True, slots=True)
class PoolUse:
    """How the pool was used, averaged over time.

    running: number of requests that compute. Requests that wait for an adapter load are not counted.
    held_share, cached_share: shares of all pages.
    kv_token_share, adapter_share: shares of the bytes of held pages. Cached pages are not counted, because they may
        never be reused.
    """

    seconds: float
    running: float
    held_share: float
    cached_share: float
    kv_token_share: float
    adapter_share: float

    @property
    def useful_share(self) -> float:
        """The bytes of computed KV and of adapters, as a share of the bytes of held pages."""
        return self.kv_token_share + self.adapter_share


class PoolMeter:
    """An observer that measures how the pool is used. The result is exact only if sequences share no pages.

    warm_up_s: the time at the start that is not measured. only_backlog: measure only while requests wait.
    """

    def __init__(self, warm_up_s: float = 0.0, *, only_backlog: bool = True) -> None:
        self._warm_up_s = warm_up_s
        self._only_backlog = only_backlog
        self._seconds = self._running = self._held = self._cached = self._tokens = self._adapters = 0.0

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        if simulation.now < self._warm_up_s or (self._only_backlog and not simulation.scheduler.num_waiting):
            return
        machine, residency = simulation.machine, simulation.residency
        held = simulation.pool.num_held * machine.full_page_bytes
        tokens = sum(sequence.num_computed for sequence in simulation.running.values()) + plan.num_tokens
        adapters = sum(
            min(r.num_bytes, r.num_loaded * machine.full_page_bytes) for r in residency if r.num_users
        )
        self._seconds += seconds
        self._running += seconds * len(plan.chunks)
        self._held += seconds * simulation.pool.num_held / simulation.pool.num_pages
        self._cached += seconds * simulation.pool.num_cached / simulation.pool.num_pages
        self._tokens += seconds * tokens * machine.token_bytes / held
        self._adapters += seconds * adapters / held

    def result(self) -> PoolUse:
        total = self._seconds or 1.0
        return PoolUse(
            self._seconds,
            self._running / total,
            self._held / total,
            self._cached / total,
            self._tokens / total,
            self._adapters / total,
        )
