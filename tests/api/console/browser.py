"""Chromium under Playwright, for tests of the console.

Without Chromium on the machine, tests that need one are skipped with the reason. In CI they fail instead.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.support.debian_package import skip_without

__all__ = ["ConsolePage", "Theme", "open_page", "running_browser"]

Theme = Literal["light", "dark"]

# Chromium's own sandbox needs privileges that root in a container lacks.
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
# For each window, Chromium renders the suggestions of its address bar, which takes more CPU time than a page of the
# console. The last three are features that Playwright disables, whose argument this one replaces.
_DISABLED = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "WebUIOmniboxFullPopup")
_ARGUMENTS += [f"--disable-features={','.join((*_DISABLED, 'HttpsUpgrades', 'MediaRouter', 'PaintHolding'))}"]
_PATIENCE_MS = 120_000
# The default of 5 s is too short for a busy machine.
expect.set_options(timeout=_PATIENCE_MS)


# Null, or the first elements that may make the page wider than the window.
_WIDE_ELEMENTS = """() => document.documentElement.scrollWidth <= innerWidth ? null :
  [...document.querySelectorAll("body *")]
    .filter((one) => one.getBoundingClientRect().left + one.scrollWidth > innerWidth)
    .slice(0, 3).map((one) => one.outerHTML.slice(0, 200))"""


@dataclass
class ConsolePage:
    """A page of the browser. errors: what the page has reported and `allow` has not permitted."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    _allowed: list[str] = field(default_factory=list)

    def allow(self, text: str) -> None:
        """Permits errors that contain `text`. Chromium reports each answer with an error status as an error."""
        self._allowed.append(text)

    def open(self, fragment: str = "") -> None:
        self.page.goto(f"{self.url}/console{fragment}")

    def sign_in(self, key: str, view: str = "key") -> None:
        """Signs in as a user does, and opens a view."""
        self.open(f"#/{view}")
        self.page.get_by_label("API key or admin key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation").wait_for()

    def notice(self) -> str:
        """The first message that the page shows."""
        return self.page.locator(".notice").first.inner_text()

    def views(self) -> list[str]:
        self.page.get_by_role("navigation").wait_for()
        return self.page.locator("nav a").all_inner_texts()

    def check_accessibility(self) -> None:
        """Asserts that axe-core finds no violation."""
        found = Axe().run(self.page).response["violations"]
        assert not found, [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]

    def check_width(self) -> None:
        """Asserts that the page needs no horizontal scrolling."""
        wide = self.page.evaluate(_WIDE_ELEMENTS)
        assert wide is None, f"{self.page.url} is too wide: {wide}"

    def check_errors(self) -> None:
        left = [error for error in self.errors if not any(text in error for text in self._allowed)]
        assert not left, left

    def watch(self) -> None:
        """Collects what the page reports, and the requests that it sends."""
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


def _find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Runs Chromium. Skips the test if the machine has none, or fails it in CI."""
    program = _find_chromium()
    if program is None:
        skip_without("Chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS, timeout=_PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    browser: Browser, url: str, *, theme: Theme = "light", width: int = 1440, height: int = 900
) -> Iterator[ConsolePage]:
    """Opens an empty page in a context of its own, which shares no storage with others. At the end the page must have
    reported no errors.
    """
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})
    context.set_default_timeout(_PATIENCE_MS)
    opened = ConsolePage(context.new_page(), url)
    opened.watch()
    try:
        yield opened
        opened.check_errors()
    finally:
        context.close()
