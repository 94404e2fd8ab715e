from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.api.console.browser import ConsolePage, open_page, running_browser
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
