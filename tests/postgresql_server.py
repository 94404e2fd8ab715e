"""A real PostgreSQL server for tests: the binaries of the machine as plain processes, which can be killed.

Without a server on the machine, tests that need one are skipped with the reason. In CI they fail instead.
"""

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import psycopg
import pytest

from slora_adapters.database import schema
from slora_adapters.database.database import Database
from tests.support.debian_package import skip_without

# Long, because a slow machine or disk is not an error.
_DEADLINE_S = 300.0
_USER, _EMPTY, _MIGRATED = "slora", "empty", "migrated"


def _find_binaries() -> Path | None:
    """The directory of initdb and postgres. Debian keeps it out of the path."""
    found = shutil.which("initdb")
    if found and shutil.which("postgres", path=str(Path(found).parent)):
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


def _other_user() -> str | None:
    """The user to run the server as, because it refuses to run as root; None to run it as the current user."""
    if os.geteuid() != 0:
        return None
    known = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@cache
def _make_cluster(binaries: Path, user: str | None) -> Path:
    """Makes the folder of data that each server of this process copies: `initdb` takes a second of CPU time."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    if user:
        shutil.chown(folder, user)
    options = ["-D", "data", "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync"]
    if "--icu-locale" in _run(folder, user, binaries / "initdb", "--help"):  # from PostgreSQL 15 on
        # Its order of names is not the byte order, as on most servers.
        options += ["--locale-provider=icu", "--icu-locale=en-US"]
    _run(folder, user, binaries / "initdb", *options)
    return folder / "data"


def _group(user: str | None) -> int | None:
    return pwd.getpwnam(user).pw_gid if user else None


def _run(folder: Path, user: str | None, *command: str | Path) -> str:
    done = subprocess.run(
        command, cwd=folder, user=user, group=_group(user), capture_output=True, text=True,
        extra_groups=[] if user else None, encoding="utf-8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class PostgresqlServer:
    """One server in its own folder, on a Unix socket. It writes to disk as in production."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._user = _other_user()
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: dict[str, psycopg.Connection] = {}
        if self._user:
            shutil.chown(folder, self._user)
        _run(folder, self._user, "cp", "-a", _make_cluster(binaries, self._user), "data")

    def start(self) -> None:
        """Starts the server on the data of an earlier run, and waits until it accepts connections. A no-op if it
        runs."""
        if self._process is not None:
            return
        # Shared memory is in the folder, too, so that a killed server leaves none behind.
        settings = ("listen_addresses=", "max_connections=200", "dynamic_shared_memory_type=mmap")
        options = ["-D", "data", "-k", str(self.folder)]
        options += [part for setting in settings for part in ("-c", setting)]
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [self._binaries / "postgres", *options],
                    cwd=self.folder, user=self._user, group=_group(self._user), stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, extra_groups=[] if self._user else None,
                )  # fmt: skip
            while self._process.poll() is None:
                try:
                    psycopg.connect(self.url("postgres")).close()
                    return
                except psycopg.OperationalError:
                    assert time.monotonic() < deadline, self._log()
                    time.sleep(0.02)
            # The processes of a killed server may still hold its shared memory.
            assert time.monotonic() < deadline, self._log()
            time.sleep(0.05)

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@/{database}?host={self.folder}"

    def name_of(self, url: str) -> str:
        """The name of the database in a URL of `url`."""
        return url.removeprefix(self.url("")[: -len(f"?host={self.folder}")]).partition("?")[0]

    def make_database(self) -> str:
        """Makes an empty database and returns its URL."""
        name = f"t_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def empty_database(self) -> str:
        """Empties a database that tests share, and returns its URL. A new database would take more files and time."""
        self._open_shared(_EMPTY).execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return self.url(_EMPTY)

    def migrated_database(self) -> str:
        """Returns the URL of a database that tests share, with the tables of this release and no rows."""
        url = self.url(_MIGRATED)
        if _MIGRATED not in self._shared:
            self._open_shared(_MIGRATED)
            Database(url).close()
            return url
        tables = [table.name for table in reversed(schema.metadata.sorted_tables)]
        self._open_shared(_MIGRATED).execute(
            "".join(f"DELETE FROM {table};" for table in tables)
            + "INSERT INTO platform (id) VALUES (gen_random_uuid());"
            "INSERT INTO changes (nonce, tenant, name, key_id, orphaned, moved_pin) "
            "VALUES (gen_random_uuid(), '', '', '', '[]', false)"
        )
        return url

    def _open_shared(self, name: str) -> psycopg.Connection:
        """A connection to a database that tests share, which is made at the first call. The connection stays open,
        because a new one would cost more than the statements on it."""
        if name not in self._shared:
            self.execute(f"CREATE DATABASE {name}")
            self._shared[name] = psycopg.connect(self.url(name), autocommit=True)
        return self._shared[name]

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def kill(self) -> None:
        """Kills all processes of the server at once, as in a crash of the machine."""
        if self._process is not None:
            postmaster = psutil.Process(self._process.pid)
            postmaster.suspend()  # it starts no further process
            for process in (*postmaster.children(), postmaster):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(_DEADLINE_S)
            self._process = None

    def stop(self) -> None:
        """Stops the server. SIGTERM would wait for open connections, and SIGINT would write all data to disk."""
        for connection in self._shared.values():
            connection.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_DEADLINE_S)
            self._process = None

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")[-2000:]


@contextmanager
def running_postgresql() -> Iterator[PostgresqlServer]:
    """Runs a server in a new folder. Skips the test if the machine has none, or fails it in CI."""
    binaries = _find_binaries()
    if binaries is None:
        skip_without("PostgreSQL server", "postgresql")
    # A short path, because a socket path may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        Path(folder).chmod(0o755)
        server = PostgresqlServer(Path(folder), binaries)
        server.start()
        try:
            yield server
        finally:
            server.start()  # a server that the test has killed removes what is left in memory
            server.stop()


@pytest.fixture(scope="session")
def shared_postgresql() -> Iterator[PostgresqlServer]:
    """A server that tests share. No test kills it."""
    with running_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mortal_postgresql() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        yield server


@pytest.fixture
def postgresql_server(mortal_postgresql: PostgresqlServer) -> PostgresqlServer:
    """A running server that the test may kill. Other tests have used other databases of it."""
    mortal_postgresql.start()
    return mortal_postgresql
