import multiprocessing
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull, StoreUnavailable
from tests.support.file_limit import largest_file

FIRST = "CREATE TABLE things (name TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;"
SECOND = "ALTER TABLE things ADD COLUMN note TEXT DEFAULT 'a;b'; CREATE INDEX things_by_n ON things (n);"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "slora.db")
    yield database
    database.close()


def test_migrations_are_applied_once_and_forward(database: Database) -> None:
    database.migrate("things", (FIRST,))
    with database.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('x', 1)")
    database.migrate("things", (FIRST, SECOND))
    database.migrate("things", (FIRST, SECOND))
    assert database.read("SELECT * FROM things") == [("x", 1, "a;b")]
    assert database.read("SELECT * FROM schema_versions") == [("things", 2)]


def test_components_migrate_independently(database: Database) -> None:
    database.migrate("things", (FIRST, SECOND))
    database.migrate("others", ("CREATE TABLE others (x INTEGER) STRICT",))
    rows = database.read("SELECT * FROM schema_versions ORDER BY component")
    assert rows == [("others", 1), ("things", 2)]


def test_a_database_of_a_newer_release_is_refused(database: Database) -> None:
    database.migrate("things", (FIRST, SECOND))
    with pytest.raises(
        StoreUnavailable, match="schema version 2 of 'things', but this release supports at most 1"
    ):
        database.migrate("things", (FIRST,))
    with database.transaction() as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreUnavailable, match="newer release"):
        Database(database.path)


def test_a_migration_that_fails_leaves_nothing_behind(database: Database) -> None:
    with pytest.raises(StoreUnavailable):
        database.migrate("things", (FIRST, "CREATE TABLE more (x INTEGER) STRICT; SELECT * FROM nowhere;"))
    assert database.read("SELECT name FROM sqlite_master WHERE name IN ('things', 'more')") == []
    database.migrate("things", (FIRST,))


def test_an_unfinished_statement_in_a_migration_raises(database: Database) -> None:
    with pytest.raises(ValueError, match="ends inside a statement"):
        database.migrate("things", ("CREATE TABLE x (t TEXT DEFAULT 'open",))


def test_a_block_that_raises_is_undone(database: Database) -> None:
    database.migrate("things", (FIRST,))
    with pytest.raises(KeyError), database.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('x', 1)")
        raise KeyError
    assert database.read("SELECT * FROM things") == []


def test_integrity_errors_reach_the_caller_as_they_are(database: Database) -> None:
    database.migrate("things", (FIRST,))
    with pytest.raises(sqlite3.IntegrityError), database.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('x', NULL)")


def test_foreign_keys_and_full_sync_are_on(database: Database) -> None:
    assert database.read("PRAGMA foreign_keys") == [(1,)]
    assert database.read("PRAGMA synchronous") == [(2,)]
    assert database.read("PRAGMA journal_mode") == [("wal",)]


def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="unable to open"):
        Database(tmp_path / "nowhere" / "slora.db")


def test_increments_by_many_threads_all_count(database: Database) -> None:
    database.migrate("things", (FIRST, "INSERT INTO things VALUES ('x', 0);"))

    def increment(_: int) -> None:
        with database.transaction() as connection:
            [(n,)] = connection.execute("SELECT n FROM things").fetchall()
            connection.execute("UPDATE things SET n = ?", (n + 1,))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(increment, range(80)))
    assert database.read("SELECT n FROM things") == [(80,)]


def _open_and_increment(path: Path) -> None:
    database = Database(path)
    database.migrate("things", (FIRST, "INSERT INTO things VALUES ('x', 0);"))
    for _ in range(25):
        with database.transaction() as connection:
            [(n,)] = connection.execute("SELECT n FROM things").fetchall()
            connection.execute("UPDATE things SET n = ?", (n + 1,))
    database.close()


def test_processes_may_make_and_migrate_the_same_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "slora.db"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_open_and_increment, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    database = Database(path)
    assert database.read("SELECT n FROM things") == [(75,)]
    database.close()


KILLED_WRITER = """
import os, signal, sys
from slora_adapters.database.database import Database
database = Database(sys.argv[1])
database.migrate("things", (sys.argv[2],))
with database.transaction() as connection:
    connection.execute("INSERT INTO things VALUES ('committed', 1)")
with database.transaction() as connection:
    connection.execute("INSERT INTO things VALUES ('torn', 1)")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_inside_a_transaction_loses_only_uncommitted_changes(tmp_path: Path) -> None:
    path = tmp_path / "slora.db"
    command = [sys.executable, "-P", "-c", KILLED_WRITER, str(path), FIRST]
    assert subprocess.run(command, env={"PYTHONPATH": "adapters:kernels"}, check=False).returncode == -9
    database = Database(path)
    assert database.read("SELECT name FROM things") == [("committed",)]
    with database.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('after', 1)")
    database.close()


def test_a_write_on_a_full_disk_says_so_and_is_tried_again_only_if_it_cannot_wait(tmp_path: Path) -> None:
    database = Database(tmp_path / "slora.db", reserve := DiskReserve(tmp_path / "reserve", 1 << 20))
    database.migrate("things", (FIRST,))

    def insert(name: str, *, even_if_full: bool = False) -> None:
        with database.transaction(even_if_full=even_if_full) as connection:
            connection.execute("INSERT INTO things VALUES (?, 1)", (name,))

    insert("before")
    with largest_file(16_000):
        for name in ("first", "second"):
            with pytest.raises(DiskFull, match=f"the disk of {tmp_path} is full, so this change is refused"):
                insert(name)
            assert reserve.is_full
        with pytest.raises(DiskFull):
            insert("urgent", even_if_full=True)
        assert database.read("SELECT name FROM things") == [("before",)]
        assert not reserve.watch()
    with pytest.raises(DiskFull):
        insert("room is back but was not looked for")
    insert("urgent", even_if_full=True)
    assert reserve.watch()
    insert("after")
    assert database.read("SELECT name FROM things ORDER BY rowid") == [("before",), ("urgent",), ("after",)]
    database.close()


def test_an_up_to_date_database_is_opened_without_writing(tmp_path: Path) -> None:
    """Born from a bug: a server could not start on a full disk, because each start wrote the versions of the tables
    again."""
    path = tmp_path / "slora.db"
    database = Database(path)
    database.migrate("things", (FIRST,))
    with database.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('x', 1)")
    with largest_file(0):
        # As after a kill: SQLite's write-ahead log and shared-memory file still exist.
        again = Database(path)
        again.migrate("things", (FIRST,))
        assert again.read("SELECT name FROM things") == [("x",)]
        again.close()
    database.close()
    assert not path.with_name("slora.db-wal").exists()
    with largest_file(0):
        # As after a clean stop: the disk has no room even for the shared-memory file.
        last = Database(path)
        last.migrate("things", (FIRST,))
        assert last.read("SELECT name FROM things") == [("x",)]
        with pytest.raises(DiskFull), last.transaction():
            pass
    with last.transaction() as connection:
        connection.execute("INSERT INTO things VALUES ('y', 1)")
    assert last.read("SELECT name FROM things") == [("x",), ("y",)], "the room is back"
    last.close()
