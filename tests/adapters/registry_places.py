"""Where registries are kept: every test of the contract runs on each of them."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.redis_storage import open_redis_storage
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.registry.sqlite_storage import SqliteStorage
from tests.redis_server import RedisServer


@dataclass
class OpenStorage:
    """Opens a registry's storage; called again, the same one, as another process would.

    url: of the Redis, or empty; both are what another process needs for `open_registry`.
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
    """It is empty."""
    url = empty(request.getfixturevalue("shared_redis")) if request.param == "redis" else ""
    with ExitStack() as stack:
        yield OpenStorage(stack, tmp_path / "slora.db", url)


def empty(server: RedisServer) -> str:
    """Its URL."""
    with server.client() as client:
        client.flushall()
    return server.url
