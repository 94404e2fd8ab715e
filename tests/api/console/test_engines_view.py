"""The rows of the engines in the view Pool, and the restart of an engine."""

import pytest
from playwright.sync_api import expect

from tests.api.console.browser import ConsolePage
from tests.api.platform import ADMIN_KEY, Platform


@pytest.mark.soak
def test_an_operator_sees_the_engines_and_restarts_them(platform: Platform, view: ConsolePage) -> None:
    platform.engine.names = ("engine-0", "engine-1")
    view.sign_in(ADMIN_KEY, "pool")
    page = view.page
    rows = page.get_by_role("region", name="Engines").get_by_role("row")
    dialog = page.get_by_role("dialog")
    expect(rows.filter(has_text="engine-0")).to_contain_text("serving")
    view.check_accessibility()
    page.get_by_role("button", name="Restart engine-1").click()
    expect(dialog).to_contain_text("No request is refused.")
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(rows.filter(has_text="engine-1")).to_contain_text("it stops, and is then started again")
    assert platform.engine.lost.keys() == {"engine-1"}
    page.get_by_role("button", name="Restart engine-0").click()
    expect(dialog).to_contain_text("No other engine serves.")
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(rows.filter(has_text="engine-0")).to_contain_text("not serving")
    platform.engine.reset()


@pytest.mark.soak
def test_a_tenant_does_not_see_the_engines(platform: Platform, view: ConsolePage) -> None:
    platform.engine.names = ("engine-0", "engine-1")
    view.sign_in(platform.key("no-operator"), "pool")
    expect(view.page.get_by_role("heading", name="Pages", exact=True)).to_be_visible()
    expect(view.page.get_by_text("engine-0")).to_have_count(0)
    platform.engine.reset()
