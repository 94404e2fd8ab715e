"""The control plane's database: reads, transactions and named locks, on SQLite or PostgreSQL.

Opening a database migrates it to this release; see `migration.py`. Every call blocks, so no call may run on an event
loop.

SQLite has one writer at a time. On PostgreSQL, transactions take named locks, so that the same rules hold there:

- CHANGES for a transaction that publishes a change or adds to the audit log. No other such transaction runs at the same
  time, on any host.
- `blob_lock(digest)` for a transaction that adds or removes a reference to a blob, or drops the blob.

A transaction that needs both takes the lock of the blob first.

On a full disk, a SQLite database is read-only. Opening an up-to-date database writes nothing. SQLite keeps a shared
memory file beside the database. If the disk has no space even for that file, one connection reads without it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock, RLock
from typing import Any

from sqlalchemy import exc, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import Executable

from slora_adapters.database import schema
from slora_adapters.database.engines import (
    BUSY_TIMEOUT_S,
    check_postgresql_settings,
    check_writable,
    is_disk_full,
    label_database,
    lock_by_name,
    make_exclusive_engine,
    make_postgresql_engine,
    make_sqlite_engine,
    parse_database_url,
)
from slora_adapters.database.migration import SCHEMA, is_current, upgrade
from slora_adapters.errors import DatabaseUnavailable, DiskFull, StoreUnavailable
from slora_adapters.process.full_disk import DiskReserve

CHANGES = "changes"
# After a failed connection, calls fail for this long without a new attempt. Each attempt would block a thread until it
# times out.
_PAUSE_S = 1.0


def blob_lock(digest: str) -> str:
    return f"blob {digest}"


class Snapshot:
    """A connection on which all queries see the database as it was at `begin`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def begin(self) -> None:
        if self.connection.dialect.name == "sqlite":
            self.connection.exec_driver_sql("BEGIN")
        # The snapshot is taken by the first query.
        self.connection.execute(select(schema.platform.c.id))


