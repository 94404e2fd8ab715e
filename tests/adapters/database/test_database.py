import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event, insert, select, text, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import Pool

from slora_adapters.database import schema
from slora_adapters.database.database import CHANGES, Database, blob_lock
from slora_adapters.database.engines import parse_database_url
from slora_adapters.errors import DiskFull, StoreUnavailable, StoreUnfit
from slora_adapters.process.full_disk import DiskReserve
from tests.postgresql_server import PostgresqlServer
from tests.support.file_limit import largest_file
from tests.support.forked_program import ForkedProgram

WAIT_S = 300
NAMES = select(schema.adapter_names.c.name).order_by(schema.adapter_names.c.name)


def add(database: Database, name: str, *, even_if_full: bool = False) -> None:
    row = {"tenant": "t", "name": name, "last_number": 1, "created_at": 1.0}
    with database.transaction(CHANGES, even_if_full=even_if_full) as connection:
        connection.execute(insert(schema.adapter_names), row)


def names(database: Database) -> list[str]:
    return [name for (name,) in database.read(NAMES)]


def increment(database: Database) -> None:
    with database.transaction(CHANGES) as connection:
        (number,) = connection.execute(select(schema.adapter_names.c.last_number)).one()
        connection.execute(update(schema.adapter_names).values(last_number=number + 1))


def count(database: Database) -> int:
    ((number,),) = database.read(select(schema.adapter_names.c.last_number))
    return int(number)


@pytest.fixture
def database(database_place: str) -> Iterator[Database]:
    database = Database(database_place)
    yield database
    database.close()


def test_a_block_that_raises_is_undone(database: Database) -> None:
    with pytest.raises(KeyError), database.transaction(CHANGES) as connection:
        row = {"tenant": "t", "name": "x", "last_number": 1, "created_at": 1.0}
        connection.execute(insert(schema.adapter_names), row)
        raise KeyError
    assert names(database) == []
    add(database, "x")


def test_integrity_errors_reach_the_caller_as_they_are(database: Database) -> None:
    add(database, "x")
    with pytest.raises(IntegrityError):
        add(database, "x")
    row = {"key_id": "k", "tenant": "nobody", "digest": b"", "created_at": 1}
    with pytest.raises(IntegrityError), database.transaction(CHANGES) as connection:
        connection.execute(insert(schema.api_keys), row)


def test_inserts_of_any_number_of_rows_share_few_statements(tmp_path: Path) -> None:
    """The driver keeps prepared statements. The memory of an API process grew, because each number of usage records
    had a statement of its own, with 12 parameters for each record."""
    seen: set[str] = set()

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT"):
            seen.add(statement)

    added = insert(schema.erased_keys).returning(schema.erased_keys.c.key_id)
    with closing(Database(tmp_path / "slora.db")) as database:
        event.listen(Engine, "before_cursor_execute", record)
        try:
            for number in range(1, 200):
                with database.transaction() as connection:
                    rows = [{"key_id": f"{number}-{row}"} for row in range(number)]
                    assert len(connection.execute(added, rows).all()) == number
        finally:
            event.remove(Engine, "before_cursor_execute", record)
    assert len(seen) <= 17 and max(statement.count("?") for statement in seen) <= 16


@contextmanager
def closing_all_connections() -> Iterator[None]:
    """Checks that all connections that are opened in the context are closed at its end."""
    opened, closed = list[object](), list[object]()

    def note_opened(connection: object, _record: object) -> None:
        opened.append(connection)

    def note_closed(connection: object, _record: object) -> None:
        closed.append(connection)

    event.listen(Pool, "connect", note_opened)
    event.listen(Pool, "close", note_closed)
    try:
        yield
    finally:
        event.remove(Pool, "connect", note_opened)
        event.remove(Pool, "close", note_closed)
    assert len(opened) >= 2 and set(map(id, closed)) == set(map(id, opened))


def test_a_connection_in_use_while_the_database_is_closed_is_closed_afterwards(database_place: str) -> None:
    """Born from a bug: a server that stopped while a thread used its database left the connection to the collector."""
    with closing_all_connections():
        database = Database(database_place)
        with database.snapshot(), pytest.raises(KeyError), database.transaction(CHANGES):
            database.close()
            raise KeyError
        assert names(database) == []


