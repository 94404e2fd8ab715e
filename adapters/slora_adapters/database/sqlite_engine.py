"""SQLite as the control plane's database: one file, shared by any number of processes on one host.

A write-ahead log lets readers proceed without waiting. `BEGIN IMMEDIATE` makes writers queue instead of failing in the
middle of a transaction. With `synchronous=FULL`, a committed transaction survives a power failure.

By default, SQLAlchemy's driver begins a transaction only at the first write. So the connections are opened in
autocommit mode, and `Database.transaction` begins each transaction.
"""

import os
import sqlite3
import time
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.pool import QueuePool, StaticPool

from slora_adapters.errors import StoreUnfit
from slora_adapters.process.full_disk import has_space

__all__ = [
    "BUSY_TIMEOUT_S",
    "check_writable",
    "is_disk_full",
    "make_exclusive_engine",
    "make_reading_engine",
    "make_sqlite_engine",
]

# How long a writer waits for another writer. Transactions of the control plane take milliseconds.
BUSY_TIMEOUT_S = 10.0
# The disk space that SQLite may need at once. Its shared memory file takes 32 KiB, and a transaction writes a few
# pages.
_PROBE_BYTES = 128 << 10

# The number of rows in one INSERT. SQLite's driver keeps the last 128 statements of each connection, and an INSERT of
# 100 usage records takes about 120 KiB there. With at most 16 rows, there are at most 16 such statements.
_ROWS_AT_ONCE = 16

_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
)


def make_sqlite_engine(path: Path) -> Engine:
    """Returns an engine for the file. If the file does not exist, the first connection creates it. The number of
    connections is not limited, because connections to a file are cheap. The connection that was used last is used next,
    because each connection has its own cache of pages and statements.
    """

    def connect() -> sqlite3.Connection:
        connection = _open(path)
        try:
            _configure(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    return create_engine(
        "sqlite://",
        creator=connect,
        poolclass=QueuePool,
        pool_size=0,
        pool_use_lifo=True,
        insertmanyvalues_page_size=_ROWS_AT_ONCE,
    )


def make_exclusive_engine(path: Path) -> Engine:
    """Returns an engine with one connection, which locks the whole file. SQLite then uses private memory instead of the
    shared memory file, because a full disk may have no space for that file.
    """

    def connect() -> sqlite3.Connection:
        connection = _open(path)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=StaticPool)


def make_reading_engine(path: Path) -> Engine:
    """Returns an engine with one connection that reads an existing file and cannot change it."""

    def connect() -> sqlite3.Connection:
        place = f"file:{quote(str(path))}?mode=ro"
        return sqlite3.connect(place, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=True)

    return create_engine("sqlite://", creator=connect, poolclass=StaticPool)


def check_writable(path: Path, label: str) -> None:
    """Raises StoreUnfit if SQLite could not write the database. label: the name of the database in error messages."""
    if path.exists() and not os.access(path, os.W_OK):
        raise StoreUnfit(f"the database {label} is read-only: make the file writable")
    if path.parent.exists() and not os.access(path.parent, os.W_OK):
        raise StoreUnfit(
            f"the directory of the database {label} is read-only, but SQLite keeps files beside the database: make "
            "the directory writable"
        )


def is_disk_full(error: BaseException | None, directory: Path) -> bool:
    """Returns whether the disk is full. SQLite reports a broken disk, an exceeded quota or file size limit, and missing
    space for its shared memory with the same codes. For these codes, the function tests whether the disk has space.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        try:
            return not has_space(directory, _PROBE_BYTES)
        except OSError:
            return False
    return code == sqlite3.SQLITE_FULL


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


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
