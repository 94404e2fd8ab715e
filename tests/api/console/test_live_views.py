"""The views Pool and Traffic under load, in a real browser."""

import base64
import json
from contextlib import AbstractContextManager

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.api.conftest import Kit
from tests.api.console.browser import ConsolePage, Theme, open_page
from tests.api.console.test_sign_in import make_key
from tests.api.served import ADMIN_KEY, READY_S, Served, serving
from tests.api.server.test_server import upload
from tests.support.repeated_calls import repeating

# A name of an adapter that would be code if it were inserted as HTML is refused, so this one is as odd as names may be.
_ODD_NAME = "odd.name_1"


def load_on(server: Served, key: str, model: str = "base") -> AbstractContextManager[object]:
    """Sends one request after the other."""
    body = {"model": model, "prompt": "a" * 40, "max_tokens": 60, "ignore_eos": True}

    def send() -> None:
        with server.client(key) as client:
            client.post("/v1/completions", json=body)

    return repeating(send)


@pytest.mark.soak
def test_the_pool_shows_the_pages_of_running_requests(server: Served, console: ConsolePage, kit: Kit) -> None:
    key = make_key(server, "pool-owner")["key"]
    upload(server, key, _ODD_NAME, kit.small).raise_for_status()
    with load_on(server, key, _ODD_NAME):
        console.sign_in(key, "pool")
        owners = console.page.get_by_role("region", name="Pages by owner")
        expect(owners.get_by_role("row", name="pool-owner")).to_be_visible()
        events = console.page.get_by_role("region", name="Recent loads")
        expect(console.page.locator(".chart svg")).to_be_visible()
        # Over all cells, one shows the adapter.
        page_map = console.page.get_by_label("Map of the page pool")
        page_map.focus()
        readout = console.page.locator(".readout")
        for _ in range(600):
            console.page.keyboard.press("ArrowRight")
            if f"{_ODD_NAME}@1 of pool-owner" in readout.inner_text():
                break
        else:
            pytest.fail(f"no page of {_ODD_NAME} was found with the keyboard")
        console.check_accessibility()
        console.check_width()
        assert events.is_visible()


def test_the_traffic_of_a_tenant_is_its_own(server: Served, console: ConsolePage) -> None:
    key, other = (make_key(server, name)["key"] for name in ("traffic-owner", "traffic-rival"))
    with load_on(server, key), load_on(server, other):
        console.sign_in(key, "traffic")
        work = console.page.get_by_role("region", name="Share of the computed tokens by adapter")
        expect(work.get_by_role("row", name="base model traffic-owner")).to_be_visible()
        expect(work.get_by_role("row", name="other tenants")).to_be_visible()
        expect(console.page.locator(".chart svg").first).to_be_visible()
        assert "traffic-rival" not in console.page.locator("body").inner_text()
        console.check_accessibility()


@pytest.mark.soak
def test_a_revoked_key_leaves_a_live_view_at_once(server: Served, console: ConsolePage) -> None:
    made = make_key(server, "live-revoked")
    console.sign_in(made["key"], "pool")
    console.page.get_by_label("Map of the page pool").wait_for()
    with server.client(ADMIN_KEY) as admin:
        admin.delete(f"/admin/keys/{made['key_id']}").raise_for_status()
    expect(console.page.locator(".notice")).to_contain_text("It was revoked or has expired.")
    console.page.get_by_label("API key or admin key").wait_for()


def test_the_map_is_the_one_of_the_engine(server: Served) -> None:
    """With all API processes between: the engine draws, and the API translates for the viewer."""
    with server.client(ADMIN_KEY) as operator:
        frame = json.loads(operator.get("/admin/live").text.removeprefix("data: "))
    pool = frame["pool"]
    counts = pool["counts"]
    assert sum(counts.values()) == pool["num_pages"] == server.metric("slora_pages")
    assert pool["stride"] == 1 and base64.b64decode(pool["cells"]).count(0) == counts["free"]


@pytest.mark.soak
@pytest.mark.parametrize("view", ["pool", "traffic"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_live_views_fit_both_themes_and_widths(
    browser: Browser, server: Served, theme: Theme, width: int, view: str
) -> None:
    key = make_key(server, "live-widths")["key"]
    with load_on(server, key), open_page(browser, server.url, theme=theme, width=width) as console:
        console.sign_in(ADMIN_KEY, view)
        console.page.locator(".chart svg").first.wait_for()
        console.check_accessibility()
        console.check_width()


@pytest.mark.soak
def test_the_console_connects_again_after_a_restart_of_the_server(
    browser: Browser, kit: Kit, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = tmp_path_factory.mktemp("restart") / "data"
    with serving(kit.base, data) as first:
        first.wait_until_ready()
        port = str(httpx.URL(first.url).port)
        with open_page(browser, first.url) as console:
            console.allow("ERR_")
            console.allow("status of 503")
            console.sign_in(ADMIN_KEY, "pool")
            console.page.get_by_label("Map of the page pool").wait_for()
            first.process.terminate()
            first.process.wait(READY_S)
            expect(console.page.locator(".notice").first).to_contain_text("connects again by itself")
            with serving(kit.base, data, "--port", port) as second:
                second.wait_until_ready()
                expect(console.page.locator(".page-notice")).to_have_count(0)
                expect(console.page.get_by_label("Map of the page pool")).to_be_visible()


@pytest.mark.soak
def test_the_first_paint_is_fast_and_little_is_loaded(server: Served, console: ConsolePage) -> None:
    console.sign_in(ADMIN_KEY, "pool")
    console.page.get_by_label("Map of the page pool").wait_for()
    loaded = console.page.evaluate(
        "performance.getEntriesByType('resource').filter(one => one.name.includes('/console')).length"
    )
    assert 5 <= loaded <= 20
    assert {httpx.URL(request.url).host for request in console.requests} == {"127.0.0.1"}
