"""The view Health, which an operator sees first, in a real browser."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from slora_api.metrics.history import MINUTE_S, HistoryFile
from tests.api.console.browser import ConsolePage, Theme, open_page
from tests.api.live.test_history import QUIET
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.served import Served


def write_history(platform: Platform, change: Callable[[int], dict[str, Any]]) -> None:
    """Writes the last 24 hours. change: the minutes until now -> fields of that minute.

    The platform does not record its own minutes, so the last of these is the newest."""
    file = HistoryFile(platform.services.foundation.data.history)
    now = int(time.time()) // MINUTE_S * MINUTE_S
    for back in range(24 * 60, 0, -1):
        file.write({"at": now - back * MINUTE_S, **QUIET, **change(back)})


@pytest.mark.soak
def test_the_operator_sees_first_what_failed_and_when(view: ConsolePage, platform: Platform) -> None:
    def change(back: int) -> dict[str, Any]:
        if back in (10, 11):
            return {
                "answers": {"200": 10, "503": 4},
                "failures": {"503 /v1/chat/completions": 3, "503 /v1/embeddings": 1},
                "failing": {f"503 {platform.tenant_id('turned-away')}": 3, "503 others": 1},
                "restarts": {"engine": 1},
            }
        return {"ledger_lag": 90} if back < 10 else {}

    platform.key("turned-away")
    write_history(platform, change)
    view.open()
    view.page.get_by_label("API key or admin key").fill(ADMIN_KEY)
    view.page.keyboard.press("Enter")
    expect(view.page.get_by_role("heading", level=1)).to_have_text("Health")
    expect(view.page.locator(".notice").first).to_contain_text("Usage has not reached the database")
    failed = view.page.get_by_role("region", name="Failed requests")
    # Tenants are counted by status. A row for each route of a status showed its tenants once for each of its routes.
    expect(failed.get_by_role("row")).to_have_count(2)
    expect(failed.get_by_role("row").nth(1)).to_contain_text("503/v1/chat/completions 6, /v1/embeddings 2")
    expect(failed.get_by_role("row").nth(1)).to_contain_text("8turned-away 6, others 2")
    expect(failed.get_by_role("row").nth(1).locator("td").last).to_have_text("over")
    expect(view.page.get_by_text("Serving since")).to_be_visible()
    events = view.page.get_by_role("region", name="Events of the server")
    expect(events.get_by_role("row").nth(1)).to_contain_text("The process engine died and was restarted.")
    errors = view.page.locator(".figure", has_text="Server errors")
    expect(errors).to_contain_text("8 in the last hour")
    view.page.get_by_role("button", name="24 h").click()
    expect(errors).to_contain_text("8 in the last 24 hours")
    view.check_accessibility()


@pytest.mark.soak
def test_a_tenant_does_not_see_the_health_of_the_host(view: ConsolePage, platform: Platform) -> None:
    view.sign_in(platform.key("health-stranger"))
    assert "Health" not in view.views()


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_view_fits_both_themes_and_widths(
    browser: Browser, server: Served, theme: Theme, width: int
) -> None:
    with open_page(browser, server.url, theme=theme, width=width) as console:
        console.sign_in(ADMIN_KEY, "health")
        expect(console.page.get_by_role("heading", name="Conditions")).to_be_visible()
        console.check_accessibility()
        console.check_width()