class Database:
    """A database, which is created or migrated if necessary. All methods may be called from several threads.

    place: the path of a SQLite file, or a URL; see `parse_database_url`.
    reserve: the disk reserve on the disk of a SQLite file; None if there is no reserve.
    on_change: called after the commit of each transaction that held the lock CHANGES, on the same thread. Not called if
        the transaction has `is_cached=False`.
    is_behind: whether another process has committed a change that this process's caches may lack. Caches of the
        database then find nothing.
    clock: monotonic seconds.

    Methods raise StoreUnavailable if the database does not answer, cannot be opened, read or written, or stays locked.
    They raise DiskFull if the disk of a SQLite file has no space. The constructor also raises StoreUnfit if the
    database is read-only, or if the settings of a PostgreSQL server allow the loss of changes.
    """

    def __init__(
        self,
        place: Path | str,
        reserve: DiskReserve | None = None,
        on_change: Callable[[], None] = lambda: None,
        is_behind: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        url = parse_database_url(str(place))
        self._path = Path(url.database or "") if url.get_backend_name() == "sqlite" else None
        # The name of the database in messages, without a password.
        self.label = label_database(url)
        self._reserve = reserve if self._path else None
        self._on_change = on_change
        self.is_behind = is_behind
        self._clock = clock
        self._engine = make_sqlite_engine(self._path) if self._path else make_postgresql_engine(url)
        # Transactions of this process queue here for CHANGES, without a connection. Only one transaction at a time
        # waits in the database.
        self._changing = Lock()
        # The error of the last attempt to connect to PostgreSQL; empty if the attempt succeeded. While there is an
        # error, only one call at a time tries to connect.
        self._last_error = ""
        self._retry_at = 0.0
        self._retrying = Lock()
        self._exclusive: Engine | None = None
        self._exclusive_lock = RLock()
        self._closed = False
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        if self._path is None:
            with self._connection() as connection:
                check_postgresql_settings(connection)
        else:
            check_writable(self._path, self.label)
        if not is_current(self.read, self._engine.dialect.name, self.label):
            with self.transaction(SCHEMA) as connection:
                upgrade(connection, self.label)

    @property
    def path(self) -> Path | None:
        """The file of a SQLite database; None for PostgreSQL."""
        return self._path

    @contextmanager
    def transaction(
        self, *locks: str, even_if_full: bool = False, is_cached: bool = True
    ) -> Iterator[Connection]:
        """Yields a connection in a transaction that holds the named locks. The transaction is committed at the end of
        the block, and rolled back if the block raises.

        is_cached: whether caches may hold what the transaction changes.
        even_if_full: for changes that free space or are urgent. On a full disk, the disk reserve makes room for them.
        They should write few rows, because the reserve is small. Other transactions raise DiskFull there.
        """
        if self._reserve is not None and not even_if_full:
            self._reserve.check()
        elif self._reserve is not None and (self._reserve.is_full or not self._reserve.watch()):
            self._reserve.free()
        with self._waiting_in_line(locks), self._connection() as connection:
            try:
                if self._path:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                else:
                    for name in locks:
                        lock_by_name(connection, name)
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise
        if CHANGES in locks and is_cached:
            self._on_change()

    def read(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """Returns all rows of one query."""
        if self._exclusive is not None and self._reserve is not None and self._reserve.is_full:
            return self._read_exclusively(statement, parameters)
        try:
            with self._connection() as connection:
                if self._path is None:
                    connection = connection.execution_options(isolation_level="AUTOCOMMIT")
                return connection.execute(statement, parameters).fetchall()
        except DiskFull:
            return self._read_exclusively(statement, parameters)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a connection for several queries on one snapshot. Other transactions are not blocked."""
        with self._connection() as connection:
            if self._path is None:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            try:
                yield Snapshot(connection)
            finally:
                connection.rollback()

    def close(self) -> None:
        """Closes all connections: idle ones now, and those that other threads use when they are done. A later call
        opens a connection of its own.
        """
        self._closed = True
        self._close_exclusive()
        self._engine.pool.dispose()

    @contextmanager
    def _waiting_in_line(self, locks: Sequence[str]) -> Iterator[None]:
        if CHANGES not in locks:
            yield
        elif self._changing.acquire(timeout=BUSY_TIMEOUT_S):
            try:
                yield
            finally:
                self._changing.release()
        else:
            raise DatabaseUnavailable(
                f"database {self.label}: earlier changes took longer than {BUSY_TIMEOUT_S:.0f} s, so this change was "
                "not made; try again"
            )

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        is_full = self._reserve is not None and self._reserve.is_full
        try:
            # On a full disk, a new connection and the exclusive one would wait for each other's locks.
            with self._exclusive_lock if is_full else nullcontext():
                self._close_exclusive()
                with self._connect() as connection:
                    yield connection
        except exc.IntegrityError:
            raise
        except (exc.DBAPIError, exc.TimeoutError) as error:
            raise self._as_unavailable(error) from error
        finally:
            if self._closed:
                self._engine.pool.dispose()

    def _connect(self) -> Connection:
        if self._path:
            return self._connect_to_file(self._path)
        if not self._last_error:
            return self._connect_to_server()
        if self._clock() < self._retry_at or not self._retrying.acquire(blocking=False):
            raise DatabaseUnavailable(self._last_error)
        try:
            return self._connect_to_server()
        finally:
            self._retrying.release()

    def _connect_to_file(self, path: Path) -> Connection:
        try:
            return self._engine.connect()
        except exc.DBAPIError as error:
            if not (
                is_disk_full(error.orig, path.parent) and self._reserve is not None and self._reserve.free()
            ):
                raise
            return self._engine.connect()

    def _connect_to_server(self) -> Connection:
        try:
            connection = self._engine.connect()
        except exc.DBAPIError as error:
            self._last_error = str(self._as_unavailable(error))
            self._retry_at = self._clock() + _PAUSE_S
            raise
        self._last_error = ""
        return connection

    def _as_unavailable(self, error: exc.SQLAlchemyError) -> StoreUnavailable:
        cause = error.orig if isinstance(error, exc.DBAPIError) else error
        if self._path and is_disk_full(cause, self._path.parent):
            if self._reserve is not None:
                self._reserve.report_full()
            return DiskFull(self._path.parent)
        return DatabaseUnavailable(f"database {self.label}: {' '.join(str(cause).split())}")

    def _read_exclusively(self, statement: Executable, parameters: Mapping[str, Any] | None) -> Sequence[Any]:
        """Reads through one connection with an exclusive lock on the file. The connection is closed as soon as a normal
        connection is needed. Raises StoreUnavailable.
        """
        assert self._path is not None
        if not self._path.exists():
            raise DiskFull(self._path.parent)
        try:
            with self._exclusive_lock:
                if self._exclusive is None:
                    self._exclusive = make_exclusive_engine(self._path)
                with self._exclusive.connect() as connection:
                    return connection.execute(statement, parameters).fetchall()
        except exc.OperationalError as error:
            raise DatabaseUnavailable(f"database {self.label}: {error.orig}") from error
        finally:
            if self._closed:
                self._close_exclusive()

    def _close_exclusive(self) -> None:
        if self._exclusive is None:
            return
        with self._exclusive_lock:
            exclusive, self._exclusive = self._exclusive, None
            if exclusive is not None:
                exclusive.dispose()
