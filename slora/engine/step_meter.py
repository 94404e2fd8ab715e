"""Measures the steps of the engine while a console watches it: tokens, times, and which adapters they used.

While no console watches, nothing is recorded and steps have no extra cost.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from slora.core.live_state import AdapterWork, Quantiles
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan

# Steps are recorded for this time after a console last asked. A console asks several times a second.
_WATCHED_S = 5.0
# Rates are averages over the last `_NUM_PERIODS` periods.
_PERIOD_S, _NUM_PERIODS = 0.25, 12
# Quantiles cover the last `_RECENT_S` seconds, but at most these numbers of tokens, intervals and steps.
_RECENT_S = 20.0
_MAX_FIRST_TOKENS, _MAX_INTERVALS, _MAX_STEPS = 1024, 2048, 1024


class StepRates(NamedTuple):
    """The rates and times of recent steps.

    tokens_per_s: generated tokens, by tenant. adapters: in descending order of their computed tokens.
    tokens_per_step: computed tokens. steps: times of the steps.
    first_tokens, intervals: times by tenant. The key "" holds the times of all tenants together.
    """

    tokens_per_s: Mapping[str, float]
    adapters: Sequence[AdapterWork]
    steps_per_s: float
    tokens_per_step: float
    steps: Quantiles | None
    first_tokens: Mapping[str, Quantiles]
    intervals: Mapping[str, Quantiles]


@dataclass(slots=True)
class _Period:
    """The counts of one period.

    tokens: generated tokens, by tenant. work: computed tokens, by tenant and digest. num_tokens: all computed
        tokens.
    """

    begins_at: float
    num_steps: int = 0
    num_tokens: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    work: Counter[tuple[str, str]] = field(default_factory=Counter)


class StepMeter:
    """Records steps while they are watched. All times are seconds of a monotonic clock."""

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

    def record(self, plan: StepPlan, sampled: list[SampledToken], step_s: float, now: float) -> None:
        """Records a computed step, before it is postprocessed. Tokens that arrive together count as one interval.

        sampled: one entry for each entry of each chunk's `sampled_sequences`, in order.
        """
        if not plan.chunks:
            return
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
        recent = [one for one in self._periods if one.begins_at > now - _PERIOD_S * _NUM_PERIODS]
        seconds = max(now - recent[0].begins_at, _PERIOD_S) if recent else 1.0
        tokens = sum((one.tokens for one in recent), Counter[str]())
        work = sum((one.work for one in recent), Counter[tuple[str, str]]())
        num_steps = sum(one.num_steps for one in recent)
        return StepRates(
            {tenant: count / seconds for tenant, count in tokens.items()},
            [AdapterWork(tenant, digest, count) for (tenant, digest), count in work.most_common()],
            num_steps / seconds,
            sum(one.num_tokens for one in recent) / max(num_steps, 1),
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
