"""Copies of a SQLite file of release 0.1 into both databases."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert, update

from slora.request import RequestUsage
from slora.usage_journal.record import UsageRecord
from slora_adapters.database import schema
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.database.database_copy import Copied, copy_database
from slora_adapters.errors import StoreUnfit
from slora_adapters.registry.registry import AdapterDetails, Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.version import AdapterVersion
from slora_api.tenants.usage_ledger import UsageLedger
from tests.adapters.database.test_migration import check_old_names, contents, write_old_database


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(write_old_database(tmp_path / "old.db"))) as database:
        yield database


@pytest.fixture
def target(database_place: str) -> Iterator[Database]:
    with closing(Database(database_place)) as database:
        yield database


def add_tenant(database: Database, name: str, min_pool_share: float = 0.0, weight: float = 1.0) -> None:
    share = {"weight": weight, "min_pool_share": min_pool_share, "max_pool_share": 1.0, "priority": 0}
    with database.transaction(CHANGES) as connection:
        connection.execute(insert(schema.tenants), {"name": name, "created_at": 1, **share})


def set_pepper_check(database: Database, value: bytes) -> None:
    with database.transaction(CHANGES) as connection:
        connection.execute(update(schema.platform).values(pepper_check=value))


def test_everything_is_copied_once(source: Database, target: Database, tmp_path: Path) -> None:
    set_pepper_check(source, b"check")
    cursor = Registry(RegistryStorage(target)).changes().cursor
    assert copy_database(source, target) == Copied(2, 3, 4)
    assert copy_database(source, target) == Copied(0, 0, 0)
    registry = Registry(RegistryStorage(target))
    assert registry.changes(cursor).resync, "a server that runs already looks everything up again"
    assert registry.registry == Registry(RegistryStorage(source)).registry
    copied, original = contents(target), contents(source)
    for table in ("adapter_reservations", "changes", "audit_log"):  # they tell what happened to one database
        del copied[table], original[table]
    assert copied == original
    check_old_names(registry)


def test_tenants_and_keys_of_the_target_stay_as_they_are(source: Database, target: Database) -> None:
    add_tenant(target, "acme", weight=7.0)
    add_tenant(target, "own")
    assert copy_database(source, target) == Copied(1, 3, 4)
    rows = target.read(schema.tenants.select().order_by(schema.tenants.c.name))
    assert [(row.name, row.weight) for row in rows] == [("acme", 7.0), ("beta", 1.0), ("own", 1.0)]


def test_a_copy_that_is_refused_changes_nothing(source: Database, target: Database) -> None:
    set_pepper_check(source, b"one")
    set_pepper_check(target, b"another")
    before = contents(target)
    with pytest.raises(StoreUnfit, match="made with another pepper"):
        copy_database(source, target)
    assert contents(target) == before
    set_pepper_check(target, b"one")
    add_tenant(target, "greedy", min_pool_share=0.8)
    before = contents(target)
    with pytest.raises(StoreUnfit, match=r"would add up to 1\.05"):
        copy_database(source, target)
    assert contents(target) == before
    with target.transaction(CHANGES) as connection:
        connection.execute(update(schema.tenants).values(min_pool_share=0.0))
    details = AdapterDetails(8, ("q_proj",), 1)
    Registry(RegistryStorage(target)).put("own", AdapterVersion("own", "1" * 64), details)
    before = contents(target)
    with pytest.raises(StoreUnfit, match="has 1 adapter names already"):
        copy_database(source, target)
    assert contents(target) == before


def test_the_usage_ledger_is_copied_once(source: Database, target: Database) -> None:
    records = [
        UsageRecord(f"{number:04x}", "acme", "key1", None, 60.0 * number, RequestUsage(3, 1, 2, 4, 0.5))
        for number in range(2500)
    ]
    UsageLedger(source).add(records)
    later = UsageRecord("later", "acme", "key1", None, 0.0, RequestUsage(1, 0, 1))
    copy_database(source, target)
    UsageLedger(target).add([later])
    copy_database(source, target)
    UsageLedger(source).add([later])
    for table in (schema.usage_records, schema.usage_buckets):
        rows = table.select().order_by(*table.primary_key.columns)
        assert target.read(rows) == source.read(rows)
