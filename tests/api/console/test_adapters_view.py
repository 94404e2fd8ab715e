"""The view of adapters: upload, certificate, refusal, aliases, deletion, and names that try to be markup."""

import base64
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from playwright.sync_api import Page, expect

from slora_api.keys.key_record import DEFAULT_SCOPES, Scope
from tests.adapters.hand_made import make_members, make_tensors, write_directory
from tests.api.conftest import Kit
from tests.api.console.browser import ConsolePage
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.served import Served
from tests.support.hub import COMMIT, running_hub

_REFUSED = "status of 422"
_MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def files_of(directory: Path, members: dict[str, bytes]) -> list[Path]:
    return sorted(write_directory(directory, members).iterdir())


def choose(page: Page, files: list[Path], name: str) -> None:
    page.get_by_label("Files of the adapter").set_input_files(files)
    page.get_by_label("Name of the adapter").fill(name)
    page.get_by_role("button", name="Upload").click()


def spoil(members: dict[str, bytes]) -> dict[str, bytes]:
    """The same adapter with several faults."""
    config = json.loads(members["adapter_config.json"])
    config |= {"use_qalora": True, "use_bdlora": {"nblocks": 2}, "kasa_config": {"beta": 1e-4}}
    return members | {"adapter_config.json": json.dumps(config).encode()}


def test_an_upload_shows_each_reason_for_refusal_and_then_the_certificate(
    platform: Platform, view: ConsolePage, tmp_path: Path
) -> None:
    view.allow(_REFUSED)
    key, page = platform.key("uploads"), view.page
    members = make_members()
    refused = platform.upload(key, "greeter", spoil(members)).json()["error"]
    assert len(refused["reasons"]) >= 3
    view.sign_in(key, "adapters")
    expect(page.locator("main")).to_contain_text("There are no adapters yet.")
    choose(page, files_of(tmp_path / "bad", spoil(members)), "greeter")
    for reason in refused["reasons"]:
        expect(page.get_by_role("alert")).to_contain_text(reason["message"])
    choose(page, files_of(tmp_path / "good", members), "greeter")
    expect(page.locator(".notice.good")).to_contain_text("greeter@1 passed all checks")
    expect(page.get_by_role("region", name="Modules of the adapter")).to_be_visible()
    page.get_by_role("region", name="Adapters").get_by_role("link", name="greeter").click()
    expect(page.get_by_role("region", name="Versions")).to_contain_text("latest 100 %")
    digest = platform.api(key).get("/v1/adapters/greeter").json()["digest"]
    expect(page.get_by_role("region", name="Versions")).to_contain_text(digest[:12])
    view.check_accessibility()


@pytest.mark.soak
def test_a_key_without_a_scope_gets_no_controls_for_it(platform: Platform, view: ConsolePage) -> None:
    platform.upload(platform.key("readers"), "greeter").raise_for_status()
    body = {"scopes": ["adapters:read"], "name": _MARKUP}
    made = platform.api(ADMIN_KEY).post("/admin/tenants/readers/keys", json=body).raise_for_status().json()
    view.sign_in(made["key"], "adapters/greeter")
    expect(view.page.get_by_role("region", name="Aliases")).to_contain_text("greeter@latest")
    assert view.views() == ["Adapters", "Key"]
    for name in ("Prewarm", "Delete", "Set weights", "New alias"):
        assert view.page.get_by_role("button", name=name).count() == 0
    view.open("#/adapters")
    expect(view.page.get_by_role("link", name="greeter")).to_be_visible()
    assert view.page.get_by_text("Upload an adapter").count() == 0


@pytest.mark.soak
def test_a_new_version_is_rolled_out_to_a_tenth_and_rolled_back(
    platform: Platform, view: ConsolePage
) -> None:
    key, page = platform.key("roll-out"), view.page
    for seed in (1, 2):
        platform.upload(key, "greeter", make_members(tensors=make_tensors(seed=seed))).raise_for_status()
    view.sign_in(key, "adapters/greeter")
    page.get_by_role("button", name="New alias").click()
    view.check_accessibility()
    page.get_by_label("Name of the alias").fill("prod")
    page.get_by_label("Percentage of version 2").fill("0")
    expect(page.get_by_role("button", name="Create")).to_be_disabled()
    page.get_by_label("Percentage of version 1").fill("100")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_text("The alias prod was moved.")).to_be_visible()
    page.get_by_role("button", name="Set the weights of prod").click()
    page.get_by_role("button", name="Roll out 10 % of version 2").click()
    page.get_by_role("button", name="Move the alias").click()
    row = page.get_by_role("region", name="Aliases").get_by_role("row").filter(has_text="prod")
    expect(row).to_contain_text("@1 90 %")
    expect(row).to_contain_text("@2 10 %")
    page.get_by_role("button", name="Roll back prod").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(row).to_contain_text("@1 100 %")
    alias = platform.api(key).get("/v1/adapters/greeter/aliases/prod").json()
    assert alias["versions"] == {"1": 100}


