"""A running platform for each module of tests, and its operator's client."""

from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest

from slora_adapters.database.database import Database
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine([deltas_of(b"ok")]), follows=True)


@pytest.fixture
def database(database_place: str) -> Iterator[Database]:
    with closing(Database(database_place)) as opened:
        yield opened


@pytest.fixture(scope="module")
def admin(platform: Platform) -> httpx.Client:
    return platform.api(ADMIN_KEY)
