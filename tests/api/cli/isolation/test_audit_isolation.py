"""`slora audit isolation` passes on this server, and fails on servers that leak, each in its own way."""

import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from slora.core.request import EngineRequest, FinishReason, TokenDelta
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.operator_routes import OperatorServices
from slora_api.adapters.publisher import CANARY_TENANT
from slora_api.adapters.served_model import ServedModel
from slora_api.core import errors
from slora_api.keys import authentication
from slora_api.keys.key_record import KeyRecord
from tests.api.command import run_command
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import READY_S, SLORA, Served, environment, serving, wait_for

_BLOCK = 16


def tenant_and_weights(request: EngineRequest) -> object:
    return request.tenant, request.adapters


@dataclass
class CachingEngine(ScriptedEngine):
    """Answers each prompt with one token. A prompt that it has seen in the same scope counts as cached.

    scope: what two requests must have in common to share a prefix.
    """

    answers: Sequence[Sequence[TokenDelta | Exception]] = ((TokenDelta((65,), FinishReason.LENGTH),),)
    scope: Callable[[EngineRequest], object] = tenant_and_weights
    seen: set[object] = field(default_factory=set)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        key = self.scope(request), tuple(request.prompt_token_ids)
        num_cached = _BLOCK if key in self.seen and request.tenant != CANARY_TENANT else 0
        self.seen.add(key)
        async with aclosing(super().generate(request)) as deltas:
            async for arrived in deltas:
                yield [replace(delta, num_cached=num_cached) for delta in arrived]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path, CachingEngine()) as running:
        yield running


def audit(url: str) -> tuple[int, list[dict[str, Any]]]:
    """Returns the exit code of the command, and the findings that are not as they must be."""
    ended = run_command("audit", "isolation", "--json", SLORA_URL=url, SLORA_ADMIN_KEY=ADMIN_KEY)
    assert ended.stdout, ended.stderr
    answer = json.loads(ended.stdout)
    wrong = [finding for finding in answer["findings"] if not finding["ok"]]
    assert answer["ok"] == (not wrong) and (ended.returncode == 0) == (not wrong), ended.stderr
    assert len(answer["findings"]) > 30
    return ended.returncode, wrong


def cells(wrong: list[dict[str, Any]]) -> list[str]:
    return [finding["cell"] for finding in wrong]


def tenants(server: Served) -> list[str]:
    with server.client(ADMIN_KEY) as admin:
        return [tenant["name"] for tenant in admin.get("/admin/tenants").raise_for_status().json()["data"]]


def test_this_server_passes_the_audit_which_leaves_no_tenant(server: Served) -> None:
    before = tenants(server)
    assert audit(server.url) == (0, [])
    assert tenants(server) == before


ACROSS_TENANTS = {"other tenant, same adapter", "other tenant, base model"}
ACROSS_ADAPTERS = {
    "same tenant, other adapter",
    "same tenant, base model after an adapter",
    "same tenant, adapter after the base model",
}
ACROSS_ALL = ACROSS_TENANTS | ACROSS_ADAPTERS | {"other tenant, other adapter"}


def share_with_all(request: EngineRequest) -> object:
    return None


@pytest.mark.soak
@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (share_with_all, ACROSS_ALL),
        # Otherwise, the audit of a server that shares no prefix would prove nothing.
        (lambda request: object(), {"same tenant, same adapter", "same tenant, base model"}),
        (lambda request: request.adapter_digests, ACROSS_TENANTS),
        (lambda request: request.tenant, ACROSS_ADAPTERS),
    ],
    ids=["shared by all", "off", "without the tenant", "without the adapter"],
)
def test_a_prefix_cache_of_another_scope_is_noticed(
    tmp_path: Path, scope: Callable[[EngineRequest], object], expected: set[str]
) -> None:
    with running_platform(tmp_path, CachingEngine(scope=scope)) as platform:
        code, wrong = audit(platform.url)
    assert (code, set(cells(wrong))) == (1, expected)


def test_routes_that_any_or_no_key_opens_errors_that_tell_foreign_models_and_a_shared_cache_are_noticed(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All faults at once, because an audit takes a second."""
    cast(CachingEngine, platform.engine).scope = share_with_all

    async def admit(_self: object, request: Any) -> Any:
        return request.state.caller

    find, list_tenants = ModelCatalog.find_model, platform.services.tenant_store.list_tenants
    registry = platform.find(OperatorServices).registry

    async def reveal(self: ModelCatalog, key: KeyRecord, name: str, *rest: Any, **named: Any) -> ServedModel:
        owners = {
            tenant.tenant_id
            for tenant in list_tenants()
            for adapter in registry.list(tenant.tenant_id)
            if adapter.label == name
        }
        if owners and key.tenant not in owners:
            raise errors.Forbidden("This model belongs to another tenant.")
        return await find(self, key, name, *rest, **named)

    monkeypatch.setattr(authentication.RequiredScope, "__call__", admit)
    monkeypatch.setattr(authentication, "PUBLIC_PATHS", authentication.PUBLIC_PATHS | {"/v1/usage"})
    monkeypatch.setattr(ModelCatalog, "find_model", reveal)
    _, wrong = audit(platform.url)
    lookups = [finding["cell"] for finding in wrong if "This model belongs to" in finding["seen"]]
    assert "POST /v1/completions of another tenant" in lookups
    assert "operators' routes with a tenant's key" in cells(wrong)
    assert "with the scope usage:read alone" in cells(wrong)
    assert set(cells(wrong)) >= ACROSS_ALL
    opened = {"without a key", "with an unknown key", "with a revoked key"}
    others = [finding for finding in wrong if finding["cell"] in opened]
    assert set(cells(others)) == opened
    assert all(finding["seen"].startswith("GET /v1/usage answered") for finding in others), others


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Child processes do not ignore SIGINT, as they would if a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_an_interrupted_audit_removes_its_tenants(platform: Platform, sent: signal.Signals) -> None:
    tenant_store = platform.services.tenant_store
    variables = environment(SLORA_URL=platform.url, SLORA_ADMIN_KEY=ADMIN_KEY)
    with subprocess.Popen(
        [*SLORA, "audit", "isolation"], env=variables, stderr=subprocess.DEVNULL
    ) as running:
        wait_for(lambda: len(tenant_store.list_tenants()) == 2 or None)
        os.kill(running.pid, sent)
        assert running.wait(READY_S) == 130
    assert list(tenant_store.list_tenants()) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("public", ["other tenant, base model"]),
        ("off", ["same tenant, same adapter", "same tenant, base model"]),
    ],
)
def test_modes_of_the_prefix_cache_are_noticed(
    kit: Kit, tmp_path: Path, mode: str, expected: list[str]
) -> None:
    with serving(kit.base, tmp_path / "data", "--prefix-cache", mode) as served:
        served.wait_until_ready()
        assert cells(audit(served.url)[1]) == expected
