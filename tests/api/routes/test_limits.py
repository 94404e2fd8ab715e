"""Clients can query the limits of a request. Routes that accept small objects refuse large bodies."""

import json

import httpx
import pytest

from tests.api.platform import Platform, bearer


def test_limits_are_shown_for_the_server_and_for_each_model(platform: Platform) -> None:
    client = platform.api(platform.key("acme"))
    shown = client.get("/v1/limits").json()
    assert shown.pop("object") == "limits"
    # The longest token of this tokenizer, <eos>, has 5 characters, and the context has 64 tokens.
    assert (shown["max_model_len"], shown["prompt_chars"], shown["prompts"]) == (64, 320, 256)
    assert client.get("/v1/models/base").json()["limits"] == shown


def test_limits_need_a_key_and_an_engine(platform: Platform) -> None:
    assert httpx.get(platform.url + "/v1/limits").status_code == 401
    platform.engine.ready = False
    try:
        client = platform.api(platform.key("acme"))
        assert client.get("/v1/limits").status_code == 503
        assert client.get("/v1/models/base").json()["limits"] is None
    finally:
        platform.engine.ready = True


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/adapters/x/aliases/prod"),
        ("POST", "/admin/tenants"),
        ("POST", "/admin/tenants/acme/keys"),
        ("POST", "/v1/load_lora_adapter"),
    ],
)
def test_routes_for_small_objects_refuse_a_body_of_a_megabyte(
    platform: Platform, method: str, path: str
) -> None:
    """Born from a bug: 600,000 targets of an alias took 0.5 s to parse and validate on the event loop."""
    body = json.dumps({"versions": {str(number): 1 for number in range(100_000)}})
    headers = bearer(platform.key("acme")) | {"Content-Type": "application/json"}
    answer = httpx.request(method, platform.url + path, content=body, headers=headers, timeout=60)
    assert answer.status_code == 413 and "65536 bytes" in answer.json()["error"]["message"]
