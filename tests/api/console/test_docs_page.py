"""The API's reference at /docs, in a real browser."""

import json

import pytest
from playwright.sync_api import expect

from tests.api.console.browser import ConsolePage
from tests.api.platform import Platform


@pytest.mark.soak
def test_each_route_is_listed_and_one_is_read_and_tried_with_the_key_of_the_tab(
    view: ConsolePage, platform: Platform
) -> None:
    platform.says("hello from the server")
    view.sign_in(platform.key("docs-reader"))
    page = view.page
    page.goto(f"{platform.url}/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    assert page.locator(".opblock").count() > 60
    route = page.locator("#operations-completions-chat")
    route.locator("button.opblock-summary-control").click()
    route.get_by_role("tab", name="Schema").first.click()
    expect(route).to_contain_text("max_completion_tokens")
    route.get_by_role("button", name="Try it out").click()
    body = json.loads(route.locator("textarea.body-param__text").input_value())
    assert body["model"] == "default" and body["messages"][0]["role"] == "user"
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text("hello from the server")
