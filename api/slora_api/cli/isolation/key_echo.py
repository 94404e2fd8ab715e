"""Sends a valid key in places where clients put keys by mistake, and searches the answers for the key."""

from collections.abc import Iterator
from typing import Any

import httpx

from slora_api.cli.isolation.audited_server import AuditedTenant
from slora_api.cli.isolation.finding import Finding

__all__ = ["send_keys_in_odd_places"]

_PROBE = "key echo"
# An answer with this many consecutive characters of the secret counts as quoting the secret. A match of this length is
# no coincidence.
_PART_CHARS = 8


def send_keys_in_odd_places(tenant: AuditedTenant) -> Iterator[Finding]:
    """Yields one finding for each place. An answer that quotes the key would carry a secret into a log, a browser's
    history or an error report.
    """
    key, server = tenant.key, tenant.server

    def send(method: str, path: str, *, with_key: bool = True, **sent: Any) -> httpx.Response:
        return server.send(method, path, key if with_key else None, **sent)

    prompt = {"prompt": "a", "max_tokens": 1}
    answers = {
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
    for place, answer in answers.items():
        texts = {"body": answer.text, "headers": "\n".join(answer.headers.values())}
        where = next((name for name, text in texts.items() if _quotes(text, key)), None)
        seen = (
            f"{answer.status_code} without it"
            if where is None
            else f"{answer.status_code} with the key in its {where}"
        )
        yield Finding(_PROBE, f"key as {place}", "an answer without the key", seen, where is None)


def _quotes(text: str, key: str) -> bool:
    """Returns whether the text contains a part of the key's secret. A part is enough, because a message may quote only
    the beginning of a long value.
    """
    secret = key.split("_")[2]
    return any(secret[at : at + _PART_CHARS] in text for at in range(len(secret) - _PART_CHARS + 1))