@pytest.mark.soak
def test_an_alias_that_another_client_has_moved_is_not_overwritten(
    platform: Platform, view: ConsolePage
) -> None:
    view.allow("status of 409")
    key, page = platform.key("races"), view.page
    for seed in (1, 2):
        platform.upload(key, "greeter", make_members(tensors=make_tensors(seed=seed))).raise_for_status()
    client = platform.api(key)
    route = "/v1/adapters/greeter/aliases/prod"
    client.put(route, json={"versions": {"1": 100}}).raise_for_status()
    view.sign_in(key, "adapters/greeter")
    page.get_by_role("button", name="Set the weights of prod").click()
    client.put(route, json={"versions": {"1": 50, "2": 50}}).raise_for_status()
    page.get_by_role("button", name="Version 2 for all").click()
    page.get_by_role("button", name="Move the alias").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()
    assert client.get(route).json()["versions"] == {"1": 50, "2": 50}


@pytest.mark.soak
def test_deletions_need_a_confirmation_and_show_why_they_are_refused(
    platform: Platform, view: ConsolePage
) -> None:
    view.allow("status of 409")
    key, page = platform.key("deletions"), view.page
    for seed in (1, 2):
        platform.upload(key, "greeter", make_members(tensors=make_tensors(seed=seed))).raise_for_status()
    view.sign_in(key, "adapters/greeter")
    page.get_by_role("button", name="Delete version 2").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("latest")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Delete version 2")).to_be_focused()
    page.get_by_role("button", name="Delete version 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Version 1 was deleted.")).to_be_visible()
    page.get_by_role("button", name="Delete adapter").click()
    confirm = page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True)
    expect(confirm).to_be_disabled()
    page.get_by_label("Type greeter to confirm").fill("greeter")
    confirm.click()
    expect(page.locator("main")).to_contain_text("There are no adapters yet.")


@pytest.mark.soak
def test_files_are_dropped_and_the_name_is_shown_as_text(platform: Platform, view: ConsolePage) -> None:
    view.allow("status of 400")
    page = view.page
    view.sign_in(platform.key("drops"), "adapters")
    page.get_by_text("Drop the folder").wait_for()
    files = {name: base64.b64encode(raw).decode() for name, raw in make_members().items()}
    page.evaluate(
        """files => {
          const data = new DataTransfer();
          for (const [name, text] of Object.entries(files))
            data.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name));
          const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
          document.querySelector(".drop").dispatchEvent(event);
        }""",
        {**files, _MARKUP: ""},
    )
    expect(page.get_by_text("Not uploaded:")).to_contain_text(_MARKUP)
    page.get_by_label("Name of the adapter").fill(_MARKUP)
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_role("alert")).to_contain_text("<img src=x")
    page.get_by_label("Name of the adapter").fill("dropped")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator(".notice.good")).to_contain_text("dropped@1 passed all checks")
    assert page.locator("main img").count() == 0
    assert page.title() == "Adapters · slora console"


@pytest.mark.soak
def test_a_file_over_the_limit_is_refused_before_it_is_sent(
    platform: Platform, view: ConsolePage, tmp_path: Path
) -> None:
    page = view.page
    view.sign_in(platform.key("large"), "adapters")
    files = files_of(tmp_path / "large", make_members())
    page.route("**/v1/limits", lambda route: route.fulfill(json={**route.fetch().json(), "upload_bytes": 10}))
    choose(page, files, "large")
    expect(page.get_by_role("alert")).to_contain_text("the server accepts at most 10 B")
    assert not any(one.method == "POST" for one in view.requests)


@pytest.mark.soak
def test_files_that_are_no_adapter_are_named(platform: Platform, view: ConsolePage, tmp_path: Path) -> None:
    view.sign_in(platform.key("no-adapter"), "adapters")
    files = files_of(tmp_path / "other", {"adapter_model.bin": b"x", "adapter_config.json": b"{}"})
    view.page.get_by_label("Files of the adapter").set_input_files(files)
    expect(view.page.locator(".notice")).to_contain_text("There is no adapter_model.safetensors.")
    assert view.page.get_by_role("button", name="Upload", exact=True).count() == 0


