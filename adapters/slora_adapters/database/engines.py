"""The databases of the control plane: SQLite, which the processes of one host share, and PostgreSQL for several hosts.

SQLite is one file. A write-ahead log lets readers proceed without waiting. `BEGIN IMMEDIATE` makes writers queue
instead of failing in the middle of a transaction. With `synchronous=FULL`, a committed transaction survives a power
failure. By default, SQLAlchemy's driver begins a transaction only at the first write. So the connections are opened in
autocommit mode, and `Database.transaction` begins each transaction.
"""

import os
import sqlite3
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool, StaticPool

from slora_adapters.errors import StoreUnfit
from slora_adapters.process.full_disk import has_space

_POSTGRESQL = ("postgresql", "postgresql+psycopg")


def parse_database_url(text: str) -> URL:
    """Parses postgresql://USER:PASSWORD@HOST/NAME, sqlite:///PATH, or a path of a SQLite file. Raises ValueError for
    any other string, or if the package of the database is not installed. The message contains no password.
    """
    if "://" not in text:
        return URL.create("sqlite", database=str(Path(text)))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError("the database is not a URL such as postgresql://USER:PASSWORD@HOST/NAME") from None
    if url.drivername in _POSTGRESQL:
        try:
            version("psycopg")
        except PackageNotFoundError:
            raise ValueError(
                "a postgresql:// database needs the package psycopg: pip install 'slora[postgresql]'"
            ) from None
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database:
        return url
    raise ValueError(
        f"a database is a file, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, not {url.drivername}://"
    )


def label_database(url: URL) -> str:
    """Returns the name of a database for messages, without a password."""
    return repr(
        url.database if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )


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


# A request may wait for a connection, so an unreachable server must be detected soon.
_CONNECT_S = 5
# Maximum number of connections per process. They serve lookups that are not cached, and one change at a time.
_MAX_CONNECTIONS = 16
# A host that crashes must not keep its locks, so the server checks idle connections. A process that hangs in a
# transaction must not keep its locks either, so the server ends idle transactions.
_SESSION = """
    SET lock_timeout = '10s';
    SET statement_timeout = '30s';
    SET idle_in_transaction_session_timeout = '5min';
    SET tcp_keepalives_idle = 15;
    SET tcp_keepalives_interval = 5;
    SET tcp_keepalives_count = 3;
"""


def make_postgresql_engine(url: URL) -> Engine:
    """Returns an engine for the server. It connects at the first use.

    The isolation level is set, because a server may have another default. At a stricter level, a transaction that has
    waited for a lock would not see what the previous holder of the lock committed.
    """
    engine = create_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        pool_size=_MAX_CONNECTIONS // 2,
        max_overflow=_MAX_CONNECTIONS - _MAX_CONNECTIONS // 2,
        pool_timeout=_CONNECT_S,
        connect_args={
            "connect_timeout": _CONNECT_S,
            "application_name": "slora",
            "keepalives_idle": 15,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            # Milliseconds after which a connection is closed if the server does not acknowledge sent data.
            "tcp_user_timeout": 20_000,
        },
    )

    # First of all, because SQLAlchemy fails on texts in an unknown encoding when it reads the server's version.
    @event.listens_for(engine, "connect", insert=True)
    def prepare(connection: Any, _record: object) -> None:
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreUnfit(
                f"this PostgreSQL database has the encoding {encoding}, but slora needs UTF8: name a database in "
                "--database that was made with CREATE DATABASE slora ENCODING 'UTF8' TEMPLATE template0"
            )
        connection.execute(_SESSION)
        connection.commit()

    return engine


def lock_by_name(connection: Connection, name: str) -> None:
    """Waits for the lock with this name and takes it. The lock is held until the transaction ends."""
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": f"slora {name}"}
    )


def check_postgresql_settings(connection: Connection) -> None:
    """Raises StoreUnfit if the server could lose acknowledged changes, or is read-only."""
    query = text(
        "SELECT current_setting('fsync'), current_setting('synchronous_commit'), "
        "current_setting('transaction_read_only')"
    )
    fsync, synchronous_commit, read_only = connection.execute(query).one()
    if read_only == "on":
        raise StoreUnfit(
            "this PostgreSQL database is read-only: name the primary server in --database, or reset "
            "default_transaction_read_only"
        )
    faults = [
        f"{name} = on (it is off)"
        for name, value in (("fsync", fsync), ("synchronous_commit", synchronous_commit))
        if value == "off"
    ]
    if faults:
        raise StoreUnfit(
            f"the settings of this PostgreSQL server allow the loss of keys and names: set {' and '.join(faults)}"
        )
