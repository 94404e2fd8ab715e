"""The usage ledger in both databases: each request once, and sums that equal the records."""

import math
import random
import threading
from contextlib import closing
from dataclasses import replace
from itertools import permutations, product

import pytest
from sqlalchemy import func, select

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_api.usage.usage_ledger import (
    DAY_S,
    HOUR_S,
    MINUTE_S,
    BatchUsage,
    UsageFilter,
    UsageLedger,
    UsageRow,
)

# A Sunday, 30 s before midnight.
NOW = 1_700_956_770.0
ALL_TIME = {"start": 0, "end": 1 << 40}


@pytest.fixture
def ledger(database: Database) -> UsageLedger:
    return UsageLedger(database)


def record(
    request_id: str, ended_at: float = NOW, tenant: str = "acme", key: str = "k1", adapter: str | None = None
) -> UsageRecord:
    return UsageRecord(request_id, tenant, key, adapter, ended_at, RequestUsage(10, 4, 7, 100, 0.5))


def random_records(count: int) -> list[UsageRecord]:
    """Records of three days."""
    draw = random.Random(1)
    return [
        UsageRecord(
            f"{number:08x}",
            draw.choice(["acme", "beta"]),
            draw.choice(["k1", "k2"]),
            draw.choice([None, "a" * 64, "b" * 64]),
            NOW + draw.random() * 3 * DAY_S,
            RequestUsage(*(draw.randrange(1000) for _ in range(4)), draw.randrange(1000) / 1024),
        )
        for number in range(count)
    ]


