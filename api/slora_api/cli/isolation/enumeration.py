"""Compares what a tenant learns about another tenant's adapters with what it learns about missing adapters."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from slora_api.cli.isolation.audited_server import AuditedTenant
from slora_api.cli.isolation.finding import Finding
from slora_api.cli.isolation.random_adapter import RandomAdapter

__all__ = ["compare_lookups", "compare_uploads"]

_PROBE = "enumeration"
# Requests that name an adapter. NAME is replaced by the adapter's name.
_LOOKUPS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/models/NAME", None),
    ("GET", "/v1/adapters/NAME", None),
    ("GET", "/v1/adapters/NAME@1", None),
    ("GET", "/v1/adapters/NAME/versions", None),
    ("GET", "/v1/adapters/NAME/aliases", None),
    ("GET", "/v1/adapters/NAME/aliases/latest", None),
    ("PUT", "/v1/adapters/NAME/aliases/prod", {"versions": {"1": 100}}),
    ("DELETE", "/v1/adapters/NAME/aliases/prod", None),
    ("POST", "/v1/adapters/NAME/aliases/latest/rollback", None),
    ("POST", "/v1/adapters/NAME/prewarm", None),
    ("DELETE", "/v1/adapters/NAME", None),
    ("POST", "/v1/completions", {"model": "NAME", "prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/chat/completions", {"model": "NAME", "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/responses", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/embeddings", {"model": "NAME", "input": "a"}),
)
# Fields of an uploaded version that differ between any two uploads.
_OWN_FIELDS = ("name", "digest", "created", "updated", "certificate")


def compare_lookups(prober: AuditedTenant, foreign: str) -> Iterator[Finding]:
    """Compares the answers about another tenant's adapter with the answers about a missing adapter.

    foreign: the name of an adapter that only another tenant has.
    """
    # The missing name has the same length, so that the sizes of the answers can also be compared.
    nothing = foreign[:-1] + ("0" if foreign[-1] != "0" else "1")
    for method, path, body in _LOOKUPS:
        known, unknown = (_look_up(prober, method, path, body, name) for name in (foreign, nothing))
        seen = known[0] if known == unknown else f"{_show(known)} instead of {_show(unknown)}"
        cell = f"{method} {path.replace('NAME', '{name}')} of another tenant"
        yield Finding(
            _PROBE,
            cell,
            "the 404 of a name that does not exist",
            str(seen),
            known == unknown and known[0] == 404,
        )


def compare_uploads(prober: AuditedTenant, known: RandomAdapter, fresh: RandomAdapter) -> Iterator[Finding]:
    """Compares the answer to an upload of known weights with the answer to an upload of new weights.

    known: an adapter that another tenant has uploaded. fresh: an adapter of the same size that no tenant has.
    """
    answers = [
        prober.server.send(
            "POST", "/v1/adapters", prober.key, data={"name": f"audit-{name}"}, files=adapter.files()
        )
        for name, adapter in (("known", known), ("fresh", fresh))
    ]
    seen = [_visible(answer) for answer in answers]
    shown = (
        f"{answers[0].status_code}, the same answer"
        if seen[0] == seen[1]
        else f"{seen[0]} instead of {seen[1]}"
    )
    yield Finding(
        _PROBE, "an upload of bytes that another tenant has", "the 201 of bytes that no tenant has", shown,
        seen[0] == seen[1] and answers[0].status_code == 201,
    )  # fmt: skip


def _look_up(
    prober: AuditedTenant, method: str, path: str, body: dict[str, Any] | None, name: str
) -> tuple[int, str, tuple[str, ...]]:
    """Returns the status, the body with a placeholder for the name, and the header names."""
    sent = None if body is None else json.loads(json.dumps(body).replace("NAME", name))
    answer = prober.server.send(method, path.replace("NAME", name), prober.key, json=sent)
    return answer.status_code, answer.text.replace(name, "NAME"), tuple(sorted(answer.headers))


def _show(answer: tuple[int, str, tuple[str, ...]]) -> str:
    return f"{answer[0]} {answer[1][:80]}"


def _visible(answer: httpx.Response) -> dict[str, Any]:
    """Returns the fields of an answer to an upload, without those that differ between any two uploads."""
    if answer.status_code != 201:
        return {"status": answer.status_code, "body": answer.text[:200]}
    body = answer.json()
    certificate = body["certificate"]
    shown = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    # A server that skips the canary for known weights would reveal that another tenant has them.
    return shown | {
        "certificate": sorted(certificate),
        "was_tried_out": certificate["logprob_change"] is not None,
        "base": certificate["base"],
        "pool_bytes": certificate["pool_bytes"],
    }
