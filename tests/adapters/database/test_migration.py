"""Migrations on both databases: fresh ones, those of release 0.1, and those that are refused."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from slora.tenant_share import TenantShare
from slora_adapters.database import migration, schema
from slora_adapters.database.database import Database
from slora_adapters.database.migration import VERSION_TABLE
from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.registry import Registry, StorageUsage
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_api.tenants.api_key import Pepper, make_key
from slora_api.tenants.key_record import KeyRecord
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.revocation_journal import RevocationJournal
from slora_api.tenants.scopes import TENANT_SCOPES
from slora_api.tenants.tenant_store import TenantStore
from tests.support.forked_program import ForkedProgram

OLD = Path(__file__).parent / "written_by_0_1"
OLD_PEPPER = Pepper(b"p" * 32)


def write_old_database(path: Path, change: str = "") -> Path:
    """Writes a database as release 0.1 left it. change: SQL that is executed afterwards."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((OLD / "slora.sql").read_text() + change)
    return path


def contents(database: Database) -> dict[str, Any]:
    """All rows of all tables, without random ids."""
    found = {}
    for table in schema.metadata.sorted_tables:
        columns = [column for column in table.columns if column.name != "nonce"]
        found[table.name] = sorted(map(repr, database.read(table.select().with_only_columns(*columns))))
    return found


def test_the_migrations_make_exactly_the_tables_of_the_schema(empty_database: str) -> None:
    with closing(Database(empty_database)) as database, database.transaction() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, schema.metadata) == []
        assert set(inspect(connection).get_table_names()) == {*schema.metadata.tables, VERSION_TABLE}


def test_a_database_of_release_0_1_has_the_same_tables_as_a_new_one(tmp_path: Path) -> None:
    with closing(Database(write_old_database(tmp_path / "slora.db"))) as database:
        with database.transaction() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, schema.metadata) == []
            assert set(inspect(connection).get_table_names()) == {*schema.metadata.tables, VERSION_TABLE}
        assert database.read(text("PRAGMA integrity_check")) == [("ok",)]
        assert database.read(text("PRAGMA foreign_key_check")) == []


@pytest.fixture
def migrated(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(write_old_database(tmp_path / "slora.db"))) as database:
        yield database


def test_names_of_release_0_1_are_kept(migrated: Database) -> None:
    registry = Registry(RegistryStorage(migrated))
    assert registry.registry == "c299c640ec83f3f3ccba5203864cc361"
    check_old_names(registry)


def check_old_names(registry: Registry) -> None:
    """Checks the names that the script of release 0.1 has written, into SQLite and into Redis."""
    assert [rollout.label for rollout in registry.list("acme")] == ["a.b-c", "a_b", "voice"]
    assert [record.number for record in registry.versions("acme", "voice")] == [3, 2, 1]
    assert [record.number for record in registry.versions("acme", "a_b")] == [2]
    prod = registry.rollout("acme", "voice@prod")
    assert (prod.targets, prod.pinned, prod.follows_pushes) == ({1: 90, 2: 10}, True, False)
    assert registry.pinned() == [prod]
    latest = registry.rollout("acme", "voice")
    assert (latest.targets, latest.follows_pushes, latest.updated_at) == ({3: 100}, True, 1790000002.25)
    record, extras = registry.serve("acme", "voice@3")
    assert extras == AdapterExtras("t", '{"temperature": 0.5}')
    assert (record.created_at, record.named_at) == (1790000002.25, 1790000000.25)
    assert (record.details.packed_bytes, record.details.blob_bytes) == (8192, 4300)
    assert registry.serve("acme", "voice@2")[1] == AdapterExtras("{{ messages }} ü")
    assert registry.storage_usage("acme", f"{1:064x}") == StorageUsage(5, 3 * 4300 + 9000 + 38, 4300)
    assert registry.storage_usage("beta", "").num_versions == 1
    assert registry.roll_back("acme", "voice", "prod").targets == {1: 100}
    assert registry.delete("acme", "a_b").unreferenced == (f"{5:064x}",)
    again = registry.put("a_b", record.version, record.details)
    assert again.record.number == 1, "a deleted name begins anew"
    assert registry.put("voice", record.version, record.details).record.number == 4


def test_keys_and_shares_of_release_0_1_are_kept(migrated: Database, tmp_path: Path) -> None:
    with closing(RevocationJournal(tmp_path / "revocations")) as journal:
        store = KeyStore(migrated, OLD_PEPPER, journal)
        shares = {tenant.name: tenant.share for tenant in TenantStore(migrated, store).list_tenants()}
        assert shares == {"acme": TenantShare(2.5, 0.25, 1.0, -3), "beta": TenantShare()}
        first, revoked, last = json.loads((OLD / "keys.json").read_text())
        found = store.authenticate(first)
        assert isinstance(found, KeyRecord) and (found.tenant, found.adapter) == ("acme", "voice@prod")
        assert (found.name, found.scopes, found.models, found.expires_at) == ("", TENANT_SCOPES, None, None)
        assert store.authenticate(revoked) is None
        assert (found := store.authenticate(last)) is not None and found.tenant == "beta"
        assert [key.revoked_at is not None for key in store.list_keys("acme")] == [False, True]


