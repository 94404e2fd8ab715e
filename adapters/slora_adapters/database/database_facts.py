"""Reads facts about a database without creating or migrating it, for `slora doctor`."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import exc, text
from sqlalchemy.engine import URL, Connection
from sqlalchemy.sql import Executable

from slora_adapters.database.engines import (
    check_postgresql_settings,
    check_writable,
    label_database,
    make_postgresql_engine,
    make_reading_engine,
    parse_database_url,
)
from slora_adapters.database.migration import Revisions, find_revisions
from slora_adapters.errors import DatabaseUnavailable


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """Facts about a database."""

    label: str  # its name in messages, without a password
    server: str  # its product and version
    revisions: Revisions | None  # None if a SQLite file does not exist yet


def read_database_facts(place: Path | str) -> DatabaseFacts:
    """Reads facts about a database. place: see `Database`.

    Raises ValueError if `place` is not a path or URL of a database. Raises StoreUnfit if a server would refuse the
    database because of its settings. Raises DatabaseUnavailable if the database does not answer or this release cannot
    migrate it.
    """
    url = parse_database_url(str(place))
    label = label_database(url)
    if url.get_backend_name() == "sqlite":
        path = Path(url.database or "")
        check_writable(path, label)
        if not path.exists():
            return DatabaseFacts(label, "SQLite", None)
    with closing(_DatabaseReader(url, label)) as reader:
        return DatabaseFacts(label, reader.find_version(), reader.find_revisions())


class _DatabaseReader:
    """One connection to an existing database. Raises DatabaseUnavailable if there is none."""

    def __init__(self, url: URL, label: str) -> None:
        self._label = label
        self._is_file = url.get_backend_name() == "sqlite"
        self._engine = (
            make_reading_engine(Path(url.database or "")) if self._is_file else make_postgresql_engine(url)
        )
        try:
            self._connection: Connection = self._engine.connect()
        except exc.DBAPIError as error:
            self._engine.dispose()
            raise self._as_unavailable(error) from error

    def read(self, statement: Executable) -> Sequence[Any]:
        try:
            return self._connection.execute(statement).fetchall()
        except exc.DBAPIError as error:
            raise self._as_unavailable(error) from error

    def find_version(self) -> str:
        if self._is_file:
            return f"SQLite {self.read(text('SELECT sqlite_version()'))[0][0]}"
        check_postgresql_settings(self._connection)
        return f"PostgreSQL {self.read(text('SHOW server_version'))[0][0]}"

    def find_revisions(self) -> Revisions:
        return find_revisions(self.read, self._engine.dialect.name, self._label)

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _as_unavailable(self, error: exc.DBAPIError) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"database {self._label}: {' '.join(str(error.orig).split())}")
