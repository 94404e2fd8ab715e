"""The operator's views of tenants, keys and the audit log, and a tenant's view of its usage."""

import csv
import time

import pytest
from playwright.sync_api import Browser, Page, expect

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_shipper import UsageShipper
from tests.adapters.hand_made import make_members
from tests.api.console.browser import ConsolePage, Theme, open_page
from tests.api.platform import ADMIN_KEY, Platform

_MARKUP = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
# On the first page of every list.
_LONG = "a" * 128


def confirm(page: Page, verb: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()


def test_a_new_key_is_shown_once_and_names_are_shown_as_text(platform: Platform, view: ConsolePage) -> None:
    platform.key("key-owner")
    page = view.page
    view.sign_in(ADMIN_KEY, "tenants/key-owner")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name").fill(_MARKUP)
    page.get_by_label("adapters:write").uncheck()
    confirm(page, "Create")
    secret = page.locator(".secret").inner_text()
    me = platform.api(secret).get("/v1/me").raise_for_status().json()
    assert (me["name"], me["scopes"]) == (_MARKUP, ["adapters:read", "inference", "usage:read"])
    view.check_accessibility()
    page.get_by_role("button", name="Done").click()
    row = page.get_by_role("region", name="Keys").get_by_role("row").filter(has_text=me["key_id"])
    expect(row).to_contain_text(_MARKUP)
    assert secret not in page.content()
    assert page.locator("main img, main script").count() == 0
    row.get_by_role("button", name="Revoke").click()
    confirm(page, "Revoke")
    expect(row).to_contain_text("revoked")
    assert platform.api(secret).get("/v1/me").status_code == 401


@pytest.mark.soak
def test_tenants_are_sorted_by_their_use_and_show_only_shares_that_differ(
    platform: Platform, view: ConsolePage
) -> None:
    page = view.page
    platform.says("hello")
    for name, num_requests in (("sorted-a", 1), ("sorted-b", 2), ("sorted-c", 0)):
        client = platform.api(platform.key(name))
        for _ in range(num_requests):
            body = {"model": "base", "prompt": "long " * (9 if num_requests == 1 else 1)}
            client.post("/v1/completions", json=body).raise_for_status()
    admin = platform.api(ADMIN_KEY)
    share = {"weight": 2, "max_pool_share": 0.5}
    admin.patch("/admin/tenants/sorted-b", json=share).raise_for_status()
    for number in range(21):
        admin.post("/admin/tenants", json={"name": f"zz-many-{number}"}).raise_for_status()
    platform.find(UsageShipper).ship()
    view.sign_in(ADMIN_KEY, "tenants")
    page.get_by_label("Find a tenant").fill("sorted-")
    names = page.get_by_role("region", name="Tenants").locator("tbody a")
    expect(names).to_have_text(["sorted-a", "sorted-b", "sorted-c"])
    for order, sorted_names in (
        ("Sort by requests today", ["sorted-b", "sorted-a"]),
        ("Sort by tokens today", ["sorted-a", "sorted-b"]),
    ):
        page.get_by_label("Order").select_option(order)
        expect(names).to_have_text(sorted_names)
    rows = page.get_by_role("region", name="Tenants").get_by_role("row")
    expect(rows.filter(has_text="sorted-a").locator("td").last).to_have_text("default")
    share_cell = rows.filter(has_text="sorted-b").locator("td").last
    expect(share_cell).to_have_text("weight 2, 0 % to 50 % of the pool")
    view.check_accessibility()
    page.get_by_label("Find a tenant").fill("zz-many-")
    expect(page.get_by_text('No busy tenant has "zz-many-" in its name.')).to_be_visible()


@pytest.mark.soak
def test_a_key_is_rotated_and_its_quota_is_set(platform: Platform, view: ConsolePage) -> None:
    key_id = platform.key("rotation").split("_")[1]
    page = view.page
    view.sign_in(ADMIN_KEY, "tenants/rotation")
    page.get_by_role("button", name=f"Quota of the key {key_id}").click()
    page.get_by_label("Requests in 60 s").fill("7")
    confirm(page, "Set the quota")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name=f"Rotate the key {key_id}").click()
    confirm(page, "Rotate")
    secret = page.locator(".secret").inner_text()
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("region", name="Keys")).to_contain_text("replaced")
    client = platform.api(secret)
    limits = [one["limits"] for one in client.get("/v1/quotas").raise_for_status().json()["data"]]
    assert [one["requests_per_minute"] for one in limits] == [None, 7]


