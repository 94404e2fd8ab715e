"""`slora tenant` and `slora audit log` against a server, from creation to purge."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform, post

PROMPT = {"model": "base", "prompt": "hello"}


@pytest.fixture
def slora(platform: Platform) -> Callable[..., str]:
    return partial(run_slora, platform.url, SLORA_ADMIN_KEY=ADMIN_KEY)


def test_the_life_of_a_tenant(platform: Platform, slora: Callable[..., str]) -> None:
    slora("tenant", "create", "acme", "--weight", "2")
    key = platform.services.keys.admin.create_key(platform.tenant_id("acme"))[1].secret
    assert "`slora tenant resume acme` serves it again" in slora("tenant", "suspend", "acme")
    assert "suspended" in slora("tenant", "list")
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 403
    assert slora("tenant", "resume", "acme") == "tenant acme is active\n"
    assert slora("tenant", "rename", "acme", "acme-corp") == "tenant acme is now acme-corp\n"
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 200
    told = slora("tenant", "purge", "acme-corp", "--confirm", "acme-corp", "--ledger", "keep")
    assert "purged tenant acme-corp: 1 keys, 0 adapters" in told and "usage kept" in told
    assert post(platform, key, "/v1/completions", PROMPT).status_code == 401
    log = slora("audit", "log", "--action", "tenant")
    rows = [line.split() for line in log.splitlines()]
    assert [row[4] for row in rows[1:]] == [
        *(
            "tenant.purged", "tenant.purge", "tenant.rename", "tenant.resume", "tenant.suspend",
            "tenant.create",
        )
    ]  # fmt: skip
    assert all(row[2:4] == ["bootstrap", "127.0.0.1"] for row in rows[1:])
    (renamed,) = json.loads(slora("audit", "log", "--action", "tenant.rename", "--json"))
    assert renamed["details"] == {"name": ["acme", "acme-corp"]}
    assert slora("audit", "log", "--since", "2099-01-01", "--json") == "[]\n"
    assert len(json.loads(slora("audit", "log", "--limit", "2", "--json"))) == 2


def test_a_purge_needs_the_name_twice(slora: Callable[..., str]) -> None:
    slora("tenant", "create", "careful")
    told = slora("tenant", "purge", "careful", "--confirm", "carefree", "--ledger", "keep", code=1)
    assert "`confirm` is 'carefree'; repeat the name of the tenant" in told
    assert "careful" in slora("tenant", "list")
