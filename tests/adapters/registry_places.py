"""The storages of registries. Every test of the registry's contract runs on each storage."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.redis_storage import open_redis_storage
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.registry.sqlite_storage import SqliteStorage
from tests.redis_server import RedisServer


@dataclass
class OpenStorage:
    """Opens a registry's storage. A second call opens the same storage, as another process would.

    url: URL of the Redis server, or empty. Another process needs the database path and the url for `open_registry`.
    """

    stack: ExitStack
    database: Path
    url: str = ""

    def __call__(self) -> RegistryStorage:
        if self.url:
            return self.stack.enter_context(closing(open_redis_storage(self.url)))
        return SqliteStorage(self.stack.enter_context(closing(Database(self.database))))

    @property
    def arguments(self) -> list[str]:
        return [str(self.database), self.url]


@pytest.fixture(params=["sqlite", "redis"])
def open_storage(request: pytest.FixtureRequest, tmp_path: Path):
    """Opens an empty storage."""
    url = empty(request.getfixturevalue("shared_redis")) if request.param == "redis" else ""
    with ExitStack() as stack:
        yield OpenStorage(stack, tmp_path / "slora.db", url)


@contextmanager
def reserved(registry: Registry, digest: str) -> Iterator[str]:
    """Holds a reservation, as an upload does between its blob and its version."""
    reservation = registry.reserve(digest)
    try:
        yield reservation
    finally:
        registry.release(reservation)


def empty(server: RedisServer) -> str:
    """Empties the server and returns its URL."""
    with server.client() as client:
        client.flushall()
    return server.url
