"""The quota counters of both kinds on a clock of the test, for tests of their contract."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio

from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota_counters import QuotaCounters
from slora_api.quotas.redis_counters import RedisCounters

# 30 January 2026, 23:59:00 UTC: a day ends a minute later, and a month a day later.
START_S = 1_769_817_540


@dataclass
class Clock:
    """Milliseconds since the start, as a test sets them. name: of the host that the clock belongs to."""

    now_ms: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def monotonic_ns(self) -> int:
        return 10**12 + self.now_ms * 10**6

    def utc(self) -> float:
        return START_S + self.now_ms / 1000

    def utc_ms(self) -> int:
        return START_S * 1000 + self.now_ms


@dataclass
class CountersPlace:
    """Opens counters. A second call with the same clock opens the same counters, as another process would. lease_s:
    only Redis has leases that end by time."""

    runner: asyncio.Runner
    make: Callable[[Clock, float], QuotaCounters]

    def __call__(self, clock: Clock, lease_s: float = 1e6) -> QuotaCounters:
        return self.make(clock, lease_s)


@contextmanager
def counters_place(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[CountersPlace]:
    """kind: host or redis. folder: for the file of a host. Each place starts empty."""
    space = folder / uuid.uuid4().hex
    space.mkdir()

    opened: Counter[str] = Counter()

    def host(clock: Clock, name: str) -> HostCounters:
        sizes = {"max_accounts": 64, "max_reservations": 64}
        opened[name] += 1
        number = opened[name] - 1
        return HostCounters(space / name, number, clock_ns=clock.monotonic_ns, utc=clock.utc, **sizes)

    if kind == "host":
        with asyncio.Runner() as runner:
            yield CountersPlace(runner, lambda clock, lease_s: host(clock, clock.name))
        return
    url = request.getfixturevalue("shared_redis").url

    def over_redis(clock: Clock, lease_s: float) -> RedisCounters:
        client = redis.asyncio.Redis.from_url(url)
        return RedisCounters(client, host(clock, uuid.uuid4().hex), clock.utc_ms, lease_s)

    with asyncio.Runner() as runner:
        request.getfixturevalue("shared_redis").client().flushall()
        yield CountersPlace(runner, over_redis)
