"""The playground: answers of several models side by side, errors, stopping, and the copied requests."""

import os
import subprocess
import sys

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.api.console.browser import ConsolePage
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import deltas_of
from tests.api.served import wait_for

_MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def hold_answers(platform: Platform) -> None:
    """Answers begin from now on, and end only if the client leaves or the server ends them."""
    platform.engine.reset(deltas_of(b"it begins.")[:-1])
    platform.engine.hang = True


def answer(page: Page, model: str) -> Locator:
    return page.get_by_role("region", name=f"Answer of {model}")


def send(page: Page, prompt: str) -> None:
    page.get_by_label("User").fill(prompt)
    page.get_by_role("button", name="Send").click()


def test_one_prompt_is_answered_by_an_adapter_and_the_base_side_by_side(
    platform: Platform, view: ConsolePage
) -> None:
    key, page = platform.key("playground"), view.page
    platform.upload(key, "greeter").raise_for_status()
    platform.says(f"hello {_MARKUP}")
    view.sign_in(key, "playground")
    page.get_by_label("System").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    send(page, "Who are you?")
    for model in ("base", "greeter"):
        expect(answer(page, model)).to_contain_text(f"hello {_MARKUP}")
        expect(answer(page, model)).to_contain_text("complete")
    expect(answer(page, "greeter")).to_contain_text("answered by greeter@1")
    assert page.locator("main img").count() == 0
    assert platform.last_prompt() == "[system]Be brief.[user]Who are you?"
    sent = platform.engine.requests[-2:]
    assert sorted(len(one.adapters) for one in sent) == [0, 1]
    assert all(one.sampling.temperature == 0.5 and one.sampling.max_tokens == 200 for one in sent)
    view.check_accessibility()


@pytest.mark.soak
def test_a_key_that_is_revoked_while_its_answer_streams_is_signed_out(
    platform: Platform, view: ConsolePage
) -> None:
    view.allow("status of 401")
    key, page = platform.key("revoked-in-use"), view.page
    hold_answers(platform)
    view.sign_in(key, "playground")
    send(page, "hello")
    expect(answer(page, "base")).to_contain_text("it begins")
    with platform.client(ADMIN_KEY) as admin:
        admin.delete(f"/admin/keys/{key.split('_')[1]}").raise_for_status()
    expect(page.locator(".notice")).to_contain_text("It was revoked or has expired.")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.soak
def test_stop_cancels_all_answers(platform: Platform, view: ConsolePage) -> None:
    key, page = platform.key("stopped"), view.page
    platform.upload(key, "greeter").raise_for_status()
    hold_answers(platform)
    view.sign_in(key, "playground")
    send(page, "hello")
    for model in ("base", "greeter"):
        expect(answer(page, model)).to_contain_text("it begins")
    page.get_by_role("button", name="Stop").click()
    for model in ("base", "greeter"):
        expect(answer(page, model)).to_contain_text("stopped")
    wait_for(lambda: len(platform.engine.aborted) == 2 or None)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


@pytest.mark.soak
def test_leaving_the_view_cancels_the_answers(platform: Platform, view: ConsolePage) -> None:
    key, page = platform.key("left"), view.page
    hold_answers(platform)
    view.sign_in(key, "playground")
    send(page, "hello")
    expect(answer(page, "base")).to_contain_text("it begins")
    page.get_by_role("link", name="Key", exact=True).click()
    wait_for(lambda: platform.engine.aborted or None)


@pytest.mark.soak
def test_a_refusal_says_when_to_try_again(platform: Platform, view: ConsolePage) -> None:
    view.allow("status of 429")
    key, page = platform.key("limited"), view.page
    platform.says("hello")
    with platform.client(ADMIN_KEY) as admin:
        admin.patch("/admin/tenants/limited/quota", json={"requests_per_minute": 1}).raise_for_status()
    view.sign_in(key, "playground")
    send(page, "hello")
    expect(answer(page, "base")).to_contain_text("complete")
    page.keyboard.press("Enter")  # the button still has the focus
    expect(answer(page, "base").get_by_role("alert")).to_contain_text("You can try again in ")
    expect(answer(page, "base")).to_contain_text("failed")


@pytest.mark.soak
def test_a_server_that_does_not_answer_is_named(platform: Platform, view: ConsolePage) -> None:
    view.allow("net::ERR")
    page = view.page
    platform.says("hello")
    view.sign_in(platform.key("away"), "playground")
    answer(page, "base").wait_for()
    page.context.set_offline(True)
    send(page, "hello")
    expect(answer(page, "base").get_by_role("alert")).to_contain_text("The server does not answer.")
    page.context.set_offline(False)
    page.get_by_role("button", name="Send").click()
    expect(answer(page, "base")).to_contain_text("complete")


@pytest.mark.soak
def test_models_are_added_and_removed_with_the_keyboard(platform: Platform, view: ConsolePage) -> None:
    view.allow("status of 404")
    key, page = platform.key("chooser"), view.page
    platform.upload(key, "greeter")
    platform.says("hello")
    view.sign_in(key, "playground")
    answer(page, "greeter").wait_for()
    page.get_by_label("Model to add").focus()
    page.keyboard.type("greeter@1")
    page.keyboard.press("Enter")
    page.keyboard.type(_MARKUP)
    page.keyboard.press("Enter")
    expect(answer(page, "greeter@1")).to_be_visible()
    assert page.get_by_label("Model to add").count() == 0  # four models are the limit
    page.get_by_role("button", name="Remove base").focus()
    page.keyboard.press("Enter")
    expect(answer(page, "base")).to_have_count(0)
    page.get_by_label("User").focus()
    page.keyboard.type("hello")
    page.keyboard.press("Control+Enter")
    expect(answer(page, "greeter@1")).to_contain_text("complete")
    expect(answer(page, _MARKUP).get_by_role("alert")).to_contain_text("does not exist")
    assert page.locator("main img").count() == 0


@pytest.mark.soak
def test_copied_requests_run_and_have_no_key(platform: Platform, view: ConsolePage) -> None:
    key, page = platform.key("copied"), view.page
    platform.says("hello")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    view.sign_in(key, "playground")
    prompt = 'it\'s "quoted" $HOME `id` \\ \n<b> \u20ac \U0001f600'
    page.get_by_label("User").fill(prompt)
    page.get_by_label("Top k").fill("5")
    page.get_by_label("Stop at").fill("'")
    for button, command in (("Copy as curl", ["bash", "-c"]), ("Copy as Python", [sys.executable, "-c"])):
        expect(answer(page, "base").get_by_role("button", name="Copied")).to_have_count(0)
        answer(page, "base").get_by_role("button", name=button).click()
        expect(answer(page, "base").get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert key not in copied
        done = subprocess.run(
            [*command, copied],
            env=os.environ | {"SLORA_API_KEY": key},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, (copied, done.stderr)
        assert "h" in done.stdout
        assert platform.last_prompt() == f"[user]{prompt}"
        sampling = platform.engine.requests[-1].sampling
        assert (sampling.top_k, sampling.max_tokens) == (5, 200)
