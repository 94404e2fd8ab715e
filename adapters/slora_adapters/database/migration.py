"""Brings a database to the schema of this release.

Every process that opens a database upgrades it if necessary. All missing revisions of `migrations/versions` are applied
in one transaction, under a lock. If several processes start at the same time, one of them migrates and the others wait.
A process that dies before the end of the transaction changes nothing.

A database is refused if a newer release, another product or a release before 0.1 has written it.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Text, column, exc, select, table, text
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from slora_adapters.database import schema
from slora_adapters.errors import StoreUnavailable

__all__ = ["SCHEMA", "VERSION_TABLE", "Revisions", "find_revisions", "is_current", "upgrade"]

logger = logging.getLogger(__name__)

# The lock of a migration.
SCHEMA = "schema"
# Alembic's default name is avoided, because another product may use it in the same database.
VERSION_TABLE = "slora_schema"

_SCRIPTS = Path(__file__).parent / "migrations"
_TABLES = {
    "sqlite": text("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"),
    "postgresql": text("SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = current_schema()"),
}
_COLUMNS = {
    "sqlite": text(
        "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns "
        "WHERE tables.type = 'table'"
    ),
    "postgresql": text(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    ),
}
_REVISION = select(table(VERSION_TABLE, column("version_num", Text)))
# The table in which release 0.1 kept the schema version of each component, and each component's last version.
_VERSIONS_OF_0_1 = "schema_versions"
_LAST_OF_0_1 = {"registry": 6, "tenancy": 2}
_NEWER = "was written by a newer release: run that release, or restore an older copy of the database"

Read = Callable[[Executable], Sequence[Any]]


class Revisions(NamedTuple):
    """Two revisions of the schema. found: the revision of a database; None if the database is empty or was written by
    release 0.1. head: the latest revision of this release.
    """

    found: str | None
    head: str


def is_current(read: Read, dialect: str, label: str) -> bool:
    """Returns whether the database has the schema of this release. Raises StoreUnavailable if `upgrade` would refuse
    it.

    label: the name of the database in error messages.
    """
    found, head = find_revisions(read, dialect, label)
    return found == head


def find_revisions(read: Read, dialect: str, label: str) -> Revisions:
    """Returns the revisions. Raises StoreUnavailable if the database cannot get the schema of this release."""
    return Revisions(_find_state(read, dialect, label), str(_scripts().get_current_head()))


def upgrade(connection: Connection, label: str) -> None:
    """Applies the missing revisions. The transaction of `connection` must hold the lock SCHEMA.

    Raises StoreUnavailable if the database cannot get the schema of this release.
    """

    def read(statement: Executable) -> Sequence[Any]:
        return connection.execute(statement).fetchall()

    scripts = _scripts()
    before, head = _find_state(read, connection.dialect.name, label), scripts.get_current_head()
    if before == head:
        return  # Another process was faster.
    # Alembic logs a line for each revision, but an operator needs only the line that is logged below.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))
    context = MigrationContext.configure(
        connection,
        opts={
            "version_table": VERSION_TABLE,
            "fn": lambda revision, _context: scripts._upgrade_revs("head", revision),
        },
    )
    try:
        with Operations.context(context):
            context.run_migrations()
    except exc.DBAPIError as error:
        if not _is_about_schema(error):
            raise
        raise StoreUnavailable(
            f"database {label} cannot be migrated: its tables do not match the schema version recorded in it "
            f"({' '.join(str(error.orig).split())}); restore a complete copy of the database"
        ) from error
    logger.info("database %s has schema %s now (before: %s)", label, head, before or "none")


def _is_about_schema(error: exc.DBAPIError) -> bool:
    """Returns whether the error says that a table or column is missing or already exists. SQLite has one error code for
    these errors and for invalid SQL, so invalid SQL counts too.
    """
    code = getattr(error.orig, "sqlite_errorcode", None)
    return isinstance(error, exc.ProgrammingError) if code is None else code == sqlite3.SQLITE_ERROR


@cache
def _scripts() -> ScriptDirectory:
    """Returns the revisions. They are cached, because Alembic runs all files of `migrations/versions` to find them."""
    return ScriptDirectory(str(_SCRIPTS))


def _find_state(read: Read, dialect: str, label: str) -> str | None:
    """Returns the revision of the database; None if it is empty or was written by release 0.1."""
    names = {name for (name,) in read(_TABLES[dialect])}
    if VERSION_TABLE in names:
        return _check_revision(read, dialect, names, label)
    if _VERSIONS_OF_0_1 in names:
        _check_0_1(read, label)
    elif names:
        raise StoreUnavailable(
            f"database {label} has tables of another product ({', '.join(sorted(names)[:5])}): "
            "give slora a database of its own"
        )
    return None


def _check_revision(read: Read, dialect: str, names: set[str], label: str) -> str:
    ((revision,),) = read(_REVISION)
    scripts = _scripts()
    try:
        scripts.get_revision(revision)
    except CommandError:
        raise StoreUnavailable(f"database {label} {_NEWER} (its schema is {revision!r})") from None
    if revision == scripts.get_current_head():
        _check_tables(read, dialect, names, label)
    return str(revision)


def _check_tables(read: Read, dialect: str, names: set[str], label: str) -> None:
    wanted = schema.metadata.tables
    columns = {(table, column) for table, column in read(_COLUMNS[dialect])}
    missing_columns = [
        f"{table.name}.{column.name}"
        for table in wanted.values()
        for column in table.columns
        if table.name in names and (table.name, column.name) not in columns
    ]
    for kind, missing in (("tables", sorted(wanted.keys() - names)), ("columns", missing_columns)):
        if missing:
            raise StoreUnavailable(
                f"database {label} lacks the {kind} {', '.join(missing)}: restore a complete copy of the database"
            )


def _check_0_1(read: Read, label: str) -> None:
    """Refuses components whose schema is not the last one of release 0.1.

    Missing components are accepted, because a server may have been killed at its first start.
    """
    for component, found in read(text(f"SELECT component, version FROM {_VERSIONS_OF_0_1}")):
        last = _LAST_OF_0_1.get(component, 0)
        if found > last:
            raise StoreUnavailable(f"database {label} {_NEWER} (schema version {found} of {component!r})")
        if found < last:
            raise StoreUnavailable(
                f"database {label} has schema version {found} of {component!r}, which only release 0.1 "
                "can migrate: start release 0.1 once, and then this release"
            )
