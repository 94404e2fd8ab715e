"""One SQLite file for several processes: connections, transactions, and migrations by component.

A write-ahead log lets readers proceed without waiting. `BEGIN IMMEDIATE` makes writers queue instead of failing in the
middle of a transaction. With `synchronous=FULL`, a committed transaction survives a power failure. Each component
(registry, tenancy, ...) owns its tables and an append-only tuple of migrations. Each migration is one string of SQL.
The file stores for each component how many migrations were applied.

This module defines only the table of applied migrations. Every call blocks: a read takes about ten microseconds, and a
write a fraction of a millisecond. So an event loop should run writes on a thread.

On a full disk the database is read-only. Opening an up-to-date database writes nothing. If the disk has no space even
for the shared memory file that SQLite keeps beside the database, one connection reads without that file: see
`_read_exclusively`.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_adapters.full_disk import has_space

# Version of the table of applied migrations, stored in the user_version of the file.
LAYOUT_VERSION = 1
# How long a writer waits for another writer. Transactions here take milliseconds.
BUSY_TIMEOUT_S = 10.0
# The space that SQLite may need at once: its shared memory is 32 KiB, and a transaction here writes a few pages.
_PROBE_BYTES = 128 << 10

_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
)


class Database:
    """A database file, created if it does not exist. All methods may be called from several threads.

    reserve: the disk reserve on the same disk; None if there is no reserve. Methods raise StoreUnavailable if the file
    cannot be opened, read or written, or stays locked. Methods raise DiskFull if the disk has no space.
    """

    def __init__(self, path: Path | str, reserve: DiskReserve | None = None) -> None:
        self.path = Path(path)
        self._reserve = reserve
        self._idle: list[sqlite3.Connection] = []
        self._lock = Lock()
        self._exclusive: sqlite3.Connection | None = None
        self._exclusive_lock = Lock()
        if not self._is_prepared():
            with self.transaction() as connection:
                self._prepare(connection)

    def migrate(
        self,
        component: str,
        migrations: Sequence[str],
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Applies a component's missing migrations in one transaction. Migrations already applied must never change.

        functions: SQL functions, by name, that the migrations call. Raises StoreUnavailable if a newer release has
        applied more migrations than this release has.
        """
        query = "SELECT version FROM schema_versions WHERE component = ?"
        if self.read(query, (component,)) == [(len(migrations),)]:
            return
        with self.transaction() as connection:
            row = connection.execute(query, (component,)).fetchone()
            applied: int = row[0] if row else 0
            if applied > len(migrations):
                raise StoreUnavailable(
                    f"{str(self.path)!r} has schema version {applied} of {component!r}, but this "
                    f"release supports at most {len(migrations)}: run the newer release, or restore "
                    "an older copy of the file"
                )
            for name, function in functions.items():
                connection.create_function(name, -1, function, deterministic=True)
            for migration in migrations[applied:]:
                for statement in _split_statements(migration):
                    connection.execute(statement)
            connection.execute(
                "INSERT INTO schema_versions VALUES (?1, ?2) ON CONFLICT DO UPDATE SET version = ?2",
                (component, len(migrations)),
            )

    @contextmanager
    def transaction(self, *, even_if_full: bool = False) -> Iterator[sqlite3.Connection]:
        """Yields a connection that holds the write lock. The transaction is committed at the end of the block, and
        rolled back if the block raises.

        even_if_full: try the transaction even while the disk counts as full. Use it for changes that free space or are
        urgent. Raises DiskFull.
        """
        if self._reserve is not None and not even_if_full:
            self._reserve.check()
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def read(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Returns all rows of one query."""
        if self._exclusive is not None and self._reserve is not None and self._reserve.is_full:
            return self._read_exclusively(query, parameters)
        try:
            with self._connection() as connection:
                return connection.execute(query, parameters).fetchall()
        except DiskFull:
            return self._read_exclusively(query, parameters)

    def free_reserve(self) -> bool:
        """Frees the disk reserve for an urgent transaction. Returns whether the reserve existed."""
        return self._reserve is not None and self._reserve.free()

    def close(self) -> None:
        """Closes all idle connections. Later calls open new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        self._close_exclusive()
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lends a connection from the idle list. Connections are not bound to threads, so a thread pool does not keep
        one connection per thread.
        """
        if self._exclusive is not None:
            self._close_exclusive()
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            connection = connection or self._connect()
            try:
                yield connection
            finally:
                with self._lock:
                    self._idle.append(connection)
        except sqlite3.OperationalError as error:
            if self._is_disk_full(error):
                if self._reserve is not None:
                    self._reserve.report_full()
                raise DiskFull(self.path.parent) from error
            raise StoreUnavailable(f"database {str(self.path)!r}: {error}") from error

    def _is_disk_full(self, error: sqlite3.OperationalError) -> bool:
        """Returns whether the disk is full. SQLite reports a broken disk, an exceeded quota or file size limit, and
        missing space for its shared memory with the same codes. For these codes, the function tests whether the disk
        has space.
        """
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            try:
                return not has_space(self.path.parent, _PROBE_BYTES)
            except OSError:
                return False
        return code == sqlite3.SQLITE_FULL

    def _read_exclusively(self, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Reads through one connection with an exclusive lock on the file. SQLite then uses private memory in place of
        the shared memory file.

        The connection is closed as soon as a normal connection is needed. Raises StoreUnavailable.
        """
        if not self.path.exists():
            raise DiskFull(self.path.parent)
        try:
            with self._exclusive_lock:
                if self._exclusive is None:
                    self._exclusive = sqlite3.connect(
                        self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
                    )
                    self._exclusive.execute("PRAGMA locking_mode = EXCLUSIVE")
                return self._exclusive.execute(query, parameters).fetchall()
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"database {str(self.path)!r}: {error}") from error

    def _close_exclusive(self) -> None:
        with self._exclusive_lock:
            exclusive, self._exclusive = self._exclusive, None
            if exclusive is not None:
                exclusive.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.OperationalError as error:
            if not (self._is_disk_full(error) and self.free_reserve()):
                raise
            return self._open()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            _configure(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _is_prepared(self) -> bool:
        if not self.path.exists():
            return False
        ((found,),) = self.read("PRAGMA user_version")
        return bool(found == LAYOUT_VERSION)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > LAYOUT_VERSION:
            raise StoreUnavailable(
                f"{str(self.path)!r} has database layout {found}, but this release supports at most "
                f"{LAYOUT_VERSION}: run the newer release, or restore an older copy of the file"
            )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_versions "
            "(component TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT"
        )
        connection.execute(f"PRAGMA user_version = {LAYOUT_VERSION}")


def _configure(connection: sqlite3.Connection) -> None:
    # Retry, because SQLite ignores the busy timeout when several processes switch a new file to WAL at the same time.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            for pragma in _PRAGMAS:
                connection.execute(pragma)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _split_statements(script: str) -> Iterator[str]:
    """Yields the statements of a script. `executescript` would commit the open transaction."""
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            if statement.strip("; \n\t"):
                yield statement
            statement = ""
    if statement.strip("; \n\t"):
        raise ValueError(f"a migration ends inside a statement: {statement.strip()[:80]!r}")
