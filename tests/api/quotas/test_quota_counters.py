"""The contract of quota counters: a plain model decides what each of them must answer."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slora_api.core.data_dir import DataDir
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import Quota
from slora_api.quotas.quota_counters import Charge, NotSeeded, QuotaCounters, Refusal, Reservation, Subject
from slora_api.quotas.redis_counters import RedisCounters, open_redis_counters
from slora_api.quotas.routes import open_counters
from tests.api.quotas.quota_places import START_S, Clock, CountersPlace, counters_place
from tests.redis_server import RedisServer
from tests.support.file_limit import largest_file

TENANT = Quota(requests_per_minute=6, tokens_per_minute=100, concurrent_answers=5)
KEY = Quota(requests_per_minute=4, tokens_per_minute=70, tokens_per_day=150, tokens_per_month=250)


@pytest.fixture(params=["host", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CountersPlace]:
    with counters_place(request.param, tmp_path, request) as opened:
        yield opened


@dataclass
class Charged:
    """A request that the model has admitted. used: its tokens at present."""

    subjects: tuple[Subject, ...]
    charge: Charge
    at_ms: int
    used: int
    requests: int
    reservation: Reservation
    process: int
    is_open: bool = True


@dataclass
class Model:
    """Decides by adding up every charge again."""

    clock: Clock
    charged: list[Charged] = field(default_factory=list)

    def of(self, subject: Subject) -> list[Charged]:
        return [one for one in self.charged if subject.account in [own.account for own in one.subjects]]

    def window(self, subject: Subject, unit: str, now_ms: int) -> int:
        recent = (one for one in self.of(subject) if now_ms // 1000 - one.at_ms // 1000 <= 60)
        return sum(getattr(one, unit) for one in recent)

    def period(self, subject: Subject, form: str) -> int:
        def period_of(ms: int) -> str:
            return datetime.fromtimestamp(START_S + ms // 1000, UTC).strftime(form)

        now = period_of(self.clock.now_ms)
        return sum(one.used for one in self.of(subject) if period_of(one.at_ms) == now)

    def answers(self, subject: Subject) -> int:
        return sum(one.charge.answers for one in self.of(subject) if one.is_open)

    def obstacles(self, subjects: tuple[Subject, ...], charge: Charge) -> set[tuple[str, str, int | None]]:
        found: set[tuple[str, str, int | None]] = set()
        now_ms = self.clock.now_ms
        for subject in subjects:
            quota = subject.quota
            for name, unit, added in (
                ("requests_per_minute", "requests", charge.requests),
                ("tokens_per_minute", "used", charge.tokens),
            ):
                limit = getattr(quota, name)
                waits = (
                    wait
                    for wait in (0, *((now_ms // 1000 + step) * 1000 - now_ms for step in range(1, 62)))
                    if self.window(subject, unit, now_ms + wait) + added <= limit
                )
                if limit is not None and added and (wait := next(waits)):
                    found.add((subject.account, name, wait))
            for name, used, added in (
                ("tokens_per_day", self.period(subject, "%F"), charge.tokens),
                ("tokens_per_month", self.period(subject, "%Y %m"), charge.tokens),
                ("concurrent_answers", self.answers(subject), charge.answers),
            ):
                limit = getattr(quota, name)
                if limit is not None and used + added > limit:
                    found.add((subject.account, name, None))
        return found


class Counting(RuleBasedStateMachine):
    """Two processes with one tenant and two keys. `place` is set by the test."""

    place: CountersPlace
    number = 0

    def __init__(self) -> None:
        super().__init__()
        Counting.number += 1
        self.clock = Clock()
        self.model = Model(self.clock)
        self.tenant = f"acme{Counting.number}"
        self.processes = [self.place(self.clock) for _ in range(2)]
        self.run = self.place.runner.run
        self.reader = 0

    def subjects(self, key: int) -> tuple[Subject, ...]:
        tenant = Subject(self.tenant, "", TENANT)
        return (tenant,) if key == 0 else (tenant, Subject(self.tenant, f"key{key}", KEY))

    @rule(
        process=st.integers(0, 1), key=st.integers(0, 2), tokens=st.integers(1, 70), answers=st.integers(1, 3),
        requests=st.integers(0, 1),
    )  # fmt: skip
    def reserve(self, process: int, key: int, tokens: int, answers: int, requests: int) -> None:
        subjects, charge = self.subjects(key), Charge(tokens, answers, requests)
        made = self.run(self.processes[process].reserve(subjects, charge))
        if isinstance(made, NotSeeded):
            assert [one.key_id for one in made.subjects] == [f"key{key}"]
            self.run(self.processes[process].seed(made.subjects[0], 0, 0))
            made = self.run(self.processes[process].reserve(subjects, charge))
        expected = self.model.obstacles(subjects, charge)
        if isinstance(made, Refusal):
            assert {(one.subject.account, one.field, one.wait_ms) for one in made.obstacles} == expected
            return
        assert isinstance(made, Reservation) and not expected
        self.model.charged.append(
            Charged(subjects, charge, self.clock.now_ms, tokens, requests, made, process)
        )

    @precondition(lambda self: any(one.is_open for one in self.model.charged))
    @rule(chosen=st.integers(0, 100), part=st.floats(0, 1), counts=st.booleans())
    def settle(self, chosen: int, part: float, counts: bool) -> None:
        still_open = [one for one in self.model.charged if one.is_open]
        one = still_open[chosen % len(still_open)]
        one.is_open = False
        one.used = int(one.charge.tokens * part)
        one.requests = one.charge.requests if counts else 0
        process = self.processes[one.process]

        async def settle() -> None:
            process.settle(one.reservation, one.used, counts=counts)
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # what Redis is told

        self.run(settle())

    @rule(ms=st.sampled_from([1, 400, 1000, 7300, 30_000, 59_999, 61_000, 3_600_000]))
    def wait(self, ms: int) -> None:
        self.clock.now_ms += ms

    @invariant()
    def uses_are_those_of_the_model(self) -> None:
        self.reader = 1 - self.reader
        subjects, model, now_ms = (*self.subjects(1), self.subjects(2)[1]), self.model, self.clock.now_ms
        for subject, use in zip(subjects, self.run(self.processes[self.reader].read(subjects)), strict=True):
            assert (use.requests, use.tokens, use.answers, use.tokens_today, use.tokens_this_month) == (
                model.window(subject, "requests", now_ms),
                model.window(subject, "used", now_ms),
                model.answers(subject),
                model.period(subject, "%F"),
                model.period(subject, "%Y %m"),
            )

    def teardown(self) -> None:
        for process in self.processes:
            self.run(process.close())


def test_counters_answer_as_a_model_that_adds_up_every_charge(place: CountersPlace, soak: bool) -> None:
    machine = type("CountingHere", (Counting,), {"place": place})
    sizes = settings(max_examples=300 if soak else 8, stateful_step_count=60)
    run_state_machine_as_test(machine, settings=sizes)


def use_of(place: CountersPlace, counters: QuotaCounters, subject: Subject) -> tuple[int, int, int]:
    (use,) = place.runner.run(counters.read((subject,)))
    return use.requests, use.tokens, use.answers


def test_a_process_that_ends_returns_its_reservations(place: CountersPlace) -> None:
    clock, subject = Clock(), Subject("acme", "", Quota(tokens_per_minute=100))
    ended, other = place(clock), place(clock)
    place.runner.run(ended.reserve((subject,), Charge(80, 2)))
    assert use_of(place, other, subject) == (1, 80, 2)
    place.runner.run(ended.close())
    assert use_of(place, other, subject) == (1, 0, 0)
    place.runner.run(other.close())


@pytest.fixture
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CountersPlace]:
    with counters_place("host", tmp_path, request) as opened:
        yield opened


def test_a_released_process_keeps_nothing_and_the_others_keep_theirs(host: CountersPlace) -> None:
    clock, subject = Clock(), Subject("acme", "", Quota(tokens_per_minute=100))
    main, dead, other = host(clock), host(clock), host(clock)
    made = host.runner.run(dead.reserve((subject,), Charge(50, 2)))
    host.runner.run(other.reserve((subject,), Charge(30, 1)))
    assert use_of(host, main, subject) == (2, 80, 3)
    main.release(1)
    assert use_of(host, main, subject) == (2, 30, 1)
    # The process was only stopped, and goes on. Its place belongs to another reservation now.
    host.runner.run(other.reserve((subject,), Charge(40, 1)))
    assert isinstance(made, Reservation)
    dead.settle(made, 10)
    assert use_of(host, main, subject) == (3, 70, 2)
    for process in (other, main):
        host.runner.run(process.close())


def test_a_restart_keeps_the_windows_and_returns_what_was_reserved(tmp_path: Path) -> None:
    subject = Subject("acme", "", Quota(tokens_per_minute=100))

    async def run() -> None:
        for process in (0, 1):
            killed = HostCounters(tmp_path / "quotas", process)
            made = await killed.reserve((subject,), Charge(20, 1))
            assert isinstance(made, Reservation)
            killed.settle(made, 15)
            assert isinstance(await killed.reserve((subject,), Charge(20, 1)), Reservation)
        restarted = HostCounters(tmp_path / "quotas")
        (use,) = await restarted.read((subject,))
        assert (use.requests, use.tokens, use.answers) == (4, 30, 0)
        await restarted.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3", bytes(1 << 23)], ids=["empty", "other", "zeros"]
)
def test_a_foreign_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    path, subject = tmp_path / "quotas", Subject("acme", "", Quota(tokens_per_minute=100))
    path.write_bytes(content)

    async def run() -> None:
        main, worker = HostCounters(path), HostCounters(path, 1)
        assert isinstance(await worker.reserve((subject,), Charge(30, 1)), Reservation)
        (use,) = await main.read((subject,))
        assert use.tokens == 30, "both count in the new file"
        await worker.close()
        await main.close()

    asyncio.run(run())


def test_processes_count_for_themselves_if_the_file_cannot_be_created(tmp_path: Path) -> None:
    """A worker creates no file: other workers would not see it."""
    path, subject = tmp_path / "quotas", Subject("acme", "", Quota(tokens_per_minute=100))

    async def run() -> None:
        with largest_file(16_000):
            main = HostCounters(path)
        worker = HostCounters(path, 1)
        assert isinstance(await worker.reserve((subject,), Charge(30, 1)), Reservation)
        (own,), (others,) = await worker.read((subject,)), await main.read((subject,))
        assert (own.tokens, others.tokens) == (30, 0)
        assert not list(tmp_path.iterdir())
        await worker.close()
        await main.close()

    asyncio.run(run())


def test_seeding_never_lowers_what_the_counters_have(place: CountersPlace) -> None:
    clock, subject = Clock(), Subject("acme", "", Quota(tokens_per_day=100, tokens_per_month=1000))
    counters = place(clock)
    run = place.runner.run
    assert run(counters.reserve((subject,), Charge(10, 1))) == NotSeeded((subject,))
    run(counters.seed(subject, 40, 400))
    assert isinstance(run(counters.reserve((subject,), Charge(60, 1))), Reservation)
    run(counters.seed(subject, 50, 500))
    (use,) = run(counters.read((subject,)))
    assert (use.tokens_today, use.tokens_this_month, use.reserved_tokens) == (100, 500, 60)
    assert isinstance(run(counters.reserve((subject,), Charge(1, 1))), Refusal)
    clock.now_ms = 60_000  # the next day
    assert isinstance(run(counters.reserve((subject,), Charge(100, 1))), Reservation)
    run(counters.close())


def test_reservations_of_a_process_that_stops_renewing_its_lease_are_returned(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with counters_place("redis", tmp_path, request) as place:
        clock, subject = Clock(), Subject("acme", "", Quota(tokens_per_minute=100))
        dead, other = place(clock, 20.0), place(clock, 20.0)
        reservation = place.runner.run(dead.reserve((subject,), Charge(80, 2)))
        clock.now_ms += 19_999
        assert use_of(place, other, subject) == (1, 80, 2)
        clock.now_ms += 1
        assert use_of(place, other, subject) == (1, 0, 0)

        async def settle_late() -> None:
            assert isinstance(reservation, Reservation)
            dead.settle(reservation, 30)
            await dead.close()

        place.runner.run(settle_late())
        assert use_of(place, other, subject) == (1, 30, 0), "the use of a late settlement counts"
        place.runner.run(other.close())


def test_a_host_counts_for_itself_while_redis_is_away(tmp_path: Path, redis_server: RedisServer) -> None:
    subject = Subject("acme", "", Quota(requests_per_minute=2))

    async def admitted(counters: QuotaCounters) -> bool:
        made = await counters.reserve((subject,), Charge(1, 1))
        if isinstance(made, Reservation):
            counters.settle(made, 1)
        return isinstance(made, Reservation)

    async def run() -> None:
        hosts = [open_redis_counters(redis_server.url, HostCounters(tmp_path / name)) for name in "ab"]
        renewing = [asyncio.create_task(host.run()) for host in hosts]
        assert [await admitted(host) for host in (*hosts, *hosts)] == [True, True, False, False]
        redis_server.stop()
        # Each host has its own two requests now.
        assert [await admitted(host) for host in (*hosts, *hosts, *hosts)] == [True] * 4 + [False] * 2
        redis_server.start()
        while any(host.is_away for host in hosts):
            await asyncio.sleep(0.05)
        assert not await admitted(hosts[0]), "Redis still has the charges from before"
        for task in renewing:
            task.cancel()
        await asyncio.gather(*renewing, return_exceptions=True)
        for host in hosts:
            await host.close()

    asyncio.run(run())


def test_the_use_of_a_host_while_redis_hung_counts_for_all_hosts_afterwards(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Born from bugs: after a Redis had hung, 38 of 20 requests were admitted within a minute, and what a request that
    ended meanwhile had used was returned."""
    subjects = (Subject("acme", "", Quota(requests_per_minute=20)), Subject("acme", "key", Quota()))

    async def count_admitted(counters: QuotaCounters, num_requests: int) -> int:
        count = 0
        for _ in range(num_requests):
            made = await counters.reserve(subjects, Charge(10, 1))
            if isinstance(made, Reservation):
                count += 1
                counters.settle(made, 3)
        return count

    async def run() -> None:
        first, second = (
            open_redis_counters(redis_server.url, HostCounters(tmp_path / name)) for name in "ab"
        )
        renewing = [asyncio.create_task(host.run()) for host in (first, second)]
        assert await count_admitted(first, 2) == 2
        long, never_sent = [await first.reserve(subjects, Charge(10, 1)) for _ in range(2)]
        assert isinstance(long, Reservation) and isinstance(never_sent, Reservation)
        busy = (Subject("busy", "", Quota()),)

        def settle_busy(reservations: Iterable[Reservation]) -> None:
            for reservation in reservations:
                first.settle(reservation, reservation.charge.tokens)

        others = [await first.reserve(busy, Charge(tokens, 1)) for tokens in range(1, 801)]
        with redis_server.hanging():
            assert await count_admitted(first, 30) == 20, "the host counts for itself"
            first.settle(long, 5)
            first.settle(never_sent, 0, counts=False)
            settle_busy(others[:100])
        # Some requests end while the settlements of others are sent.
        rest = others[100:]
        while first.is_away:
            is_sending = (await second.read(busy))[0].answers < len(others)
            if rest and is_sending:
                settle_busy([rest.pop()])
            await asyncio.sleep(0 if is_sending else 0.01)
        settle_busy(rest)
        while (of_busy := (await second.read(busy))[0]).answers:
            await asyncio.sleep(0.05)
        assert (of_busy.requests, of_busy.tokens, of_busy.reserved_tokens) == (800, 800 * 801 // 2, 0)
        assert await count_admitted(second, 30) == 0
        (use, of_key) = await second.read(subjects)
        assert (use.requests, use.tokens, use.tokens_today, use.answers) == (23, 71, 71, 0)
        assert (of_key.requests, of_key.tokens) == (23, 71)
        for task in renewing:
            task.cancel()
        await asyncio.gather(*renewing, return_exceptions=True)
        for host in (first, second):
            await host.close()

    asyncio.run(run())


def test_only_a_redis_can_be_the_quota_redis(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"--quota-redis must be the URL of a Redis \(redis://, .*, not 'http'$"
    ):
        open_counters(DataDir(tmp_path), "http://slora:secret@x", 0)
    assert isinstance(open_counters(DataDir(tmp_path), "", 0), HostCounters)
    # It need not answer yet.
    assert isinstance(open_counters(DataDir(tmp_path), "redis://127.0.0.1:1/0", 0), RedisCounters)


def test_a_client_that_hangs_up_while_redis_is_asked_leaves_nothing_reserved(
    tmp_path: Path, shared_redis: RedisServer
) -> None:
    subject = Subject("hung-up", "", Quota(tokens_per_minute=100))

    async def run() -> None:
        counters = open_redis_counters(shared_redis.url, HostCounters(tmp_path / "quotas"))
        for turns in range(40):
            task = asyncio.create_task(counters.reserve((subject,), Charge(80, 1)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            made, *_ = await asyncio.gather(task, return_exceptions=True)
            if isinstance(made, Reservation):
                counters.settle(made, 0, counts=False)
            while (await counters.read((subject,)))[0].answers:
                await asyncio.sleep(0.001)
        (use,) = await counters.read((subject,))
        assert (use.requests, use.tokens, use.reserved_tokens) == (0, 0, 0)
        await counters.close()

    asyncio.run(run())
