"""The production scheduler, pool, residency and eviction under a virtual clock: only the model is missing.

A trace's requests are added when they arrive, every step is planned by the scheduler itself, and the clock moves by
what the step would take (`Machine.costs`). Two runs of one trace are equal in every number. What the scheduler and its
parts are made of, and how they are stepped, is written in this file and nowhere else in the benches.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Protocol

from slora.kv_footprint import KVFootprint
from slora.request import EngineRequest, StepOutput, single_adapter
from slora.sampling_params import SamplingParams
from slora.scheduler.scheduler import Scheduler
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken, StepPlan
from slora.scheduler_config import SchedulerConfig
from slora.simulation.adapter_fleet import AdapterFleet
from slora.simulation.machine import Machine
from slora.simulation.next_tokens import NextTokens
from slora.simulation.request_log import Outcome, Results, summarize
from slora.simulation.traces import Trace, TraceRequest
from slora.simulation.virtual_source import FetchCosts, VirtualSource

STOP_TOKEN = 2


def _default(option: str) -> str:
    return str(next(field.default for field in fields(SchedulerConfig) if field.name == option))


@dataclass(frozen=True, slots=True)
class Policies:
    """The engine's own options and their defaults; see SchedulerConfig."""

    scheduling: str = _default("scheduling")
    eviction: str = _default("eviction")
    preemption: str = _default("preemption")
    prefix_cache: str = _default("prefix_cache")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    ranks, num_tenants: of the adapters, see AdapterFleet. num_slots: the most adapters in the pool.
    max_tokens: None tells the engine how long each answer will be (as S-LoRA's bench does); a number is what every
    request allows, and the answer's true end comes as a stop token.
    num_choices: answers to each request, all of the same length. beams: what as many beams of a search propose by; None
    draws the answers. deadline_s: of every request, for its first token.
    load_pages: of adapters that a step loads beside decoding; None is the engine's rule. swap_share: pages of the host,
    over those of the pool.
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
        eviction=policies.eviction,
    )
    return Scheduler(config, source, machine.costs)


class Gate(Protocol):
    """Holds requests back before the engine sees them."""

    def push(self, request: TraceRequest) -> None:
        """It has arrived."""

    def release(self, now: float, num_unfinished: int) -> list[TraceRequest]:
        """Those that may pass, given how many are in the engine."""

    def wake_at(self) -> float | None:
        """When it may let somebody pass though nothing happens; None: not by time alone."""


class Observer(Protocol):
    def observe(self, simulation: "Simulation", plan: StepPlan, seconds: float) -> None:
        """A step was planned and will take `seconds`; its tokens are not counted as computed yet."""


@dataclass(slots=True)
class Totals:
    """Sums over all steps. starts: sequences with an adapter that began to run; loads: those that brought it in."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    starts: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    swapped_pages: int = 0

    @property
    def hit_share(self) -> float:
        """Of the starts with an adapter, those that found it in the pool."""
        return 1 - self.loads / self.starts if self.starts else 0.0


class Simulation:
    """One engine and one trace. `running`: the sequences that hold pages, for observers.

    schedule_s, postprocess_s: real seconds that the scheduler took in the last step.
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
        self._tokens: dict[
            str, tuple[SampledToken, int | None]
        ] = {}  # what is drawn, and after how many the stop token
        self._stop = SampledToken(STOP_TOKEN)
        self.num_unfinished = 0
        self.schedule_s = self.postprocess_s = 0.0

    @property
    def now(self) -> float:
        return self.source.now

    def run(self, trace: Trace, gate: Gate | None = None, *, until_s: float | None = None) -> Results:
        """Replays a trace until all is answered, or until a moment of the clock."""
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

    def submit(self, request: TraceRequest) -> None:
        """The engine gets a request now; its waiting is counted from its arrival in the trace."""
        setup = self.setup
        request_id = f"request-{len(self.outcomes)}"
        max_tokens = request.output_tokens if setup.max_tokens is None else setup.max_tokens
        stops_after = None if setup.max_tokens is None else request.output_tokens
        self.outcomes[request_id] = Outcome(request, setup.num_choices)
        self._tokens[request_id] = SampledToken(request.thread_token), stops_after
        self.num_unfinished += 1
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
        sequence = Sequence(engine_request, tenant, max_tokens, stop_ids, 0, block_tokens)
        self.scheduler.add(sequence, request.arrival_s)

    def step(self) -> bool:
        """Plans and takes in one step; the clock moves by what it costs. False: there was nothing to do."""
        started_s = time.perf_counter()
        plan = self.scheduler.schedule(self.now)
        self.schedule_s = time.perf_counter() - started_s
        self._take_in(plan.ended)
        if not (plan.chunks or plan.loads or plan.swaps_out):
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
        started_s = time.perf_counter()
        outputs = self.scheduler.postprocess(plan, sampled)
        self.postprocess_s = time.perf_counter() - started_s
        self._take_in(outputs[len(plan.ended) :])
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
                outcome.num_tokens += len(output.delta.token_ids)
                if output.delta.finish_reason is not None:
                    outcome.num_ended += 1
                    if outcome.num_ended == outcome.num_choices:
                        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        outcome.end_s = self.now
        self.num_unfinished -= 1


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Means over time. running: requests that compute; those that wait for a load don't. Shares are of the bytes of
    held pages: a cached page may be of use to somebody, or not.
    """

    seconds: float
    running: float
    held_share: float
    cached_share: float
    kv_token_share: float
    adapter_share: float

    @property
    def useful_share(self) -> float:
        """Bytes of real token states and of real adapters, over the bytes of the pages that hold them."""
        return self.kv_token_share + self.adapter_share


class PoolMeter:
    """Watches the pool while somebody waits for it, the first `warm_up_s` aside; for sequences that share no page."""

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