@pytest.mark.soak
def test_a_tenant_is_created_limited_suspended_resumed_and_purged(
    platform: Platform, view: ConsolePage
) -> None:
    view.allow("status of 40")
    page = view.page
    view.sign_in(ADMIN_KEY, "tenants")
    page.get_by_role("button", name="New tenant").click()
    view.check_accessibility()
    page.get_by_label("Name").fill(_MARKUP)
    confirm(page, "Create")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("a name has 1 to 128 characters")
    page.get_by_label("Name").fill("short-lived")
    page.get_by_label("Weight").fill("2")
    confirm(page, "Create")
    expect(page.get_by_role("heading", name="short-lived")).to_be_focused()
    key = platform.key("short-lived")
    platform.upload(key, "greeter").raise_for_status()
    platform.says("hello")
    platform.api(key).post("/v1/completions", json={"model": "greeter", "prompt": "x"}).raise_for_status()
    platform.find(UsageShipper).ship()
    page.get_by_role("button", name="Change the quota").click()
    page.get_by_label("Tokens this month").fill("5000")
    confirm(page, "Set the quota")
    expect(page.get_by_text("of 5,000")).to_be_visible()
    page.get_by_role("button", name="Suspend").click()
    confirm(page, "Suspend")
    expect(page.locator(".title")).to_contain_text("suspended")
    assert platform.api(key).get("/v1/models").status_code == 403
    page.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    expect(page.locator(".title")).to_contain_text("active")
    page.get_by_role("button", name="Purge").click()
    purge = page.get_by_role("dialog").get_by_role("button", name="Purge")
    page.get_by_label("Type short-lived to confirm").fill("short-live")
    expect(purge).to_be_disabled()
    page.keyboard.type("d")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The tenant was purged.")).to_be_visible()
    assert platform.api(ADMIN_KEY).get("/admin/tenants/short-lived").status_code == 404
    view.open("#/adapters")
    used = page.get_by_role("region", name="Adapters used today").get_by_role("row")
    row = used.filter(has_text="short-lived")
    expect(row).to_contain_text("purged")
    expect(row.get_by_role("link")).to_have_count(0)


def test_usage_has_a_cost_and_is_saved_as_csv(platform: Platform, view: ConsolePage) -> None:
    key = platform.key("accountant")
    platform.says("hello")
    used = (
        platform.api(key)
        .post("/v1/completions", json={"model": "base", "prompt": "x"})
        .raise_for_status()
        .json()["usage"]
    )
    platform.find(UsageShipper).ship()
    # A line of a batch costs half.
    line = UsageRecord(
        *("line", platform.tenant_id("accountant"), key.split("_")[1], None),
        time.time(),
        RequestUsage(100, 0, 20),
        is_batch=True,
    )
    UsageLedger(platform.services.foundation.database).add([line])
    page = view.page
    view.sign_in(ADMIN_KEY, "tenants/accountant")
    expect(page.get_by_text("There are no prices, so there is no cost.")).to_be_visible()
    page.get_by_role("button", name="Set the prices").click()
    view.check_accessibility()
    for name, value in (("Currency", "EUR"), ("Tokens in", "1000000"), ("Tokens out", "1000000")):
        page.get_by_role("dialog").get_by_label(name, exact=True).fill(value)
    confirm(page, "Set the prices")
    cost = f"{used['total_tokens'] + 60} EUR"
    expect(page.get_by_text("Cost of the last 24 hours")).to_contain_text(cost)
    page.get_by_role("button", name="Sign out").click()
    view.sign_in(key, "usage")
    expect(page.get_by_text("Cost of the last 24 hours")).to_contain_text(cost)
    expect(page.get_by_role("button", name="Set the prices")).to_have_count(0)
    view.check_accessibility()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    names, row = csv.reader(download.value.path().read_text(encoding="utf-8").splitlines())
    saved = dict(zip(names, row, strict=True))
    assert (saved["Model"], saved["Requests"], saved["Cost in EUR"]) == ("base", "2", cost.split()[0])


