"""Quota counters that several hosts share: accounts and reservations in one Redis.

    slora:quota:{<tenant>}:<key id>        hash: an account. `r:<second>` and `t:<second>` are charges by second, and
                                           the other fields are those of `Account`. The tenant has an empty key id.
    slora:quota:{<tenant>}:reservations    hash: id -> its accounts, second, day, month, requests, tokens, answers
    slora:quota:{<tenant>}:leases          sorted set: id -> when its lease ends

One script (`redis_counters.lua`) makes every change, so a reservation is atomic. It uses the time of Redis. Each
process renews the leases of its reservations. The next call for a tenant refunds reservations whose lease has ended.
Keys expire a day after their last use. An account with a budget is then seeded again.

While Redis does not answer, each host uses its own counters (`HostCounters`), so the limits apply to each host
separately. A process tries Redis again every second. When Redis answers again, each process first carries the use of
its own requests to Redis, in the seconds in which it reserved them. It does the same for requests whose lease ended
during the outage.

The module needs the package redis, so only the composition root loads it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import NO_QUOTA
from slora_api.quotas.quota_counters import (
    BUCKETS,
    Charge,
    NotSeeded,
    Obstacle,
    Refusal,
    Reservation,
    Subject,
    Use,
)

logger = logging.getLogger(__name__)

_LEASE_S = 20.0
_RENEW_S = 5.0
_TIMEOUT_S = 1.0
_PAUSE_S = 1.0

_SCRIPT = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Handle:
    """A reservation in Redis, made at the monotonic second `second`."""

    subjects: tuple[Subject, ...]
    second: int
    reservation_id: str

    @property
    def tenant(self) -> str:
        return self.subjects[0].tenant


@dataclass(frozen=True, slots=True)
class _HostHandle:
    """A reservation that was made in the host's counters at the monotonic second `second`."""

    subjects: tuple[Subject, ...]
    second: int
    made: Reservation


@dataclass(frozen=True, slots=True)
class _Settlement:
    """The end of a reservation in Redis. was_sent: whether Redis may have made it, although no answer came."""

    handle: _Handle
    charge: Charge
    used_tokens: int
    counts: bool
    was_sent: bool = False


class _HostUse:
    """What the requests of this process used without a reservation in Redis. Its size does not grow with an outage."""

    def __init__(self) -> None:
        # Tenant and key id -> monotonic second -> requests and tokens.
        self._accounts: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}

    def add(self, handle: _Handle | _HostHandle, requests: int, tokens: int) -> None:
        oldest = int(time.monotonic()) - BUCKETS
        for subject in handle.subjects:
            seconds = self._accounts.setdefault((subject.tenant, subject.key_id), {})
            seconds[handle.second] = _add_up([seconds.get(handle.second, (0, 0)), (requests, tokens)])
            # Uses that no limit per minute counts any more become one use of the last of their seconds.
            if late := [second for second in seconds if second < oldest]:
                seconds[max(late)] = _add_up([seconds.pop(second) for second in late])

    def accounts(self) -> list[tuple[str, str]]:
        return list(self._accounts)

    def take(self, account: tuple[str, str]) -> list[int]:
        """Removes the uses of an account. Returns the age in seconds, the requests and the tokens of each.

        They are removed before they are carried to Redis, so that no use counts twice if the answer is lost.
        """
        now = int(time.monotonic())
        seconds = self._accounts.pop(account)
        return [number for second, use in seconds.items() for number in (now - second, *use)]


def open_redis_counters(url: str, host: HostCounters) -> "RedisCounters":
    """Returns counters in the Redis at `url`, which need not answer yet. host: the counters to use while Redis does not
    answer.
    """
    client = redis.asyncio.Redis.from_url(
        url, socket_connect_timeout=_TIMEOUT_S, socket_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    )
    return RedisCounters(client, host)


