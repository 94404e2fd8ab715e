"""Findings of attack tests, one case each: the request gets a 4xx that names the field, and the event loop goes on."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.api.adapters.hostile_uploads import FIELDS
from tests.api.conftest import Kit
from tests.api.fuzz.uploads import CONFIG, WEIGHTS
from tests.api.fuzz.watched_server import WatchedServer
from tests.api.served import ADMIN_KEY

_COMPLETION, _CHAT = "/v1/completions", "/v1/chat/completions"
_HALF = "\ud800"


@dataclass(frozen=True)
class Finding:
    """param: the parameter that the error names. Only its first segment is compared."""

    path: str
    fields: dict[str, Any]
    param: str

    def body(self) -> bytes:
        proper: dict[str, Any] = {"model": "default", "max_tokens": 4}
        if self.path == _COMPLETION:
            proper["prompt"] = "a"
        else:
            proper["messages"] = [{"role": "user", "content": "a"}]
        return json.dumps(proper | self.fields).encode()


_SCORED = {"n": 128, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
FINDINGS = {
    "600,000 prompts": Finding(_COMPLETION, {"prompt": ["a"] * 600_000}, "prompt"),
    "a prompt of 4 MB": Finding(_COMPLETION, {"prompt": "a " * 1_990_000}, "prompt"),
    "as many ids as 4 MB hold": Finding(_COMPLETION, {"prompt": [1] * 1_300_000}, "prompt"),
    "scores of a prompt for each of 128 answers": Finding(
        _COMPLETION, {**_SCORED, "prompt": "a" * 400, "max_tokens": 1}, "logprobs"
    ),
    "15 stop strings of 240,000 characters": Finding(_COMPLETION, {"stop": ["a" * 240_000] * 15}, "stop"),
    "110,000 messages": Finding(_CHAT, {"messages": [{"role": "user", "content": ""}] * 110_000}, "messages"),
    "a message of 4 MB": Finding(
        _CHAT, {"messages": [{"role": "user", "content": "a " * 1_990_000}]}, "messages"
    ),
    "top_k of 2 ** 64": Finding(_COMPLETION, {"top_k": 1 << 64}, "top_k"),
    "a seed of 2 ** 70": Finding(_COMPLETION, {"seed": 1 << 70}, "seed"),
    "half a surrogate pair in a stop string": Finding(_COMPLETION, {"stop": _HALF}, "stop"),
    "half a surrogate pair in a prompt": Finding(_COMPLETION, {"prompt": _HALF}, "prompt"),
    "half a surrogate pair in a message": Finding(
        _CHAT, {"messages": [{"role": "user", "content": _HALF}]}, "messages"
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_request_that_was_an_attack_is_refused_at_once(watched: WatchedServer, name: str) -> None:
    finding = FINDINGS[name]
    body = finding.body()
    with watched.client() as client:
        # The first request of a kind imports modules, which would be measured.
        client.post(finding.path, json={"model": "default"})
        watched.begin()
        headers = {"Content-Type": "application/json"}
        answer = watched.send(name, lambda: client.post(finding.path, content=body, headers=headers))
    assert answer.status_code in (400, 413), answer.text[:500]
    error = answer.json()["error"]
    assert answer.status_code == 413 or str(error["param"]).split(".")[0] == finding.param, error
    watched.check()


def test_a_template_with_a_constant_of_12_mb_uses_no_memory_and_blocks_no_renderer(
    watched: WatchedServer, kit: Kit
) -> None:
    files = {FIELDS[file]: (file, (kit.small / file).read_bytes()) for file in (CONFIG, WEIGHTS)}
    files["chat_template"] = ("chat_template.jinja", b"{{ 'ab' * 6000000 }}")
    with watched.client() as client:
        client.post("/v1/adapters", data={"name": "folded"}, files=files).raise_for_status()
        messages = [{"role": "user", "content": "a"}]
        answer = client.post(_CHAT, json={"model": "folded", "messages": messages, "max_tokens": 1})
    assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]


def test_a_tenants_name_with_half_a_surrogate_pair_is_refused(watched: WatchedServer) -> None:
    with watched.client(ADMIN_KEY) as operator:
        body = json.dumps({"name": _HALF}).encode()
        answer = operator.post("/admin/tenants", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "name"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_a_body_with_a_content_encoding_is_refused_by_name(watched: WatchedServer, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    with watched.client() as client:
        body = json.dumps({"model": "default", "prompt": "a", "max_tokens": 1}).encode()
        answer = client.post(_COMPLETION, content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert "Content-Encoding" in answer.json()["error"]["message"]