@pytest.mark.soak
def test_a_suspended_tenant_is_signed_out_with_the_reason(platform: Platform, view: ConsolePage) -> None:
    view.allow("status of 403")
    key = platform.key("suspended")
    view.sign_in(key, "usage")
    expect(view.page.get_by_text("Quota of the tenant")).to_be_visible()
    platform.api(ADMIN_KEY).post("/admin/tenants/suspended/suspend").raise_for_status()
    view.page.get_by_role("button", name="Refresh").first.click()
    expect(view.page.locator(".notice")).to_contain_text("The tenant `suspended` is suspended")


@pytest.mark.soak
def test_the_audit_log_is_filtered_and_paged(platform: Platform, view: ConsolePage) -> None:
    admin = platform.api(ADMIN_KEY)
    admin.post("/admin/tenants", json={"name": "audited"})
    for number in range(52):
        admin.post("/admin/tenants/audited/keys", json={"name": f"{number} {_MARKUP}"}).raise_for_status()
    page = view.page
    view.sign_in(ADMIN_KEY, "audit")
    page.get_by_label("Tenant").fill("audited")
    page.get_by_label("Action").fill("key")
    page.get_by_role("button", name="Show").click()
    rows = page.get_by_role("region", name="Audit log").locator("tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Older").click()
    expect(rows).to_have_count(2)
    rows.last.get_by_text("Show").click()
    expect(rows.last.locator("pre")).to_contain_text("0 <script>")
    assert page.locator("main img, main script").count() == 0
    view.check_accessibility()
    page.get_by_role("button", name="Newer").click()
    expect(rows).to_have_count(50)


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_long_names_fit_both_themes_and_widths(
    browser: Browser, platform: Platform, theme: Theme, width: int
) -> None:
    key = platform.key(_LONG)
    platform.engine.reset()
    platform.says("word " * 40 + "w" * 300)
    platform.upload(key, _LONG, make_members()).raise_for_status()
    client = platform.api(key)
    move = {"versions": {"1": 100}}
    client.put(f"/v1/adapters/{_LONG}/aliases/{_LONG}", json=move).raise_for_status()
    client.post("/v1/files", data={"purpose": "batch"}, files={"file": (_MARKUP, b"{}")}).raise_for_status()
    admin = platform.api(ADMIN_KEY)
    admin.post(f"/admin/tenants/{_LONG}/keys", json={"name": "k" * 128}).raise_for_status()
    admin.put(f"/admin/tenants/{_LONG}/adapters/{_LONG}/pin").raise_for_status()
    views = {
        key: ("adapters", f"adapters/{_LONG}", "usage", "playground"),
        ADMIN_KEY: ("adapters", "tenants", f"tenants/{_LONG}", "audit"),
    }
    for secret, names in views.items():
        with open_page(browser, platform.url, theme=theme, width=width) as console:
            console.sign_in(secret)
            for name in names:
                console.open(f"#/{name}")
                console.page.get_by_text(_LONG).first.wait_for()
                console.page.wait_for_load_state("networkidle")
                if name == "playground":
                    console.page.get_by_label("User").fill("x" * 1000)
                    console.page.get_by_role("button", name="Send").click()
                    expect(console.page.locator(".answers")).to_contain_text("complete")
                console.check_accessibility()
                console.check_width()
            assert console.page.locator("main img, main script").count() == 0
