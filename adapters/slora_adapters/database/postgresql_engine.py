"""PostgreSQL as the control plane's database, shared by several hosts."""

from typing import Any

from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, Connection, Engine

from slora_adapters.errors import StoreUnfit

__all__ = ["check_settings", "lock_by_name", "make_postgresql_engine"]

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


def check_settings(connection: Connection) -> None:
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
