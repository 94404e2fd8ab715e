"""Brings a database to the schema of this release.

Every process that opens a database upgrades it if necessary. All missing revisions of `migrations/versions` are applied
in one transaction, under a lock. If several processes start at the same time, one of them migrates and the others wait.
A process that dies before the end of the transaction changes nothing.

A database is refused if a newer release, another product or a version before the first release has written it.
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

logger = logging.getLogger(__name__)

# The lock of a migration.
SCHEMA = "schema"
# Alembic's default name is avoided, because another product may use it in the same database.
VERSION_TABLE = "slora_schema"

SCRIPTS = Path(__file__).parent / "migrations"
# Revisions that no release had. This release cannot migrate their tables.
UNRELEASED = frozenset({"1", *(f"{number:04}" for number in range(1, 11))})
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
_NEWER = "was written by a newer release: run that release, or restore an older copy of the database"

Read = Callable[[Executable], Sequence[Any]]


class Revisions(NamedTuple):
    """Two revisions of the schema."""

    found: str | None  # the revision of a database; None if the database is empty
    head: str  # the latest revision of this release


def is_current(read: Read, dialect: str, label: str) -> bool:
    """Returns whether the database has the schema of this release. Raises StoreUnavailable if `upgrade` would refuse
    it.

    label: the name of the database in error messages.
    """
    found, head = find_revisions(read, dialect, label)
    return found == head


def find_revisions(read: Read, dialect: str, label: str) -> Revisions:
    """Returns the revisions. Raises StoreUnavailable if the database cannot get the schema of this release."""
    return Revisions(_find_state(read, dialect, label), str(_scripts(SCRIPTS).get_current_head()))


def upgrade(connection: Connection, label: str) -> None:
    """Applies the missing revisions. The transaction of `connection` must hold the lock SCHEMA.

    Raises StoreUnavailable if the database cannot get the schema of this release.
    """

    def read(statement: Executable) -> Sequence[Any]:
        return connection.execute(statement).fetchall()

    scripts = _scripts(SCRIPTS)
    before, head = _find_state(read, connection.dialect.name, label), scripts.get_current_head()
    if before == head:
        return  # Another process was faster.
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
def _scripts(directory: Path) -> ScriptDirectory:
    """Returns the revisions. They are cached, because Alembic runs all files of `migrations/versions` to find them."""
    return ScriptDirectory(str(directory))


def _find_state(read: Read, dialect: str, label: str) -> str | None:
    """Returns the revision of the database; None if it is empty."""
    names = {name for (name,) in read(_TABLES[dialect])}
    if VERSION_TABLE in names:
        return _check_revision(read, dialect, names, label)
    if names:
        raise StoreUnavailable(
            f"database {label} has tables of another product ({', '.join(sorted(names)[:5])}): "
            "give slora a database of its own"
        )
    return None


def _check_revision(read: Read, dialect: str, names: set[str], label: str) -> str:
    ((revision,),) = read(_REVISION)
    if revision in UNRELEASED:
        raise StoreUnavailable(
            f"database {label} was made before the first release (its schema is {revision!r}), and cannot be "
            "migrated: start with a new --data-dir or an empty --database, create the tenants and keys, and push "
            "the adapters again"
        )
    scripts = _scripts(SCRIPTS)
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