class RedisCounters:
    """Implements `QuotaCounters`. clock_ms: Unix time in milliseconds; None uses the clock of Redis."""

    def __init__(
        self,
        client: "redis.asyncio.Redis[bytes]",
        host: HostCounters,
        clock_ms: Callable[[], int] | None = None,
        lease_s: float = _LEASE_S,
    ) -> None:
        self._client = client
        self._host = host
        self._clock_ms = clock_ms
        self._lease_ms = int(lease_s * 1000)
        self._script = client.register_script(_SCRIPT)
        self.is_away = False
        # The open reservations of this process.
        self._open: set[_Handle] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._host_use = _HostUse()
        # Reservations that were open when Redis went away and ended meanwhile, and reservations whose answer was lost,
        # so that Redis may hold them although the host served the request.
        self._unsettled: list[_Settlement] = []

    async def reserve(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        # If the client hangs up during the call, the script still runs, and the reservation that it makes has to be
        # refunded.
        task = asyncio.create_task(self._reserve(subjects, charge))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._return_unwanted)
            raise

    def _return_unwanted(self, task: "asyncio.Task[Reservation | Refusal | NotSeeded]") -> None:
        if (
            not task.cancelled()
            and task.exception() is None
            and isinstance(made := task.result(), Reservation)
        ):
            self.settle(made, 0, counts=False)

    async def _reserve(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        if self.is_away:
            return await self._reserve_on_host(subjects, charge)
        handle = _Handle(subjects, int(time.monotonic()), uuid.uuid4().hex)
        limits = [limit for subject in subjects for limit in _limits(subject)]
        values = (handle.reservation_id, charge.requests, charge.tokens, charge.answers, *limits)
        try:
            found, unseeded, uses = await self._run("reserve", subjects, values)
        except redis.RedisError as error:
            self._leave(error)
            self._unsettled.append(_Settlement(handle, charge, 0, counts=False, was_sent=True))
            return await self._reserve_on_host(subjects, charge)
        if unseeded:
            return NotSeeded(tuple(subjects[position - 1] for position in unseeded))
        shown = _uses(uses)
        if not found:
            self._open.add(handle)
            return Reservation(charge, shown, handle)
        obstacles = (
            Obstacle(subjects[position - 1], field.decode(), wait_ms if wait_ms >= 0 else None)
            for position, field, wait_ms in found
        )
        return Refusal(tuple(obstacles), shown)

    async def _reserve_on_host(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        made = await self._host.reserve(subjects, charge)
        if not isinstance(made, Reservation):
            return made
        return replace(made, handle=_HostHandle(subjects, int(time.monotonic()), made))

    def settle(self, reservation: Reservation, used_tokens: int, *, counts: bool = True) -> None:
        handle = reservation.handle
        if isinstance(handle, _HostHandle):
            self._host.settle(handle.made, used_tokens, counts=counts)
            self._host_use.add(handle, reservation.charge.requests if counts else 0, used_tokens)
            return
        assert isinstance(handle, _Handle)
        self._open.discard(handle)
        settlement = _Settlement(handle, reservation.charge, used_tokens, counts)
        task = asyncio.create_task(self._settle(settlement))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def release(self, process: int) -> None:
        self._host.release(process)  # In Redis, the leases of the process expire.

    async def read(self, subjects: tuple[Subject, ...]) -> tuple[Use, ...]:
        if not self.is_away:
            try:
                return _uses((await self._run("read", subjects))[2])
            except redis.RedisError as error:
                self._leave(error)
        return await self._host.read(subjects)

    async def seed(self, subject: Subject, tokens_today: int, tokens_this_month: int) -> None:
        if not self.is_away:
            try:
                await self._run("seed", (subject,), (tokens_today, tokens_this_month))
                return
            except redis.RedisError as error:
                self._leave(error)
        await self._host.seed(subject, tokens_today, tokens_this_month)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S if self.is_away else _RENEW_S)
            await self._renew()

    async def close(self) -> None:
        for handle in tuple(self._open):
            await self._settle(_Settlement(handle, Charge(0, 0), 0, counts=True))
        self._open.clear()
        await asyncio.gather(*self._settling)
        await self._renew()
        await self._client.aclose()
        await self._host.close()

    async def _settle(self, settlement: _Settlement) -> None:
        if self.is_away:
            self._unsettled.append(settlement)
            return
        try:
            await self._run_settle(settlement)
        except redis.RedisError as error:
            self._leave(error)
            self._unsettled.append(replace(settlement, was_sent=True))

    async def _run_settle(self, settlement: _Settlement) -> None:
        handle = settlement.handle
        values = (handle.reservation_id, settlement.used_tokens, int(settlement.counts))
        (found, *_) = await self._run("settle", (Subject(handle.tenant, "", NO_QUOTA),), values)
        if not found and not settlement.was_sent:
            # The lease ended during an outage, which returned the tokens and kept the request.
            requests = 0 if settlement.counts else -settlement.charge.requests
            self._host_use.add(handle, requests, settlement.used_tokens)

    async def _renew(self) -> None:
        """Renews the leases of this process. Finds out whether Redis answers again."""
        by_tenant: dict[str, list[str]] = {}
        for handle in self._open:
            by_tenant.setdefault(handle.tenant, []).append(handle.reservation_id)
        try:
            await _unless_cancelled(self._client.ping())
            for tenant, ids in by_tenant.items():
                for start in range(0, len(ids), 1000):
                    await self._run("renew", (Subject(tenant, "", NO_QUOTA),), ids[start : start + 1000])
            while self._unsettled:
                # Others may be appended during the call.
                settlement = self._unsettled.pop()
                try:
                    await self._run_settle(settlement)
                except redis.RedisError:
                    self._unsettled.append(replace(settlement, was_sent=True))
                    raise
            for account in self._host_use.accounts():
                await self._run("carry", (Subject(*account, NO_QUOTA),), self._host_use.take(account))
        except redis.RedisError as error:
            self._leave(error)
            return
        if self.is_away:
            logger.warning("the Redis of quotas answers again, so limits hold for all hosts together")
            self.is_away = False

    async def _run(self, operation: str, subjects: tuple[Subject, ...], values: Iterable[Any] = ()) -> Any:
        space = f"slora:quota:{{{subjects[0].tenant}}}:"
        accounts = [f"{space}{subject.key_id}" for subject in subjects]
        now = "" if self._clock_ms is None else self._clock_ms()
        return await _unless_cancelled(
            self._script(
                keys=[f"{space}leases", f"{space}reservations", *accounts],
                args=[operation, now, self._lease_ms, *values],
            )
        )

    def _leave(self, error: redis.RedisError) -> None:
        if not self.is_away:
            logger.error(
                "the Redis of quotas does not answer, so until it does, limits hold for each host by itself: %s",
                error,
            )
        self.is_away = True


async def _unless_cancelled(call: Coroutine[Any, Any, Any]) -> Any:
    """Awaits a call of redis-py. A cancellation ends the wait, but not the call: redis-py can lose a cancellation, and
    a cancelled task would then never end.
    """
    return await asyncio.shield(asyncio.ensure_future(call))


def _add_up(uses: Iterable[tuple[int, int]]) -> tuple[int, int]:
    requests, tokens = zip(*uses, strict=True)
    return sum(requests), sum(tokens)


def _limits(subject: Subject) -> Iterable[int | str]:
    quota = subject.quota
    limits = (
        quota.requests_per_minute,
        quota.tokens_per_minute,
        quota.tokens_per_day,
        quota.tokens_per_month,
        quota.concurrent_answers,
    )
    return ("" if limit is None else limit for limit in limits)


def _uses(rows: Iterable[Iterable[int]]) -> tuple[Use, ...]:
    return tuple(Use(*row) for row in rows)
