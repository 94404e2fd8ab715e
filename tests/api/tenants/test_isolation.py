"""What a tenant must not learn: another tenant's bytes, and a key that a client put in a wrong place.

`slora audit isolation` tries the rest on a running server; its tests are in tests/api/cli/isolation.
"""

from typing import Any

import httpx

from slora_api.core.key_masking import mask_keys
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.platform import Platform, bearer

# An answer with this many consecutive characters of the secret quotes the secret: a match of this length is no
# coincidence. A part is enough, because a message may quote only the beginning of a long value.
_PART_CHARS = 8
# Fields of an uploaded version that differ between any two uploads.
_OWN_FIELDS = ("name", "digest", "created", "updated", "certificate")


def send_key_in_odd_places(platform: Platform, key: str) -> dict[str, httpx.Response]:
    """The answers to requests with a valid key where clients put keys by mistake."""
    prompt = {"prompt": "a", "max_tokens": 1}
    with httpx.Client(base_url=platform.url) as client:

        def send(method: str, path: str, *, with_key: bool = True, **sent: Any) -> httpx.Response:
            headers = {**(bearer(key) if with_key else {}), **sent.pop("headers", {})}
            return client.request(method, path, headers=headers, **sent)

        return {
            "query parameter": send("GET", f"/v1/models?api_key={key}"),
            "query parameter `after`": send("GET", f"/v1/models?after={key}"),
            "query parameter `limit`": send("GET", f"/v1/adapters?limit={key}"),
            "query parameter without a header": send("GET", f"/v1/models?key={key}", with_key=False),
            "path": send("GET", f"/v1/adapters/{key}"),
            "path that does not exist": send("GET", f"/{key}"),
            "path of a model": send("GET", f"/v1/models/{key}"),
            "name of an alias": send("GET", f"/v1/adapters/x/aliases/{key}"),
            "field `model`": send("POST", "/v1/completions", json={"model": key, **prompt}),
            "field `model` of a chat": send(
                "POST", "/v1/chat/completions", json={"model": key, "messages": [{"role": "user", "content": "a"}]}
            ),
            "field `model` of a response": send("POST", "/v1/responses", json={"model": key, "input": "a"}),
            "name of a field": send("POST", "/v1/completions", json={key: 1, "model": "default", **prompt}),
            "value of the wrong type": send(
                "POST", "/v1/completions", json={"model": "default", **prompt, "temperature": key}
            ),
            "value that is not supported": send(
                "POST", "/v1/completions", json={"model": "default", **prompt, "suffix": key}
            ),
            "body that is not JSON": send(
                "POST", "/v1/completions", content=key, headers={"Content-Type": "application/json"}
            ),
            "name of an upload": send(
                "POST", "/v1/adapters", data={"name": key}, files={"config": ("adapter_config.json", b"{}")}
            ),
            "name of a file": send("POST", "/v1/adapters", data={"name": "x"}, files={"config": (key, b"{}")}),
            "request id": send("GET", "/v1/models", headers={"x-request-id": key}),
            "header of another scheme": send(
                "GET", "/v1/models", with_key=False, headers={"Authorization": f"Basic {key}"}
            ),
            "header x-api-key": send("GET", "/v1/models", with_key=False, headers={"x-api-key": key}),
            "header with two keys": send(
                "GET", "/v1/models", with_key=False, headers={"Authorization": f"Bearer {key} {key}"}
            ),
            "header Content-Encoding": send(
                "POST", "/v1/completions", content=b"{}", headers={"Content-Encoding": key}
            ),
            "header Content-Type": send("POST", "/v1/adapters", content=b"{}", headers={"Content-Type": key}),
        }  # fmt: skip


def places_that_quote(key: str, answers: dict[str, httpx.Response]) -> list[str]:
    secret = key.split("_")[2]
    parts = [secret[at : at + _PART_CHARS] for at in range(len(secret) - _PART_CHARS + 1)]
    texts = {place: "\n".join([answer.text, *answer.headers.values()]) for place, answer in answers.items()}
    return [place for place, text in texts.items() if any(part in text for part in parts)]


def test_no_answer_quotes_a_key_that_was_sent_in_a_wrong_place(platform: Platform) -> None:
    """An answer that quotes it would carry a secret into a log, a browser's history or an error report."""
    key = platform.key("acme")
    answers = send_key_in_odd_places(platform, key)
    assert places_that_quote(key, answers) == []
    assert all(mask_keys(key) in answers[place].text for place in ("field `model`", "path"))
    assert places_that_quote(key, {"quoted": httpx.Response(404, text=f"no {key}")}), "the test would notice"


def visible(answer: httpx.Response) -> dict[str, Any]:
    """The fields of an answer to an upload, without those that differ between any two uploads."""
    body = answer.raise_for_status().json()
    certificate = body["certificate"]
    shown = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    return shown | {
        "certificate": sorted(certificate),
        "was_tried_out": certificate["logprob_change"] is not None,
        "base": certificate["base"],
        "pool_bytes": certificate["pool_bytes"],
    }


def test_an_upload_of_another_tenants_bytes_is_answered_like_one_of_fresh_bytes(platform: Platform) -> None:
    known, fresh = (make_members(tensors=make_tensors(seed=seed)) for seed in range(2))
    platform.upload(platform.key("owner"), "owned", known).raise_for_status()
    prober = platform.key("prober")
    first = visible(platform.upload(prober, "known", known))
    assert first == visible(platform.upload(prober, "fresh", fresh))
    assert first["was_tried_out"], "the owner's try does not count"
