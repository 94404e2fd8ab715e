"""Signing in to the console and out of it, in a real browser."""

import time

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.api.console.browser import ConsolePage, Theme, open_page
from tests.api.platform import Platform
from tests.api.served import ADMIN_KEY, Served

_UNAUTHORIZED = "status of 401"


def make_key(server: Served, tenant: str, **body: object) -> dict[str, str]:
    """Creates a tenant and a key. Returns the key's object."""
    with server.client(ADMIN_KEY) as admin:
        admin.post("/admin/tenants", json={"name": tenant})
        made: dict[str, str] = (
            admin.post(f"/admin/tenants/{tenant}/keys", json=body).raise_for_status().json()
        )
    return made


def test_a_wrong_key_is_refused_and_the_right_one_signs_in_with_the_views_of_its_scopes(
    server: Served, console: ConsolePage
) -> None:
    console.allow(_UNAUTHORIZED)
    attempt, page = "<img src=x onerror=\"document.title='owned'\">", console.page
    key = make_key(server, "console-keys", scopes=["inference"], name=attempt)["key"]
    console.open()
    page.get_by_label("API key or admin key").fill("sk-wrong")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_contain_text("The server does not accept this key.")
    console.check_accessibility()
    page.keyboard.type(key)  # the field has the focus, and its content is selected
    page.keyboard.press("Enter")
    expect(page.locator(".who")).to_contain_text("console-keys")
    page.get_by_role("link", name="Key", exact=True).click()
    console.check_accessibility()
    expect(page.locator("main")).to_contain_text(attempt)
    assert page.locator("main img").count() == 0 and page.title() == "Key · slora console"
    assert "Tenants" not in console.views()
    assert page.context.cookies() == [] and not any(key in request.url for request in console.requests)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key or admin key").wait_for()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    # A link with the key signs in, and the key leaves the address.
    console.open(f"#key={key}")
    expect(page.locator(".who")).to_contain_text("console-keys")
    assert key not in page.url
    page.reload()  # the tab keeps the key
    expect(page.locator(".who")).to_contain_text("console-keys")


def test_a_sign_in_link_works_once_and_its_key_is_exchanged(server: Served, console: ConsolePage) -> None:
    """The terminal of the server shows such a link to the operator, who then needs no admin key in the browser."""
    console.allow(_UNAUTHORIZED)
    with server.client(ADMIN_KEY) as admin:
        body = {"name": "sign-in link", "expires_at": int(time.time()) + 300}
        link: str = admin.post("/admin/keys", json=body).raise_for_status().json()["key"]
    console.open(f"#sign-in={link}")
    expect(console.page.locator(".who")).to_contain_text("operator")
    assert link not in console.page.url
    with server.client(link) as client:
        assert client.get("/v1/me").status_code == 401
    kept = console.page.evaluate("sessionStorage.getItem('slora.key')")
    with server.client(kept) as client:
        me = client.get("/v1/me").json()
    assert me["expires_at"] - me["created"] == pytest.approx(12 * 3600, abs=300)
    console.page.get_by_role("button", name="Sign out").click()
    console.open(f"#sign-in={link}")
    expect(console.page.locator(".notice")).to_contain_text("This link was used before")
    console.check_accessibility()


@pytest.mark.soak
def test_a_revoked_key_is_signed_out_with_the_reason(server: Served, console: ConsolePage) -> None:
    console.allow(_UNAUTHORIZED)
    made = make_key(server, "console-revoked")
    console.page.clock.install()
    console.sign_in(made["key"])
    with server.client(ADMIN_KEY) as admin:
        admin.delete(f"/admin/keys/{made['key_id']}").raise_for_status()
    console.page.clock.fast_forward(60_000)
    expect(console.page.locator(".notice")).to_contain_text("It was revoked or has expired.")
    assert console.page.evaluate("sessionStorage.length") == 0


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_sign_in_fits_both_themes_and_widths(
    browser: Browser, server: Served, theme: Theme, width: int
) -> None:
    key = make_key(server, "console-widths")["key"]
    with open_page(browser, server.url, theme=theme, width=width) as console:
        console.open()
        console.check_accessibility()
        console.check_width()
        console.sign_in(key)
        console.check_accessibility()
        console.check_width()


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tabs_that_do_not_fit_a_phone_show_on_which_side_there_are_more(
    browser: Browser, platform: Platform, theme: Theme
) -> None:
    arrows = """['::before', '::after'].map((side) =>
      getComputedStyle(document.querySelector('.tabs'), side).content).join()"""
    with open_page(browser, platform.url, theme=theme, width=390, height=844) as console:
        console.sign_in(ADMIN_KEY, "health")
        tabs = console.page.locator(".tabs")
        expect(tabs).to_have_class("tabs after")
        assert "›" in console.page.evaluate(arrows)
        console.check_accessibility()
        console.page.get_by_role("link", name="Key", exact=True).click()
        expect(tabs).to_have_class("tabs before")
        expect(console.page.get_by_role("link", name="Key", exact=True)).to_be_in_viewport(ratio=1)
        assert "‹" in console.page.evaluate(arrows)
        console.check_accessibility()
        console.page.set_viewport_size({"width": 1440, "height": 900})
        expect(tabs).to_have_class("tabs")


def test_every_valid_key_may_ask_what_it_is(server: Served) -> None:
    made = make_key(server, "console-me", scopes=["usage:read"])
    with server.client(made["key"]) as client:
        me = client.get("/v1/me").raise_for_status().json()
    assert (me["tenant"], me["scopes"], me["key_id"]) == ("console-me", ["usage:read"], made["key_id"])
    assert made["key"] not in str(me)
    with server.client(ADMIN_KEY) as admin:
        assert admin.get("/v1/me").json()["scopes"] == ["admin"]
    assert httpx.get(server.url + "/v1/me", verify=False).status_code == 401
