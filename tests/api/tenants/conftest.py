"""A running platform for each module of tests, and its operator's client."""

from collections.abc import Iterator

import httpx
import pytest

from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path_factory.mktemp("data"), engine, follows=True) as running:
        yield running


@pytest.fixture(scope="module")
def admin(platform: Platform) -> httpx.Client:
    return platform.api(ADMIN_KEY)
