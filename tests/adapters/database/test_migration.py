"""Migrations on both databases: fresh ones, those of an older release, and those that are refused."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.database.migration import UNRELEASED, VERSION_TABLE
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import Pepper
from slora_api.keys.key_store import KeyStore, RevocationJournal
from slora_api.tenants.tenant_store import TenantStore
from tests.support.covering import soaked
from tests.support.forked_program import ForkedProgram
from tests.support.migrated_file import NEXT, running_release, write_next_release


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


# -- a next release ---------------------------------------------------------------------------------------------------


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    return write_next_release(tmp_path)


def test_a_server_goes_on_after_a_newer_one_has_migrated_its_database(
    empty_database: str, next_release: Path, tmp_path: Path
) -> None:
    with (
        closing(Database(empty_database)) as older,
        closing(RevocationJournal(tmp_path / "revocations")) as journal,
    ):
        keys = KeyStore(older, Pepper(b"p" * 32), journal)
        tenants, registry = TenantStore(older, keys), Registry(older)
        acme = tenants.create_tenant("acme").tenant_id
        _, before = KeyAdmin(keys).create_key(acme)
        with running_release(next_release), closing(Database(empty_database)) as newer:
            assert newer.read(text("SELECT name FROM regions")) == [("everywhere",)]
            beta = tenants.create_tenant("beta").tenant_id
            _, after = KeyAdmin(keys).create_key(beta)
            registry.put("voice", AdapterVersion(beta, "1" * 64), AdapterDetails(8, ("q_proj",), 1))
            rows = newer.read(text("SELECT name, region FROM tenants ORDER BY name"))
            assert rows == [("acme", "everywhere"), ("beta", "everywhere")]
            assert [rollout.label for rollout in Registry(newer).list(beta)] == ["voice"]
        for key, tenant in ((before, acme), (after, beta)):
            assert (found := keys.authenticate(key.secret)) is not None and found.tenant == tenant


# -- several processes, and crashes -----------------------------------------------------------------------------------

OPEN = """
import sys
from pathlib import Path
from slora_adapters.database import migration
from slora_adapters.database.database import Database
migration.SCRIPTS = Path(sys.argv[2])
Database(sys.argv[1]).close()
"""


@pytest.mark.parametrize("is_empty", soaked([True, False], True), ids=["empty", "older"])
def test_processes_that_start_together_migrate_once(
    empty_database: str, next_release: Path, *, is_empty: bool
) -> None:
    if not is_empty:
        Database(empty_database).close()
    programs = [ForkedProgram(OPEN, empty_database, next_release) for _ in range(4)]
    assert [program.finish() for program in programs] == [(0, "")] * 4
    assert read_revision(empty_database, next_release) == NEXT


def read_revision(place: str, scripts: Path) -> str:
    """Opens a database as the release of `scripts`. Returns its revision, and checks that it was made once."""
    with running_release(scripts), closing(Database(place)) as database:
        assert len(database.read(schema.platform.select())) == 1
        assert len(database.read(schema.changes.select())) == 1
        ((revision,),) = database.read(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        return str(revision)


# Kills a child of its own after each number of statements of the migration, until a child survives.
KILLED_MIGRATIONS = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from slora_adapters.database import migration
from slora_adapters.database.database import Database

migration.SCRIPTS = Path(sys.argv[2])

def die_after(number):
    left = [number]

    @event.listens_for(Engine, "after_cursor_execute")
    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

step, status = 1, None
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


@pytest.mark.covering(1)
@pytest.mark.parametrize(("is_empty", "num_statements"), [(True, 30), (False, 10)], ids=["empty", "older"])
def test_a_migration_that_is_killed_at_any_step_changes_nothing(
    empty_database: str, next_release: Path, soak: bool, *, is_empty: bool, num_statements: int
) -> None:
    """Each step begins with what the crash at the step before has left."""
    if not is_empty:
        Database(empty_database).close()
    stride = 1 if soak else 5
    status, output = ForkedProgram(KILLED_MIGRATIONS, empty_database, next_release, stride).finish()
    assert status == 0, output
    assert int(output) > num_statements, "most steps of the migration were tried"
    assert read_revision(empty_database, next_release) == NEXT


# -- databases that are refused ---------------------------------------------------------------------------------------


def execute(place: str, statement: str) -> None:
    with closing(Database(place)) as database, database.transaction() as connection:
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (f"UPDATE {VERSION_TABLE} SET version_num = '9999'", "written by a newer release: run that release"),
        *(
            (
                f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'",
                "made before the first release .* start with a new --data-dir or an empty --database",
            )
            for revision in (min(UNRELEASED), max(UNRELEASED))
        ),
        ("DROP TABLE adapter_names", "lacks the tables adapter_names: restore a complete copy"),
        (
            "ALTER TABLE tenants DROP COLUMN status",
            r"lacks the columns tenants\.status: restore a complete copy",
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


def test_an_older_database_with_other_tables_than_its_revision_is_refused(
    empty_database: str, next_release: Path
) -> None:
    execute(empty_database, "CREATE TABLE regions (name TEXT)")
    refusal = r"cannot be migrated: its tables do not match .* restore a complete copy"
    for _ in range(2):
        with running_release(next_release), pytest.raises(StoreUnavailable, match=refusal):
            Database(empty_database)