@pytest.mark.soak
def test_an_operator_finds_the_adapters_of_a_tenant(platform: Platform, view: ConsolePage) -> None:
    page = view.page
    platform.upload(platform.key("findable"), "never-used").raise_for_status()
    view.sign_in(ADMIN_KEY, "adapters")
    search, rows = (
        page.get_by_label("Find an adapter"),
        page.get_by_role("region", name="All adapters").locator("tbody tr"),
    )
    search.fill("without-ad")
    expect(rows).to_have_text(['No adapter or tenant has "without-ad" in its name.'])
    for wanted in ("findab", "never-u"):
        search.fill(wanted)
        expect(rows).to_contain_text(["findablenever-used"])
    view.check_accessibility()
    rows.get_by_role("link", name="findable").click()
    expect(page.get_by_role("region", name="Adapters of the tenant")).to_contain_text("never-used")


@pytest.mark.soak
def test_an_operator_uploads_an_adapter_for_a_tenant(
    platform: Platform, view: ConsolePage, tmp_path: Path
) -> None:
    key, page = platform.key("served-by-us"), view.page
    view.sign_in(ADMIN_KEY, "tenants/served-by-us")
    page.get_by_role("button", name="Upload an adapter").click()
    view.check_accessibility()
    choose(page, files_of(tmp_path / "good", make_members()), "greeter")
    expect(page.locator(".notice.good")).to_contain_text("greeter@1 passed all checks")
    panel = page.get_by_role("region", name="Adapters of the tenant")
    expect(panel.get_by_role("row").filter(has_text="greeter")).to_be_visible()
    client = platform.api(key)
    assert [one["name"] for one in client.get("/v1/adapters").json()["data"]] == ["greeter"]


@pytest.mark.soak
def test_a_key_with_the_scope_names_an_adapter_of_the_hub(platform: Platform, view: ConsolePage) -> None:
    platform.key("hub-user")
    scopes = {*DEFAULT_SCOPES, Scope.ADAPTERS_HUB}
    key = platform.services.keys.admin.create_key(platform.tenant_id("hub-user"), scopes=scopes)[1].secret
    page = view.page
    view.sign_in(key, "adapters")
    with running_hub() as hub, patch.dict(os.environ, HF_ENDPOINT=hub.url):
        hub.revisions["org/Voice-2", "main"] = COMMIT
        hub.files["org/Voice-2", COMMIT] = make_members()
        page.get_by_label("an adapter of the Hugging Face hub").fill("org/Voice-2")
        expect(page.get_by_label("Name of the adapter")).to_have_value("voice-2")
        view.check_accessibility()
        page.get_by_role("button", name="Upload", exact=True).click()
        expect(page.locator(".notice.good")).to_contain_text("voice-2@1 passed all checks")
    expect(page.locator("main")).to_contain_text(f"from hf://org/Voice-2@{COMMIT}")


@pytest.mark.soak
def test_an_operator_pins_and_unpins_an_adapter(platform: Platform, view: ConsolePage) -> None:
    view.allow("status of 404")
    page = view.page
    platform.upload(platform.key("pinned"), "greeter").raise_for_status()
    view.sign_in(ADMIN_KEY, "adapters")
    page.get_by_role("combobox", name="Tenant").fill("pinned")
    page.get_by_role("textbox", name="Adapter").fill("nothing")
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("nothing")
    page.get_by_role("textbox", name="Adapter").fill("greeter")
    page.get_by_role("button", name="Pin", exact=True).click()
    pins = page.get_by_role("region", name="Pinned adapters")
    expect(pins).to_contain_text("greeter")
    view.check_accessibility()
    page.get_by_role("button", name="Unpin greeter of pinned").click()
    expect(pins).to_contain_text("No adapter is pinned.")


@pytest.mark.soak
def test_an_adapter_of_a_real_server_is_uploaded_and_seen_in_the_page_pool(
    server: Served, kit: Kit, console: ConsolePage
) -> None:
    key, page = server.make_key("console-upload"), console.page
    console.sign_in(key, "adapters")
    files = [kit.wide / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    choose(page, files, "wide")
    expect(page.locator(".notice.good")).to_contain_text("wide@1 passed all checks")
    with server.client(key) as client:
        body = {"model": "wide", "prompt": "hello", "max_tokens": 4}
        client.post("/v1/completions", json=body).raise_for_status()
    page.get_by_role("button", name="Refresh").click()
    row = page.get_by_role("region", name="Adapters").get_by_role("row").filter(has_text="wide")
    expect(row).to_contain_text("loaded")
    row.get_by_role("link", name="wide").click()
    page.get_by_role("button", name="Prewarm version 1").click()
    expect(page.get_by_text("wide@1 is in the page pool")).to_be_visible()
