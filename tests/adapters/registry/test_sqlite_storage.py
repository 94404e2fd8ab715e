"""Behaviour that only SQLite has: query plans, and databases of older releases."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.errors import AliasConflict, StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import ExtrasSummary
from slora_adapters.registry.registry import AdapterDetails, Registry, StorageUsage
from slora_adapters.registry.registry_rows import ALIASES, NAMES, OF_NAME, ONE_ROLLOUT, PINNED, VERSION_PAGE
from slora_adapters.registry.registry_schema import MIGRATIONS
from slora_adapters.registry.sqlite_storage import SqliteStorage
from slora_adapters.version import AdapterVersion

D1, D2 = "1" * 64, "2" * 64


def _v(tenant: str, digest: str = D1) -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def test_a_lookup_reads_the_versions_that_it_wants_and_no_others(tmp_path: Path) -> None:
    """Without hints, SQLite would read all versions of the name, and all aliases to find the pinned ones."""
    database = Database(tmp_path / "slora.db")
    SqliteStorage(database)
    plan = str(database.read(f"EXPLAIN QUERY PLAN {ONE_ROLLOUT}", ("t1", "a", "prod")))
    assert "SEARCH v" in plan and "number=?" in plan and "SCAN v" not in plan
    assert "adapter_aliases_pinned" in str(database.read(f"EXPLAIN QUERY PLAN {PINNED}"))
    database.close()


def test_a_page_is_read_from_where_it_begins_and_no_further(tmp_path: Path) -> None:
    """However many rows a tenant has, no query reads rows that are not on the page."""
    database = Database(tmp_path / "slora.db")
    SqliteStorage(database)
    for query, parameters, search in (
        (NAMES, ("t1", "a", 9), "SEARCH page USING COVERING INDEX ? (tenant=? AND name>?)"),
        (
            ALIASES,
            ("t1", "a", "b", 9),
            "SEARCH adapter_aliases USING INDEX ? (tenant=? AND (name,alias)>(?,?))",
        ),
        (VERSION_PAGE, ("t1", "a", 9, 9), "SEARCH v USING INDEX ? (tenant=? AND name=? AND number<?)"),
        (OF_NAME, ("t1", "a"), "SEARCH a USING INDEX ? (tenant=? AND name=?)"),
    ):
        rows = database.read(f"EXPLAIN QUERY PLAN {query}", parameters)
        plan = [re.sub(r"INDEX sqlite_autoindex_\w+", "INDEX ?", row[3]) for row in rows]
        assert search in plan
        # The rows of the page itself and of an alias's targets.
        assert {step for step in plan if step.startswith("SCAN")} <= {
            "SCAN a",
            "SCAN target VIRTUAL TABLE INDEX 1:",
        }
        assert "SCAN a" not in plan or "CO-ROUTINE a" in plan
    database.close()


def old_database(path: Path, num_migrations: int) -> Database:
    """A database as left by a release with `num_migrations` migrations. It has two names. Pins exist from migration
    2 on."""
    database = Database(path)
    database.migrate("registry", MIGRATIONS[:num_migrations])
    later = ", ?, ?" if num_migrations > 1 else ""
    with database.transaction() as connection:
        for name, digest, *sizes in (("old", D1, None, 0), ("pinned", D2, 8192, 1)):
            connection.execute(
                f"INSERT INTO adapters VALUES ('t1', ?, ?, 8, '[\"q_proj\"]', 4096, NULL, 'g', 1.0, 2.0{later})",
                (name, digest, *(sizes if later else ())),
            )
    return database


@pytest.mark.parametrize("num_migrations", [1, 2])
def test_adapters_of_an_older_release_become_version_1_of_their_name(
    tmp_path: Path, num_migrations: int
) -> None:
    database = old_database(tmp_path / "slora.db", num_migrations)
    registry = Registry(SqliteStorage(database))
    assert [rollout.label for rollout in registry.list("t1")] == ["old", "pinned"]
    old, pinned = registry.rollout("t1", "old"), registry.rollout("t1", "pinned")
    assert (old.pinned, pinned.pinned) == (False, num_migrations == 2)
    assert old.follows_pushes and old.salt != pinned.salt
    assert registry.versions("t1", "old") == [old.main] == [registry.get("t1", "old@1")]
    assert (old.main.version, old.main.named_at, old.main.created_at) == (_v("t1"), 1.0, 2.0)
    assert old.main.extras == ExtrasSummary.of(AdapterExtras(None, "g"))
    assert registry.serve("t1", "old") == (old.main, AdapterExtras(None, "g"))
    # Both versions have the same number of bytes, and one text of one byte.
    assert registry.storage_usage("t1", D2) == StorageUsage(2, 2 * 4097, 4096)
    assert pinned.main.details.pool_bytes == (8192 if num_migrations == 2 else 4096)
    with pytest.raises(AliasConflict, match="has never moved"):
        registry.roll_back("t1", "old", "latest")
    known = replace(old.main.details, packed_bytes=8192)
    again = registry.put("old", _v("t1"), known, AdapterExtras(None, "g"))
    assert not again.is_new and again.record.details == known, "its size is known from now on"
    assert registry.put("old", _v("t1", D2), known).record.number == 2
    assert registry.delete("t1", "pinned").orphaned == ()
    assert registry.delete("t1", "old").unreferenced == (D1, D2)
    database.close()


def test_a_database_of_the_release_before_keeps_its_names_and_gets_a_feed(tmp_path: Path) -> None:
    database = Database(tmp_path / "slora.db")
    database.migrate("registry", MIGRATIONS[:3])
    with database.transaction() as connection:
        connection.execute("INSERT INTO adapter_names VALUES ('t1', 'a', 7, 1.0)")
        connection.execute(
            f"INSERT INTO adapter_versions VALUES ('t1', 'a', 7, '{D1}', 8, '[]', 9, 10, NULL, NULL, 2.0)"
        )
        connection.execute(
            "INSERT INTO adapter_aliases VALUES ('t1', 'a', 'latest', '{\"7\": 100}', 1, '[]', 'salt', 1, 2.0)"
        )
    registry = Registry(SqliteStorage(database))
    (pinned,) = registry.pinned()
    assert (pinned.main.number, pinned.salt, pinned.main.details.pool_bytes) == (7, "salt", 10)
    cursor = registry.changes().cursor
    assert registry.put("a", _v("t1", D2), pinned.main.details).record.number == 8
    assert [change.moved_pin for change in registry.changes(cursor).changes] == [True]
    database.close()


def test_a_replaced_change_history_forces_a_resync(tmp_path: Path) -> None:
    """The database was restored from an older copy and has been written to since."""
    database = Database(tmp_path / "slora.db")
    registry = Registry(SqliteStorage(database))
    cursor = registry.changes().cursor
    with database.transaction() as connection:
        connection.execute("UPDATE adapter_changes SET nonce = 'another'")
    assert registry.changes(cursor).resync
    database.close()


def test_only_a_request_reads_the_texts_of_extras(tmp_path: Path) -> None:
    """Born from a bug: lists read the texts too. 160 versions of 500 KB and 30 concurrent lists took 2 GB of memory."""
    database = Database(tmp_path / "slora.db")
    registry = Registry(SqliteStorage(database))
    extras = AdapterExtras("x" * 1000, "{}")
    details = AdapterDetails(8, ("q_proj",), 4096)
    for digest in (D1, D2):
        registry.put("a", _v("t1", digest), details, extras)
    assert registry.serve("t1", "a@1")[1] == extras
    with database.transaction() as connection:
        connection.execute("DROP TABLE adapter_extras")
    with pytest.raises(StoreUnavailable, match="no such table"):
        registry.serve("t1", "a")
    assert len(registry.versions("t1", "a")) == 2 and len(registry.list("t1")) == 1
    assert len(registry.rollouts("t1")) == len(registry.aliases("t1", "a")) == 1
    assert registry.newest("t1", "a") == registry.get("t1", "a") == registry.rollout("t1", "a").main
    assert registry.storage_usage("t1", D1).num_bytes == 2 * 4096 + 2 * 1002
    registry.move("t1", "a", "prod", {1: 100})
    registry.pin("t1", "a", lambda wanted, others: None)
    assert len(registry.pinned()) == 1
    database.close()


def test_texts_of_the_release_before_are_moved_and_counted(tmp_path: Path) -> None:
    database = Database(tmp_path / "slora.db")
    database.migrate("registry", MIGRATIONS[:5])
    with database.transaction() as connection:
        connection.execute("INSERT INTO adapter_names VALUES ('t1', 'a', 3, 1.0)")
        for number, texts in ((1, ("ü", None)), (2, (None, None)), (3, ("", "{}"))):
            connection.execute(
                f"INSERT INTO adapter_versions VALUES ('t1', 'a', ?, '{D1}', 8, '[]', 9, 10, ?, ?, 2.0)",
                (number, *texts),
            )
    registry = Registry(SqliteStorage(database))
    assert [registry.serve("t1", f"a@{number}")[1] for number in (1, 2, 3)] == [
        AdapterExtras("ü"),
        AdapterExtras(),
        AdapterExtras("", "{}"),
    ]
    assert registry.storage_usage("t1", D1) == StorageUsage(3, 9 + 2 + 2, 9)
    last = registry.get("t1", "a@3")
    assert not registry.put("a", last.version, last.details, AdapterExtras("", "{}")).is_new
    database.close()
