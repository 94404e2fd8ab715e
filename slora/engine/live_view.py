"""Observes the engine for consoles: the page pool, recent steps, and what happened since the last observation.

An observation delays the next step by a millisecond or two. Several API processes may ask several times a second, so
an observation is reused for a fifth of a second.
"""

import time
from collections import deque
from collections.abc import Collection

from slora.core.live_state import LiveState, PoolEvent, TenantState
from slora.core.page_counts import PageCounts
from slora.engine.page_mapper import PageMapper
from slora.engine.step_meter import StepMeter, StepRates
from slora.scheduler.scheduler import Scheduler
from slora_adapters.version import AdapterVersion

_REPEATED_S = 0.2
# Maximum numbers of listed tenants and adapters, in addition to the watched tenants and their adapters.
_MAX_TENANTS, _MAX_ADAPTERS = 50, 64
# Maximum number of listed adapters of watched tenants.
_MAX_OWN_ADAPTERS = 1024
_MAX_EVENTS = 128


class LiveView:
    """Observes an engine for its consoles. meter: records the engine's steps while a console watches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.meter = StepMeter()
        self._scheduler = scheduler
        self._mapper = PageMapper(scheduler.paging)
        self._loaded: set[AdapterVersion] = set()
        self._preemptions: dict[str, int] = {}
        self._prefix_evictions: dict[str, int] = {}
        self._events: deque[PoolEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._last: LiveState | None = None
        self._last_at = float("-inf")
        self._last_watched: frozenset[str] = frozenset()

    def observe(self, watched: Collection[str], now: float) -> LiveState:
        """Observes the engine, or repeats a recent observation.

        watched: the tenants that must be listed, even if they are small. now: seconds of a monotonic clock.
        """
        if self._last is not None and now < self._last_at + _REPEATED_S:
            if self._last_watched.issuperset(watched):
                return self._last
            watched = self._last_watched.union(watched)
        was_watched = self.meter.is_watched(now)
        self.meter.watch(now)
        time_s = time.time()
        self._note_events(time_s, is_first=not was_watched)
        rates = self.meter.measure(now)
        self._last = self._make_state(frozenset(watched), rates, time_s)
        self._last_at, self._last_watched = now, frozenset(watched)
        return self._last

    def _make_state(self, watched: frozenset[str], rates: StepRates, time_s: float) -> LiveState:
        scheduler, paging = self._scheduler, self._scheduler.paging
        running, waiting = scheduler.count_sequences()
        owned = paging.count_tenant_pages(_MAX_TENANTS, watched)
        busiest = (name for name, _ in (running + waiting).most_common(_MAX_TENANTS))
        pages = paging.count_pages()

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
            one for at, one in enumerate(rates.adapters) if at < _MAX_ADAPTERS or one.tenant in watched
        ]
        return LiveState(
            time_s=time_s,
            num_pages=paging.pool.num_pages,
            page_map=self._mapper.draw(),
            pages=pages,
            awaiting_adapter=scheduler.num_awaiting_adapter,
            total=state("", pages, running.total(), waiting.total(), sum(rates.tokens_per_s.values())),
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
            work_tokens=sum(one.num_tokens for one in rates.adapters),
            step=rates.steps,
            steps_per_s=rates.steps_per_s,
            tokens_per_step=rates.tokens_per_step,
            events=tuple(self._events),
        )

    def _note_events(self, time_s: float, *, is_first: bool) -> None:
        """Records the changes of the pool since the last observation as events. The first observation records none."""
        loaded = {one.version for one in self._scheduler.paging.residency if one.is_loaded}
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
