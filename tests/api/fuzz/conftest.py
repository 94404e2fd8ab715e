from collections.abc import Iterator

import pytest

from tests.api.conftest import Kit
from tests.api.fuzz.watched_server import WatchedServer, watched_server


@pytest.fixture(scope="session")
def watched(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    with watched_server(kit.base, kit.small, tmp_path_factory.mktemp("fuzz")) as server:
        yield server