def test_keys_of_the_first_revision_are_kept(
    empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key was made before the migration, and one by an older server after it, during a rolling upgrade."""
    keys = [make_key(), make_key()]
    insert = (
        "INSERT INTO api_keys (key_id, tenant, digest, created_at) VALUES (:key_id, :tenant, :digest, :at)"
    )
    rows = [
        {"key_id": key.key_id, "tenant": "acme", "digest": OLD_PEPPER.digest(key.secret), "at": at}
        for at, key in enumerate(keys)
    ]
    versions = tmp_path / "migrations" / "versions"
    versions.mkdir(parents=True)
    shutil.copy(next((migration._SCRIPTS / "versions").glob("v0001_*.py")), versions)
    with monkeypatch.context() as patch:
        patch.setattr(migration, "_scripts", lambda: ScriptDirectory(str(versions.parent)))
        with closing(Database(empty_database)) as database, database.transaction() as connection:
            connection.execute(text("INSERT INTO tenants VALUES ('acme', 1, 2.5, 0, 1, 0)"))
            connection.execute(text(insert), rows[0])
    with (
        closing(Database(empty_database)) as database,
        closing(RevocationJournal(tmp_path / "revocations")) as journal,
    ):
        with database.transaction() as connection:
            connection.execute(text(insert), rows[1])
        store = KeyStore(database, OLD_PEPPER, journal)
        for key in keys:
            found = store.authenticate(key.secret)
            assert (
                isinstance(found, KeyRecord) and found.scopes == TENANT_SCOPES and found.share.weight == 2.5
            )
        assert [record.key_id for record in store.list_keys("acme")] == [key.key_id for key in keys]
        with pytest.raises(IntegrityError), database.transaction() as connection:
            connection.execute(text(insert), rows[0] | {"key_id": "other", "tenant": "nobody"})


def test_a_reservation_of_release_0_1_protects_its_blob(migrated: Database) -> None:
    registry = Registry(RegistryStorage(migrated), clock=lambda: 1790000013.0)
    assert registry.is_referenced("f" * 64)


# -- several processes, and crashes -----------------------------------------------------------------------------------

OPEN = """
import sys
from slora_adapters.database.database import Database
Database(sys.argv[1]).close()
"""


def test_processes_that_start_together_migrate_once(empty_database: str) -> None:
    if "://" not in empty_database:
        write_old_database(Path(empty_database))
    programs = [ForkedProgram(OPEN, empty_database) for _ in range(4)]
    assert [program.finish() for program in programs] == [(0, "")] * 4
    with closing(Database(empty_database)) as database:
        assert database.read(text(f"SELECT version_num FROM {VERSION_TABLE}")) == [
            (migration._scripts().get_current_head(),)
        ]
        assert len(database.read(schema.platform.select())) == 1


# Kills a child of its own after each number of statements of the migration, until a child survives.
KILLED_MIGRATIONS = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from slora_adapters.database.database import Database

def die_after(number):
    left = [number]

    @event.listens_for(Engine, "after_cursor_execute")
    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

step, status = int(sys.argv[2]), None
while status != 0:
    if not (child := os.fork()):
        die_after(step)
        Database(sys.argv[1]).close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status not in (0, signal.SIGKILL):
        sys.exit(f"step {step}: {status}")
    step += int(sys.argv[3])
print(step)
"""


def test_a_migration_that_is_killed_at_any_step_changes_nothing(empty_database: str, soak: bool) -> None:
    """Each step begins with what the crash at the step before has left."""
    if "://" not in empty_database:
        write_old_database(Path(empty_database))
    stride = 1 if soak else 5
    status, output = ForkedProgram(KILLED_MIGRATIONS, empty_database, 1, stride).finish()
    assert status == 0, output
    assert int(output) > 20, "most steps of the migration were tried"
    with closing(Database(empty_database)) as database:
        if "://" in empty_database:
            assert len(contents(database)["changes"]) == 1
            return
        fresh = write_old_database(Path(empty_database).with_name("fresh.db"))
        with closing(Database(fresh)) as expected:
            assert contents(database) == contents(expected)


# -- databases that are refused ---------------------------------------------------------------------------------------


def execute(place: str, statement: str) -> None:
    with closing(Database(place)) as database, database.transaction() as connection:
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (f"UPDATE {VERSION_TABLE} SET version_num = '9999'", "written by a newer release: run that release"),
        ("DROP TABLE adapter_names", "lacks the tables adapter_names: restore a complete copy"),
        (
            "ALTER TABLE tenants DROP COLUMN status",
            r"lacks the columns tenants\.status: restore a complete copy",
        ),
        (
            f"UPDATE {VERSION_TABLE} SET version_num = '0001'",
            "cannot be migrated: its tables do not match .* restore a complete copy",
        ),
        (f"DROP TABLE {VERSION_TABLE}", "tables of another product .*: give slora a database of its own"),
    ],
)
def test_a_database_with_an_unknown_schema_is_refused(
    empty_database: str, statement: str, message: str
) -> None:
    execute(empty_database, statement)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=message):
            Database(empty_database)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE schema_versions SET version = 7 WHERE component = 'registry'", "written by a newer release"),
        ("INSERT INTO schema_versions VALUES ('ledger', 1)", "written by a newer release"),
        ("UPDATE schema_versions SET version = 5 WHERE component = 'registry'", "start release 0.1 once"),
    ],
)
def test_a_database_of_another_release_before_this_one_is_refused_unchanged(
    tmp_path: Path, change: str, message: str
) -> None:
    path = write_old_database(tmp_path / "slora.db", change)
    with closing(sqlite3.connect(path)) as connection:
        before = list(connection.iterdump())
    with pytest.raises(StoreUnavailable, match=message):
        Database(path)
    with closing(sqlite3.connect(path)) as connection:
        assert list(connection.iterdump()) == before


def test_a_first_start_of_release_0_1_that_was_killed_is_completed(tmp_path: Path) -> None:
    """It had made only the tables of names."""
    lost = "DROP TABLE api_keys; DROP TABLE tenants; DELETE FROM schema_versions WHERE component = 'tenancy';"
    with closing(Database(write_old_database(tmp_path / "slora.db", lost))) as database:
        assert database.read(schema.tenants.select()) == []
        assert len(Registry(RegistryStorage(database)).list("acme")) == 3
