"""The playground: answers of several models side by side, errors, stopping, and the copied requests."""

import json
import os
import subprocess
import sys

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from slora.core.request import FinishReason
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.console.browser import ConsolePage, open_page
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import deltas_of
from tests.api.served import wait_for
from tests.support.tool_templates import HERMES

_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "additionalProperties": False,
        },
    },
}
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
    page.get_by_text("Sampling").click()
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
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_send_needs_no_scrolling(browser: Browser, platform: Platform, width: int, height: int) -> None:
    key = platform.key("fold")
    for name in ("greeter", "summary"):
        platform.upload(key, name).raise_for_status()
    with open_page(browser, platform.url, width=width, height=height) as console:
        console.sign_in(key, "playground")
        answer(console.page, "summary").wait_for()
        expect(console.page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
        console.check_width()
        console.check_accessibility()
        console.page.get_by_text("Sampling").click()
        console.page.get_by_label("Seed").fill("1.5")
        console.page.get_by_text("Sampling").click()
        send(console.page, "hello")
        expect(console.page.get_by_label("Seed")).to_be_focused()  # the browser says what is wrong with it
        assert not any(one.method == "POST" for one in console.requests)


@pytest.mark.soak
def test_tools_and_a_schema_are_sent_and_calls_are_shown(platform: Platform, view: ConsolePage) -> None:
    key, page = platform.key("tool-caller"), view.page
    members = make_members() | {"chat_template.jinja": HERMES.encode()}
    platform.upload(key, "caller", members).raise_for_status()
    view.sign_in(key, "playground")
    page.get_by_role("button", name="Remove base").click()
    page.get_by_text("Form of the answer").click()
    page.get_by_label("The answer is").select_option("JSON of a schema")
    page.get_by_label("JSON schema").fill('{"type": "object",')
    page.get_by_text("Form of the answer").click()
    send(page, "hello")
    expect(page.get_by_label("JSON schema")).to_be_focused()
    expect(page.locator(".wrong")).to_contain_text("This is not JSON: ")
    view.check_accessibility()
    page.get_by_label("JSON schema").fill("[]")
    expect(page.locator(".wrong")).to_have_text("This has to be a JSON schema, which is an object.")
    page.get_by_role("button", name="Send").click()
    assert not any(one.method == "POST" for one in view.requests)
    page.get_by_label("JSON schema").fill('{"type": "object", "additionalProperties": false}')
    platform.says("{}")
    page.get_by_role("button", name="Send").click()
    expect(answer(page, "caller")).to_contain_text("complete")
    form = platform.engine.requests[-1].sampling.structured_output
    assert form is not None and '"additionalProperties":false' in form.text
    page.get_by_label("The answer is").select_option("a JSON object")
    page.get_by_role("button", name="Send").click()
    wait_for(lambda: len(platform.engine.requests) == 2 or None)
    form = platform.engine.requests[-1].sampling.structured_output
    assert form is not None and form.kind == "json_object"

    page.get_by_label("The answer is").select_option("text")
    page.get_by_text("Tools").first.click()
    page.get_by_label("Tools, as in a chat request").fill("{}")
    expect(page.locator(".wrong")).to_have_text("This has to be an array of tools.")
    page.get_by_label("Tools, as in a chat request").fill(f"[{json.dumps(_TOOL)}]")
    platform.says('<tool_call>{"name": "find", "arguments": {"city": "Köln"}}</tool_call>')
    page.get_by_role("button", name="Send").click()
    calls = answer(page, "caller").get_by_role("list", name="Tool calls")
    expect(calls).to_contain_text('{\n  "city": "Köln"\n}')
    expect(calls.locator("code")).to_have_text("find")
    assert json.dumps(_TOOL) in platform.last_prompt()
    view.check_accessibility()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer(page, "caller").get_by_role("button", name="Copy as Python").click()
    expect(answer(page, "caller").get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(
        [sys.executable, "-c", copied],
        env=os.environ | {"SLORA_API_KEY": key, "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, (copied, done.stderr)
    assert done.stdout.startswith("find") and '"Köln"' in done.stdout


@pytest.mark.soak
def test_adapters_are_combined_with_weights(platform: Platform, view: ConsolePage) -> None:
    key, page = platform.key("combiner"), view.page
    for seed, name in enumerate(("legal", "brief")):
        platform.upload(key, name, make_members(tensors=make_tensors(seed=seed))).raise_for_status()
    platform.says("hello")
    view.sign_in(key, "playground")
    for name in ("base", "brief", "legal"):
        page.get_by_role("button", name=f"Remove {name}").click()
    page.get_by_label("Model to add").fill("legal*much + brief")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Write adapters and weights as in")
    view.check_accessibility()
    page.get_by_label("Model to add").fill("legal@1*0.5 + brief*-2 + brief")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_count(0)
    send(page, "hello")
    column = answer(page, "legal@1*0.5 + brief*-2 + brief")
    expect(column).to_contain_text("complete")
    expect(column).to_contain_text("answered by ")
    sent = platform.engine.requests[-1].adapters
    assert sorted(one.weight for one in sent) == [-1.0, 0.5]  # the weights of one version are added


@pytest.mark.soak
def test_words_that_differ_are_marked_when_all_answers_are_complete(
    platform: Platform, view: ConsolePage
) -> None:
    key, page = platform.key("differences"), view.page
    platform.upload(key, "greeter").raise_for_status()
    texts = ("The quick brown fox jumps.", "The slow brown fox jumps very high.")
    platform.engine.answers = [deltas_of(text.encode(), FinishReason.STOP) for text in texts]
    view.sign_in(key, "playground")
    send(page, "hello")
    expect(page.locator(".answer .tag")).to_have_text(["complete", "complete"])
    # Either request may reach the engine first.
    marks = page.locator(".answer mark")
    expect(marks).to_have_count(4)
    assert sorted(marks.all_inner_texts()) == ["jumps very high.", "jumps.", "quick", "slow"]
    for model in ("base", "greeter"):
        text = answer(page, model).locator(".text").inner_text()
        assert text in texts
        differing = "quick jumps." if text == texts[0] else "slow jumps very high."
        assert " ".join(answer(page, model).locator("mark").all_inner_texts()) == differing
    num_words = len(answer(page, "greeter").locator("mark").all_inner_texts()[1].split()) + 1
    expect(answer(page, "greeter")).to_contain_text(f"{num_words} words that the first answer lacks.")
    assert "underline" in marks.first.evaluate("one => getComputedStyle(one).textDecorationLine")
    view.check_accessibility()
    page.get_by_label("Mark what differs").uncheck()
    expect(marks).to_have_count(0)


@pytest.mark.soak
def test_the_last_runs_are_shown_again_and_end_with_the_session(
    platform: Platform, view: ConsolePage
) -> None:
    key, page = platform.key("runs"), view.page
    platform.says("hello")
    view.sign_in(key, "playground")
    page.get_by_text("Sampling").click()
    page.get_by_label("Seed").fill("7")
    state = answer(page, "base").locator(".tag")
    summary = page.locator("summary").filter(has_text="Last runs")
    for number in range(11):
        if number == 10:
            platform.says("good-bye")
            page.get_by_label("Seed").fill("8")
        send(page, f"prompt {number}")
        expect(summary).to_have_text(f"Last runs {min(number + 1, 10)}")
        expect(state).to_have_text("complete")
    page.reload()
    summary.click()
    runs = page.locator("button.run")
    expect(runs).to_have_count(10)
    expect(runs.first).to_contain_text("prompt 10")
    expect(runs.last).to_contain_text("prompt 1")
    expect(runs.last).to_contain_text("base")
    view.check_accessibility()
    view.requests.clear()
    page.get_by_text("Sampling").click()
    for run, prompt, seed, text in (
        (runs.last, "prompt 1", "7", "hello"),
        (runs.first, "prompt 10", "8", "good-bye"),
    ):
        run.click()
        expect(page.get_by_label("User")).to_have_value(prompt)
        expect(page.get_by_label("Seed")).to_have_value(seed)
        expect(answer(page, "base")).to_contain_text(text)
        expect(answer(page, "base")).to_contain_text("ended by stop")
    assert not any(one.method == "POST" for one in view.requests)
    assert key not in str(page.evaluate("sessionStorage.getItem('slora.runs')"))
    view.open(f"#key={platform.key('runs-other')}")
    expect(page.locator(".who")).to_contain_text("runs-other")
    assert page.evaluate("Object.keys(sessionStorage)") == ["slora.key"]
    view.open("#/playground")
    send(page, "hello")
    expect(summary).to_have_text("Last runs 1")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key or admin key").wait_for()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0


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
    platform.api(ADMIN_KEY).delete(f"/admin/keys/{key.split('_')[1]}").raise_for_status()
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
    platform.api(ADMIN_KEY).patch(
        "/admin/tenants/limited/quota", json={"requests_per_minute": 1}
    ).raise_for_status()
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
    page.get_by_text("Sampling").click()
    page.get_by_label("Top k").fill("5")
    page.get_by_label("Stop at").fill("'")
    for button, command in (("Copy as curl", ["bash", "-c"]), ("Copy as Python", [sys.executable, "-c"])):
        expect(answer(page, "base").get_by_role("button", name="Copied")).to_have_count(0)
        answer(page, "base").get_by_role("button", name=button).click()
        expect(answer(page, "base").get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert key not in copied
        done = subprocess.run(
            [*command, copied], env=os.environ | {"SLORA_API_KEY": key}, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, (copied, done.stderr)
        assert "h" in done.stdout
        assert platform.last_prompt() == f"[user]{prompt}"
        sampling = platform.engine.requests[-1].sampling
        assert (sampling.top_k, sampling.max_tokens) == (5, 200)