def test_a_record_that_is_sent_again_is_counted_once(ledger: UsageLedger) -> None:
    one, two = record("1"), record("2")
    assert ledger.add([one, one]) == 1
    assert ledger.add([one, two]) == 1
    assert ledger.add([two, one]) == 0
    for width in (MINUTE_S, HOUR_S, DAY_S):
        (row,) = ledger.read(UsageFilter(width, **ALL_TIME), None, 10)
        assert (row.start, row.num_requests) == (NOW // width * width, 2)
        assert row.usage == RequestUsage(20, 8, 14, 200, 1.0)


def test_sums_equal_the_records_at_every_width(ledger: UsageLedger, database: Database) -> None:
    kept = random_records(200)
    sent = [*kept, *kept[::3], *kept[::-1]]
    assert sum(ledger.add(sent[at : at + 57]) for at in range(0, len(sent), 57)) == len(kept)
    assert len(database.read(schema.usage_records.select())) == len(kept)
    for width in (MINUTE_S, HOUR_S, DAY_S):
        rows = ledger.read(
            UsageFilter(width, **ALL_TIME, group_by=("tenant", "key_id", "adapter")), None, 10_000
        )
        expected: dict[tuple[object, ...], list[UsageRecord]] = {}
        for one in kept:
            start = one.ended_at // width * width
            expected.setdefault((start, one.tenant, one.account, one.adapter_digest or ""), []).append(one)
        assert [row.key(("tenant", "key_id", "adapter")) for row in rows] == sorted(expected)
        for row in rows:
            parts = [one.usage for one in expected[row.key(("tenant", "key_id", "adapter"))]]
            assert row.num_requests == len(parts)
            for name in (
                "prompt_tokens",
                "cached_tokens",
                "generated_tokens",
                "adapter_bytes",
                "page_seconds",
            ):
                assert getattr(row.usage, name) == sum(getattr(one, name) for one in parts)


def test_a_request_counts_once_with_its_largest_usage_in_every_order_of_its_records(
    database_place: str,
) -> None:
    """An engine that loses its connection records a part of the usage. The whole was once dropped after the part."""
    parts = [
        replace(record("r"), usage=RequestUsage(10, 0, 3, 0, 9.0), is_batch=True),
        replace(record("r", NOW + 5), usage=RequestUsage(10, 4, 7, 100, 0.5), is_batch=True),
        replace(
            record("r", NOW + 90), usage=RequestUsage(10, 4, 7, 0, 0.0), is_complete=False, is_batch=True
        ),
    ]
    with closing(Database(database_place)) as database:
        ledger = UsageLedger(database)
        for number, order in enumerate(permutations(parts)):
            sent = [replace(one, request_id=f"r{number}", tenant=f"t{number}") for one in order]
            for batch in ([sent[0]], sent[1:], sent, [sent[2]]):
                ledger.add(batch)
            for width in (MINUTE_S, HOUR_S, DAY_S):
                rows = ledger.read(UsageFilter(width, **ALL_TIME, tenant=f"t{number}"), None, 10)
                assert [(row.num_requests, row.usage, row.batch) for row in rows] == [
                    (1, parts[1].usage, BatchUsage(1, 10, 7))
                ]
            assert ledger.used_tokens(f"t{number}", None, NOW) == 17
        kept = database.read(schema.usage_records.select())
        assert len(kept) == 6 and all(row.is_complete and row.generated_tokens == 7 for row in kept)


def test_processes_that_send_the_same_records_at_once_count_each_once(database_place: str) -> None:
    records = [record(f"{number:04x}", key=f"k{number % 7}") for number in range(300)]
    failed: list[BaseException] = []

    def send(seed: int) -> None:
        mine = records.copy()
        random.Random(seed).shuffle(mine)
        try:
            with closing(Database(database_place)) as own:
                for at in range(0, len(mine), 100):
                    UsageLedger(own).add(mine[at : at + 100])
        except BaseException as error:
            failed.append(error)

    Database(database_place).close()
    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with closing(Database(database_place)) as database:
        (row,) = UsageLedger(database).read(UsageFilter(DAY_S, **ALL_TIME), None, 10)
        assert (row.num_requests, row.usage.prompt_tokens) == (300, 3000)


def test_a_tenant_is_read_apart_and_grouped_as_asked(ledger: UsageLedger) -> None:
    digest = "a" * 64
    ledger.add([record("1"), record("2", key="k2", adapter=digest), record("3", tenant="beta")])
    own = UsageFilter(DAY_S, **ALL_TIME, tenant="acme")
    assert [row.num_requests for row in ledger.read(own, None, 10)] == [2]
    grouped = UsageFilter(DAY_S, **ALL_TIME, tenant="acme", group_by=("key_id", "adapter"))
    assert [(row.key_id, row.adapter, row.tenant) for row in ledger.read(grouped, None, 10)] == [
        ("k1", "", None),
        ("k2", digest, None),
    ]


def test_pages_of_rows_join_to_the_whole(ledger: UsageLedger) -> None:
    ledger.add(random_records(200))
    asked = UsageFilter(HOUR_S, **ALL_TIME, group_by=("tenant", "key_id"))
    whole = ledger.read(asked, None, 10_000)
    paged: list[UsageRow] = []
    while page := ledger.read(asked, paged[-1].key(asked.group_by) if paged else None, 7):
        paged += page
    assert paged == whole


def test_used_tokens_are_those_since_the_minute(ledger: UsageLedger) -> None:
    records = random_records(100)
    ledger.add(records)
    places = (NOW, NOW - 30, NOW - 3600, NOW - DAY_S, 0, NOW + 20 * HOUR_S + 90)
    for since, key in product(places, (None, "k2")):
        expected = sum(
            one.usage.prompt_tokens + one.usage.generated_tokens
            for one in records
            if one.tenant == "acme" and key in (None, one.account)
            and one.ended_at >= math.floor(since / MINUTE_S) * MINUTE_S
        )  # fmt: skip
        assert ledger.used_tokens("acme", key, since) == expected
    assert ledger.used_tokens("nobody", None, 0) == 0


def test_old_records_and_fine_sums_are_deleted_and_the_days_stay(
    ledger: UsageLedger, database: Database
) -> None:
    ledger.add(random_records(300))
    before = ledger.read(UsageFilter(DAY_S, **ALL_TIME, group_by=("tenant",)), None, 100)
    cut = NOW + 1.5 * DAY_S
    midnight = cut // DAY_S * DAY_S
    assert not ledger.delete_old(cut)
    for table, column in ((schema.usage_records, "ended_at"), (schema.usage_buckets, "start")):
        found = select(func.min(table.c[column]))
        if table is schema.usage_buckets:
            found = found.where(table.c.width < DAY_S)
        assert midnight <= database.read(found)[0][0] < midnight + DAY_S
    assert ledger.read(UsageFilter(DAY_S, **ALL_TIME, group_by=("tenant",)), None, 100) == before
    with database.transaction() as connection:
        assert connection.execute(select(func.count()).select_from(schema.usage_records)).scalar_one()


def test_a_deletion_is_bounded(ledger: UsageLedger) -> None:
    ledger.add([record(f"{number:06x}", NOW - number * MINUTE_S) for number in range(2100)])
    assert ledger.delete_old(NOW + DAY_S), "2,000 rows at once"
    assert not ledger.delete_old(NOW + DAY_S)
    assert ledger.read(UsageFilter(MINUTE_S, **ALL_TIME), None, 10) == []
