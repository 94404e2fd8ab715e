"""Where registries are kept: every test of the contract runs on each of them."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from slora_adapters.database import Database
from slora_adapters.redis_storage import open_redis_storage
from slora_adapters.registry_storage import RegistryStorage
from slora_adapters.sqlite_storage import SqliteStorage
from tests.redis_server import RedisServer

OpenStorage = Callable[[], RegistryStorage]


@pytest.fixture(params=["sqlite", "redis"])
def open_storage(request: pytest.FixtureRequest, tmp_path: Path):
    """Opens an empty registry's storage; called again, the same one, as another process would."""
    with ExitStack() as stack:
        yield storage_opener(request.param, tmp_path, stack, request.getfixturevalue)


def storage_opener(
    kind: str, folder: Path, stack: ExitStack, find_fixture: Callable[[str], RedisServer]
) -> OpenStorage:
    """What it opens is closed with the stack."""
    if kind == "sqlite":
        path = folder / "slora.db"
        return lambda: SqliteStorage(stack.enter_context(closing(Database(path))))
    server = find_fixture("shared_redis")
    with server.client() as client:
        client.flushall()
    return lambda: stack.enter_context(closing(open_redis_storage(server.url)))