def test_a_read_on_a_full_disk_while_the_database_is_closed_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a review: its connection locks the whole file."""

    def find_no_space() -> None:
        raise DiskFull(tmp_path)

    with closing_all_connections():
        database = Database(tmp_path / "adapters.db")
        database.close()
        monkeypatch.setattr(database, "_connect", find_no_space)
        assert names(database) == []


def test_names_are_sorted_in_byte_order(database: Database) -> None:
    """PostgreSQL would sort by the locale of the server, in which punctuation hardly counts."""
    for name in ("b", "a_b", "a.b-c", "ab", "a-b"):
        add(database, name)
    assert names(database) == ["a-b", "a.b-c", "a_b", "ab", "b"]


def test_increments_by_many_threads_all_count(database: Database) -> None:
    add(database, "x")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: increment(database), range(80)))
    assert count(database) == 81


INCREMENTS = """
import sys
from sqlalchemy import select, update
from slora_adapters.database import schema
from slora_adapters.database.database import CHANGES, Database
database = Database(sys.argv[1])
for _ in range(25):
    with database.transaction(CHANGES) as connection:
        (number,) = connection.execute(select(schema.adapter_names.c.last_number)).one()
        connection.execute(update(schema.adapter_names).values(last_number=number + 1))
database.close()
"""


def test_increments_by_several_processes_all_count(database_place: str) -> None:
    with closing(Database(database_place)) as database:
        add(database, "x")
        for program in [ForkedProgram(INCREMENTS, database_place) for _ in range(2)]:
            status, output = program.finish()
            assert status == 0, output
        assert count(database) == 51


KILLED_WRITER = """
import os, signal, sys
from sqlalchemy import insert
from slora_adapters.database import schema
from slora_adapters.database.database import CHANGES, Database
database = Database(sys.argv[1])
for name in ("committed", "torn"):
    with database.transaction(CHANGES) as connection:
        row = {"tenant": "t", "name": name, "last_number": 1, "created_at": 1.0}
        connection.execute(insert(schema.adapter_names), row)
        if name == "torn":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_inside_a_transaction_loses_only_uncommitted_changes(database_place: str) -> None:
    """Its locks end with it, too."""
    status, output = ForkedProgram(KILLED_WRITER, database_place).finish()
    assert status == -9, output
    with closing(Database(database_place)) as database:
        assert names(database) == ["committed"]
        add(database, "after")


# -- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", [CHANGES, blob_lock("d")])
def test_transactions_with_the_same_lock_exclude_each_other(database_place: str, lock: str) -> None:
    order: list[str] = []
    with closing(Database(database_place)) as first, closing(Database(database_place)) as second:

        def run() -> None:
            with second.transaction(lock):
                order.append("second")

        with first.transaction(lock):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(0.3)
            order.append("first")
        thread.join(WAIT_S)
    assert order == ["first", "second"]


def test_on_postgresql_a_blob_that_is_being_dropped_does_not_stop_other_changes(
    shared_postgresql: PostgresqlServer,
) -> None:
    """A store may take long to drop a blob."""
    with closing(Database(shared_postgresql.migrated_database())) as database:
        with database.transaction(blob_lock("d")):
            add(database, "x")
            with database.transaction(blob_lock("e")):
                pass
        assert names(database) == ["x"]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_postgresql_database_in_another_encoding_is_refused_with_the_remedy(
    shared_postgresql: PostgresqlServer, encoding: str
) -> None:
    name = f"t_{encoding.lower()}"
    shared_postgresql.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
    )
    with pytest.raises(StoreUnfit, match=f"has the encoding {encoding}.* ENCODING 'UTF8'"):
        Database(shared_postgresql.url(name))
    shared_postgresql.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_transaction_sees_what_the_previous_holder_of_the_lock_committed(
    shared_postgresql: PostgresqlServer,
) -> None:
    """Even if the server's default isolation level takes the snapshot before the transaction waits for the lock."""
    place = shared_postgresql.make_database()
    name = shared_postgresql.name_of(place)
    shared_postgresql.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    with closing(Database(place)) as first, closing(Database(place)) as second:
        add(first, "x")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(increment, [first, second] * 20))
        assert count(first) == 41


