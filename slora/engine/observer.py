"""Makes the snapshot of an engine: its statistics, and for consoles the page pool and recent steps and events.

An observation for a console delays the next step by a millisecond or two. Several API processes may ask several times a
second, so it is reused for a fifth of a second.
"""

import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import NamedTuple

from slora.core.cost_model import CostModel
from slora.core.engine_state import (
    AdapterWork,
    EngineStats,
    Histogram,
    LiveState,
    LoadPaces,
    PageCounts,
    PageMap,
    PageOwner,
    PoolEvent,
    Quantiles,
    TenantState,
)
from slora.memory.residency import Resident
from slora.memory.tenant_account import TenantAccount
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.scheduler import Scheduler
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan
from slora_adapters.loader.source import AdapterSource
from slora_adapters.version import AdapterVersion

MAX_CELLS = 4096


class PageMapper:
    """Draws the pages of `paging`. It keeps the cells of resident adapters, because these do not change. A large pool
    is sampled, so that a drawing takes about a millisecond: a cell shows one of every `stride` pages.
    """

    def __init__(self, paging: UnifiedPaging) -> None:
        self._paging = paging
        self._stride = -(-paging.pool.num_pages // MAX_CELLS)
        self._cells: dict[Resident, list[int]] = {}

    def draw(self) -> PageMap:
        accounts, references = self._paging.pool.sample(self._stride)
        # A tenant has two accounts, so two numbers may stand for the same owner.
        numbers: defaultdict[tuple[TenantAccount | None, bool], int] = defaultdict(lambda: len(numbers))
        free = numbers[None, False]
        found = [numbers[account, count > 0] for account, count in zip(accounts, references, strict=True)]
        assert free == 0, "number 0 is a free page"
        cells = array("H", found)
        owners = [
            PageOwner("kv" if is_held else "prefix", account.name)
            for account, is_held in numbers
            if account is not None
        ]
        self._cells = {resident: self._find_cells(resident) for resident in self._paging.residency}
        for resident, places in self._cells.items():
            if places:
                content = "adapter" if resident.num_users else "idle_adapter"
                owners.append(PageOwner(content, resident.version.tenant, resident.version.digest))
                for place in places:
                    cells[place] = len(owners)
        return PageMap(self._stride, cells.tobytes(), tuple(owners))

    def _find_cells(self, resident: Resident) -> list[int]:
        known = self._cells.get(resident)
        stride = self._stride
        return [page // stride for page in resident.pages if page % stride == 0] if known is None else known


# Steps are recorded for this time after a console last asked. A console asks several times a second.
_WATCHED_S = 5.0
# Rates are averages over the last `_NUM_PERIODS` periods.
_PERIOD_S, _NUM_PERIODS = 0.25, 12
# Quantiles cover the last `_RECENT_S` seconds, but at most these numbers of tokens, intervals and steps.
_RECENT_S = 20.0
_MAX_FIRST_TOKENS, _MAX_INTERVALS, _MAX_STEPS = 1024, 2048, 1024


class StepRates(NamedTuple):
    """The rates and times of recent steps."""

    tokens_per_s: Mapping[str, float]  # Generated tokens, by tenant.
    adapters: Sequence[AdapterWork]  # In descending order of their computed tokens.
    steps_per_s: float
    computed_tokens_per_s: float
    steps: Quantiles | None  # Times of the steps.
    # Times by tenant. The key "" holds the times of all tenants together.
    first_tokens: Mapping[str, Quantiles]
    intervals: Mapping[str, Quantiles]


@dataclass(slots=True)
class _Period:
    """The counts of one period."""

    begins_at: float
    num_steps: int = 0
    num_tokens: int = 0  # All computed tokens.
    tokens: Counter[str] = field(default_factory=Counter)  # Generated tokens, by tenant.
    work: Counter[tuple[str, str]] = field(default_factory=Counter)  # Computed tokens, by tenant and digest.


class StepMeter:
    """Measures the steps of the engine while a console watches it: tokens, times, and which adapters they used.

    While no console watches, nothing is recorded and steps have no extra cost. All times are seconds of a monotonic
    clock.
    """

    def __init__(self) -> None:
        self._watched_until = float("-inf")
        self._periods: deque[_Period] = deque(maxlen=_NUM_PERIODS)
        self._first_tokens: deque[tuple[float, str, float]] = deque(maxlen=_MAX_FIRST_TOKENS)
        self._intervals: deque[tuple[float, str, float]] = deque(maxlen=_MAX_INTERVALS)
        self._steps: deque[tuple[float, str, float]] = deque(maxlen=_MAX_STEPS)

    def is_watched(self, now: float) -> bool:
        return now < self._watched_until

    def watch(self, now: float) -> None:
        """Records the steps of the next `_WATCHED_S` seconds."""
        if not self.is_watched(now):
            for recorded in (self._periods, self._first_tokens, self._intervals, self._steps):
                recorded.clear()
        self._watched_until = now + _WATCHED_S

    def record(self, plan: StepPlan, sampled: Sequence[SampledToken], step_s: float, now: float) -> None:
        """Records a step. Tokens that arrive together count as one interval."""
        period = self._current_period(now)
        period.num_steps += 1
        period.num_tokens += plan.num_tokens
        self._steps.append((now, "", step_s))
        tokens = iter(sampled)
        for chunk in plan.chunks:
            request, tenant = chunk.sequence.request, chunk.sequence.tenant.name
            for version, _ in request.adapters:
                period.work[version.tenant, version.digest] += chunk.num_tokens
            if not request.adapters:
                period.work[tenant, ""] += chunk.num_tokens
            found = [next(tokens) for _ in chunk.sampled_sequences]
            if not found or found[0].is_deferred or chunk.sequence.is_finished:
                continue
            period.tokens[tenant] += 1 + (_count_accepted(chunk, found) if chunk.drafts else len(chunk.forks))
            last_at = chunk.sequence.last_token_at
            if last_at is None:
                self._first_tokens.append((now, tenant, now - chunk.sequence.times.arrived_at))
            else:
                self._intervals.append((now, tenant, now - last_at))

    def measure(self, now: float) -> StepRates:
        """Returns the rates and times of the last seconds."""
        recent = [period for period in self._periods if period.begins_at > now - _PERIOD_S * _NUM_PERIODS]
        seconds = max(now - recent[0].begins_at, _PERIOD_S) if recent else 1.0
        tokens = sum((period.tokens for period in recent), Counter[str]())
        work = sum((period.work for period in recent), Counter[tuple[str, str]]())
        return StepRates(
            {tenant: count / seconds for tenant, count in tokens.items()},
            [AdapterWork(tenant, digest, count) for (tenant, digest), count in work.most_common()],
            sum(period.num_steps for period in recent) / seconds,
            sum(period.num_tokens for period in recent) / seconds,
            _quantiles(self._steps, now).get(""),
            _quantiles(self._first_tokens, now),
            _quantiles(self._intervals, now),
        )

    def _current_period(self, now: float) -> _Period:
        if not self._periods or now >= self._periods[-1].begins_at + _PERIOD_S:
            self._periods.append(_Period(now))
        return self._periods[-1]


def _count_accepted(chunk: Chunk, sampled: Sequence[SampledToken]) -> int:
    """Returns the number of accepted drafts: the drafts before the first that differs from the sampled token."""
    pairs = zip(chunk.drafts, sampled, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))


def _quantiles(recorded: Iterable[tuple[float, str, float]], now: float) -> dict[str, Quantiles]:
    """Returns the quantiles of recent times by tenant. The key "" holds the quantiles of all tenants together."""
    by_tenant: dict[str, list[float]] = {}
    for at, tenant, seconds in recorded:
        if at > now - _RECENT_S:
            by_tenant.setdefault(tenant, []).append(seconds)
    if by_tenant and "" not in by_tenant:
        by_tenant[""] = [seconds for times in by_tenant.values() for seconds in times]
    found = {}
    for tenant, times in by_tenant.items():
        times.sort()
        found[tenant] = Quantiles(times[len(times) // 2], times[len(times) * 99 // 100], len(times))
    return found


# The buckets are the same as in vLLM's histograms of inter-token latency and of tokens per step.
_LATENCIES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# How many adapters the statistics list, because each scrape sends them.
_MAX_LISTED = 256
_REPEATED_S = 0.2
# Maximum numbers of listed tenants and adapters, in addition to the watched tenants and their adapters.
_MAX_TENANTS, _MAX_ADAPTERS = 50, 64
# Maximum number of listed adapters of watched tenants.
_MAX_OWN_ADAPTERS = 1024
_MAX_EVENTS = 128


class Observer:
    """Counts what the engine computes, and makes its snapshots. most_listed: see `EngineConfig.metrics_tenants`."""

    def __init__(
        self, scheduler: Scheduler, source: AdapterSource, costs: CostModel, most_listed: int
    ) -> None:
        self.num_prompt_tokens = 0
        self._scheduler = scheduler
        self._source = source
        self._costs = costs
        self._most_listed = most_listed
        self._num_steps = self._num_generated_tokens = 0
        self._step_seconds, self._token_gaps = Histogram(_LATENCIES_S), Histogram(_LATENCIES_S)
        self._step_tokens = Histogram(_STEP_TOKENS)
        self._meter = StepMeter()
        self._mapper = PageMapper(scheduler.paging)
        self._loaded: set[AdapterVersion] = set()
        self._preemptions: dict[str, int] = {}
        self._prefix_evictions: dict[str, int] = {}
        self._events: deque[PoolEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._last: EngineStats | None = None
        self._last_at = float("-inf")
        self._last_watched: frozenset[str] = frozenset()

    def count_step(self, plan: StepPlan, sampled: Sequence[SampledToken], step_s: float, now: float) -> None:
        """Counts a computed step, before it is postprocessed.

        sampled: one entry for each entry of each chunk's `sampled_sequences`, in order.
        """
        if not plan.chunks:
            return
        self._num_steps += 1
        self._step_seconds.count(step_s)
        self._step_tokens.count(plan.num_tokens)
        sequences = (sequence for chunk in plan.chunks for sequence in chunk.sampled_sequences)
        self._num_generated_tokens += sum(
            not (token.is_deferred or sequence.is_finished)
            for sequence, token in zip(sequences, sampled, strict=True)
        )
        if self._meter.is_watched(now):
            self._meter.record(plan, sampled, step_s, now)

    def count_gaps(self, gaps: Iterable[tuple[float, int]]) -> None:
        """Counts the times between tokens of a step: seconds, and how often each occurred."""
        for gap_s, count in gaps:
            self._token_gaps.count(gap_s, count)

    def observe(self, watched: Collection[str] | None, now: float) -> EngineStats:
        """Makes a snapshot, or repeats a recent one for consoles.

        watched: for a console, the tenants that must be listed, even if they are small. With None, the snapshot has no
            live state. now: seconds of a monotonic clock.
        """
        if watched is None:
            return self._make_stats(None)
        if self._last is not None and now < self._last_at + _REPEATED_S:
            if self._last_watched.issuperset(watched):
                return self._last
            watched = self._last_watched.union(watched)
        was_watched = self._meter.is_watched(now)
        self._meter.watch(now)
        time_s = time.time()
        self._note_events(time_s, is_first=not was_watched)
        live = self._make_live_state(frozenset(watched), self._meter.measure(now), time_s)
        self._last = self._make_stats(live)
        self._last_at, self._last_watched = now, frozenset(watched)
        return self._last

    def _make_stats(self, live: LiveState | None) -> EngineStats:
        scheduler, memory = self._scheduler, self._scheduler.paging
        residents = list(memory.residency)
        served = scheduler.served.adapters
        loaded = {resident.version.label for resident in residents if resident.is_loaded}
        ready = sorted(
            (resident for resident in residents if resident.is_loaded),
            key=lambda resident: not resident.num_users,
        )
        waiting = scheduler.adapters.waited_for | {
            resident.version for resident in residents if resident.is_loading
        }
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            awaiting_adapter=scheduler.num_awaiting_adapter,
            pages_total=memory.pool.num_pages,
            pages_free=memory.pool.num_free,
            pages_held=memory.pool.num_held,
            pages_cached=memory.pool.num_cached,
            adapter_pages=sum(len(r.pages) for r in residents),
            resident_adapters=len(residents),
            loaded_adapters=tuple(
                (resident.version.tenant, resident.version.digest) for resident in ready[:_MAX_LISTED]
            ),
            waiting_adapters=tuple(
                (version.tenant, version.digest) for version in islice(waiting, _MAX_LISTED)
            ),
            adapter_loads=scheduler.adapters.num_loads,
            adapter_evictions=memory.residency.num_evictions,
            pinned_adapters=scheduler.pins.num_pins,
            pinned_loaded=scheduler.pins.num_loaded,
            pin_failures=scheduler.pins.num_failures,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefixes.num_queries,
            prefix_hits=scheduler.prefixes.num_hits,
            prefix_evictions=memory.kv.num_evictions,
            swapped_out_pages=scheduler.swapping.num_pages_out,
            swapped_in_pages=scheduler.swapping.num_pages_in,
            swap_pages_total=scheduler.swapping.num_pages,
            swap_pages_used=scheduler.swapping.num_used,
            deadline_misses=scheduler.num_deadlines_missed,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self._num_generated_tokens - scheduler.drafting.num_rejected_tokens,
            drafts=scheduler.drafting.num_drafts,
            draft_tokens=scheduler.drafting.num_draft_tokens,
            accepted_draft_tokens=scheduler.drafting.num_accepted_tokens,
            steps=self._num_steps,
            not_finite=scheduler.num_not_finite,
            loads_by_cause=dict(scheduler.adapters.loads),
            evictions_by_cause=dict(memory.residency.evictions),
            preemptions_by_kind=scheduler.preemptions_by_kind,
            fetches_by_outcome=dict(scheduler.adapters.fetches),
            step_seconds=self._step_seconds.read(),
            step_tokens=self._step_tokens.read(),
            token_gaps=self._token_gaps.read(),
            tenants=scheduler.served.tenants,
            adapters=served,
            pooled_adapters=tuple(sorted(served.keys() & loaded)),
            pages=memory.count_pages(),
            tenant_pages=memory.count_tenant_pages(self._most_listed),
            load_paces=LoadPaces(self._costs.load_byte_s, dict(self._source.paces)),
            costs=replace(self._costs),  # It changes while another thread sends the statistics.
            usage=scheduler.total_usage,
            host_cache=self._source.count_cached(self._most_listed, served),
            live=live,
        )

    def _make_live_state(self, watched: frozenset[str], rates: StepRates, time_s: float) -> LiveState:
        scheduler, paging = self._scheduler, self._scheduler.paging
        running, waiting = scheduler.count_sequences()
        owned = paging.count_tenant_pages(_MAX_TENANTS, watched)
        busiest = (name for name, _ in (running + waiting).most_common(_MAX_TENANTS))

        def state(
            name: str, counts: PageCounts, num_running: int, num_waiting: int, per_s: float
        ) -> TenantState:
            return TenantState(
                counts,
                num_running,
                num_waiting,
                per_s,
                rates.first_tokens.get(name),
                rates.intervals.get(name),
            )

        adapters = [
            adapter
            for at, adapter in enumerate(rates.adapters)
            if at < _MAX_ADAPTERS or adapter.tenant in watched
        ]
        return LiveState(
            time_s=time_s,
            page_map=self._mapper.draw(),
            total=state(
                "",
                paging.count_pages(),
                running.total(),
                waiting.total(),
                sum(rates.tokens_per_s.values()),
            ),
            tenants={
                name: state(
                    name,
                    owned.get(name, PageCounts()),
                    running[name],
                    waiting[name],
                    rates.tokens_per_s.get(name, 0.0),
                )
                for name in {**owned, **dict.fromkeys(busiest), **dict.fromkeys(watched)}
            },
            adapters=tuple(adapters[: _MAX_ADAPTERS + _MAX_OWN_ADAPTERS]),
            work_tokens=sum(adapter.num_tokens for adapter in rates.adapters),
            step=rates.steps,
            steps_per_s=rates.steps_per_s,
            computed_tokens_per_s=rates.computed_tokens_per_s,
            events=tuple(self._events),
        )

    def _note_events(self, time_s: float, *, is_first: bool) -> None:
        """Records the changes of the pool since the last observation as events. The first observation records none."""
        loaded = {resident.version for resident in self._scheduler.paging.residency if resident.is_loaded}
        preemptions: dict[str, int] = {}
        prefix_evictions: dict[str, int] = {}
        for account in self._scheduler.paging.tenants:
            name = account.name
            if account.num_preemptions:
                preemptions[name] = preemptions.get(name, 0) + account.num_preemptions
            if account.num_prefix_evictions:
                prefix_evictions[name] = prefix_evictions.get(name, 0) + account.num_prefix_evictions
        if not is_first:
            for version in loaded - self._loaded:
                self._add_event(time_s, "load", version.tenant, version.digest, 1)
            for version in self._loaded - loaded:
                self._add_event(time_s, "eviction", version.tenant, version.digest, 1)
            for kind, counts, known in (
                ("preemption", preemptions, self._preemptions),
                ("prefix_eviction", prefix_evictions, self._prefix_evictions),
            ):
                for tenant, count in counts.items():
                    if count > known.get(tenant, 0):
                        self._add_event(time_s, kind, tenant, "", count - known.get(tenant, 0))
        self._loaded, self._preemptions, self._prefix_evictions = loaded, preemptions, prefix_evictions

    def _add_event(self, time_s: float, kind: str, tenant: str, digest: str, count: int) -> None:
        self._num_events += 1
        self._events.append(PoolEvent(self._num_events, time_s, kind, tenant, digest, count))
