from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.api.console.browser import ConsolePage, open_page, running_browser
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import Served


# Not for the session: Playwright runs an event loop on this thread, so no other test could use `asyncio.run`.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The browser that all tests of the console share."""
    with running_browser() as running:
        yield running


@pytest.fixture
def console(browser: Browser, server: Served) -> Iterator[ConsolePage]:
    """An empty page for the console of the shared server."""
    with open_page(browser, server.url) as page:
        yield page


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """The API over a scripted engine, shared by the tests of views. Each test has tenants of its own."""
    engine = ScriptedEngine(max_model_len=4096)
    with running_platform(tmp_path_factory.mktemp("platform"), engine, follows=True) as running:
        yield running


@pytest.fixture
def view(browser: Browser, platform: Platform) -> Iterator[ConsolePage]:
    """An empty page for the console of the platform."""
    platform.engine.reset()
    with open_page(browser, platform.url) as page:
        yield page