# -- what cannot be used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("mysql://host/name", "not mysql://"),
        ("postgresql+asyncpg://host/name", r"not postgresql\+asyncpg://"),
        ("sqlite://", "not sqlite://"),
        ("postgresql://user:secret@host:port/name", "not a URL such as"),
    ],
)
def test_other_urls_are_refused_without_their_password(place: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_database_url(place)
    assert "secret" not in str(caught.value)


def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="unable to open"):
        Database(tmp_path / "nowhere" / "slora.db")


@pytest.mark.parametrize("read_only", ["slora.db", "."])
def test_a_sqlite_file_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, read_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may write everywhere but to a file system that is mounted read-only."""
    Database(tmp_path / "slora.db").close()
    place = (tmp_path / read_only).resolve()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and real(path, mode))
    with pytest.raises(StoreUnfit, match=r"is read-only.*make the (file|directory) writable"):
        Database(tmp_path / "slora.db")


def test_a_server_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="No such file or directory") as caught:
        Database(f"postgresql://slora:secret@/name?host={tmp_path}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("default_transaction_read_only = on", "is read-only: name the primary server"),
        ("synchronous_commit = off", "set synchronous_commit = on"),
    ],
)
def test_a_postgresql_database_that_cannot_keep_changes_is_refused(
    shared_postgresql: PostgresqlServer, setting: str, message: str
) -> None:
    place = shared_postgresql.make_database()
    shared_postgresql.execute(f"ALTER DATABASE {shared_postgresql.name_of(place)} SET {setting}")
    with pytest.raises(StoreUnfit, match=message):
        Database(place)


def test_after_an_outage_the_database_answers_again(postgresql_server: PostgresqlServer) -> None:
    now = 0.0
    with closing(Database(postgresql_server.make_database(), clock=lambda: now)) as database:
        add(database, "before")
        postgresql_server.kill()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                names(database)
        with pytest.raises(StoreUnavailable):
            add(database, "refused")
        postgresql_server.start()
        with pytest.raises(StoreUnavailable):
            names(database)  # it is not tried again before the pause is over
        now = 60.0
        assert names(database) == ["before"]


# -- SQLite ------------------------------------------------------------------------------------------------------------


def test_foreign_keys_and_full_sync_are_on(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        assert database.read(text("PRAGMA foreign_keys")) == [(1,)]
        assert database.read(text("PRAGMA synchronous")) == [(2,)]
        assert database.read(text("PRAGMA journal_mode")) == [("wal",)]


def test_a_write_on_a_full_disk_says_so_and_is_tried_again_only_if_it_cannot_wait(tmp_path: Path) -> None:
    database = Database(tmp_path / "slora.db", reserve := DiskReserve(tmp_path / "reserve", 1 << 20))
    add(database, "before")
    with largest_file(16_000):
        for name in ("first", "second"):
            with pytest.raises(DiskFull, match=f"the disk of {tmp_path} is full, so this change is refused"):
                add(database, name)
            assert reserve.is_full
        with pytest.raises(DiskFull):
            add(database, "urgent", even_if_full=True)
        assert names(database) == ["before"]
        assert not reserve.watch()
    with pytest.raises(DiskFull):
        add(database, "room is back but was not looked for")
    add(database, "urgent", even_if_full=True)
    assert reserve.watch()
    add(database, "after")
    assert names(database) == ["after", "before", "urgent"]
    database.close()


def test_an_up_to_date_database_is_opened_without_writing(tmp_path: Path) -> None:
    """Born from a bug: a server could not start on a full disk, because each start wrote the versions of the tables
    again."""
    path = tmp_path / "slora.db"
    database = Database(path)
    add(database, "x")
    with largest_file(0):
        # As after a kill: SQLite's write-ahead log and shared-memory file still exist.
        again = Database(path)
        assert names(again) == ["x"]
        again.close()
    database.close()
    assert not path.with_name("slora.db-wal").exists()
    with largest_file(0):
        # As after a clean stop: the disk has no room even for the shared-memory file.
        last = Database(path)
        assert names(last) == ["x"]
        with pytest.raises(DiskFull), last.transaction():
            pass
    add(last, "y")
    assert names(last) == ["x", "y"], "the room is back"
    last.close()
