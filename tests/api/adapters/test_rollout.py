"""Versions and aliases from the tenants' view, over a scripted engine."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora_api.adapters import model_catalog
from tests.adapters.hand_made import make_config, make_members, make_tensors, write_directory
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform, post
from tests.api.scripted_engine import ScriptedEngine, deltas_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine([deltas_of(b"ok")]), max_lora_rank=32)


def members(seed: int) -> dict[str, bytes]:
    return make_members(tensors=make_tensors(seed=seed))


def tenant_with(platform: Platform, tenant: str, num_versions: int, adapter: str | None = None) -> str:
    """Returns the key of a tenant whose adapter `voice` has `num_versions` versions."""
    key = platform.key(tenant, adapter)
    for seed in range(num_versions):
        assert platform.upload(key, "voice", members(seed)).json()["version"] == seed + 1
    return key


def alias_path(alias: str) -> str:
    return f"/v1/adapters/voice/aliases/{alias}"


def put(platform: Platform, key: str, alias: str, versions: dict[str, int], **more: Any) -> httpx.Response:
    return platform.api(key).put(alias_path(alias), json={"versions": versions, **more})


def served(platform: Platform, key: str, model: str, **fields: Any) -> str:
    """Returns the version that answers."""
    answer = post(platform, key, COMPLETIONS, {"model": model, "prompt": "x", **fields})
    assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
    return answer.headers["x-slora-adapter"]


def test_the_generation_config_of_a_version_is_read_once_and_not_on_the_event_loop(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, reads = platform.key("reads-once"), list[str]()
    texts = [f'{{"top_p": 0.{number}, "added_tokens": []}}' for number in (5, 6)]
    for name, text in zip(("one", "other"), texts, strict=True):
        raw = make_members(generation_config_dot_json=text)
        assert platform.upload(key, name, raw).status_code == 201
    original = model_catalog.read_generation_defaults

    def read_noted(text: str | None) -> Any:
        reads.append(threading.current_thread().name)
        return original(text)

    monkeypatch.setattr(model_catalog, "read_generation_defaults", read_noted)
    for name, top_p in [("one", 0.5), ("other", 0.6)] * 3:
        served(platform, key, name)
        assert platform.engine.requests[-1].sampling.top_p == top_p
    assert len(reads) == 2 and all(name.startswith("tenants") for name in reads)


def test_a_request_may_name_a_version_or_an_alias_and_the_response_names_the_version(
    platform: Platform,
) -> None:
    key = tenant_with(platform, "refers", 3, "voice@prod")
    assert put(platform, key, "prod", {"2": 100}).json()["versions"] == {"2": 100}
    wanted = {"voice": 3, "voice@latest": 3, "voice@1": 1, "voice@prod": 2, "default": 2}
    assert {model: served(platform, key, model) for model in wanted} == {
        model: f"voice@{number}" for model, number in wanted.items()
    }
    client = platform.api(key)
    digests = {
        one["version"]: one["digest"] for one in client.get("/v1/adapters/voice/versions").json()["data"]
    }
    for path, body in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for stream in (False, True):
            answer = client.post(path, json={"model": "voice@prod", "stream": stream, **body})
            assert answer.headers["x-slora-adapter"] == "voice@2"
            assert answer.headers["x-slora-adapter-digest"] == digests[2]
            request = platform.engine.requests[-1]
            assert request.adapter_digests == digests[2]
    for model in ("voice@4", "voice@canary", "voice@", "voice@0", "other@1"):
        missing = post(platform, key, COMPLETIONS, {"model": model, "prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_models_are_names_and_aliases_and_a_version_can_be_asked_for(platform: Platform) -> None:
    key = tenant_with(platform, "lists", 2)
    put(platform, key, "prod", {"1": 90, "2": 10})
    client = platform.api(key)
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["base", "voice", "voice@prod"]
    one = client.get("/v1/models/voice@1").json()
    assert one["id"] == "voice@1" and one["root"] == listed[2]["root"] != listed[1]["root"]
    prod = client.get("/v1/models/voice@prod").json()
    assert prod.pop("limits") and prod == listed[2]
    assert [one["name"] for one in client.get("/v1/adapters").json()["data"]] == ["voice"]
    versions = client.get("/v1/adapters/voice/versions").json()["data"]
    assert [(one["version"], one["aliases"]) for one in versions] == [
        (2, {"latest": 100, "prod": 10}),
        (1, {"prod": 90}),
    ]
    assert client.get("/v1/adapters/voice@1").json() == versions[1]
    aliases = client.get("/v1/adapters/voice/aliases").json()["data"]
    assert [(one["alias"], one["versions"], one["follows_pushes"]) for one in aliases] == [
        ("latest", {"2": 100}, True),
        ("prod", {"1": 90, "2": 10}, False),
    ]
    assert client.get(alias_path("prod")).json() == aliases[1]


def test_a_growing_canary_keeps_its_users_by_user_or_session(platform: Platform) -> None:
    key = tenant_with(platform, "canary", 2)
    users = [f"user-{number}" for number in range(40)]  # With 12, all had one version in 1 of 70 runs.

    def by_user() -> dict[str, str]:
        return {user: served(platform, key, "voice@prod", user=user) for user in users}

    put(platform, key, "prod", {"1": 70, "2": 30})
    first = by_user()
    assert set(first.values()) == {"voice@1", "voice@2"} and by_user() == first
    client = platform.api(key)
    body = {"model": "voice@prod", "prompt": "x"}
    for user in users:
        answer = client.post(COMPLETIONS, json=body, headers={"x-session-id": user})
        assert answer.headers["x-slora-adapter"] == first[user]
        both = client.post(COMPLETIONS, json=body | {"user": user}, headers={"x-session-id": "another"})
        assert both.headers["x-slora-adapter"] == first[user], "a request's user is who it is"
    put(platform, key, "prod", {"1": 40, "2": 60})
    grown = by_user()
    assert {user for user in users if first[user] == "voice@2"} < {
        user for user in users if grown[user] == "voice@2"
    }
    assert {served(platform, key, "voice@prod") for _ in range(40)} == {"voice@1", "voice@2"}


def test_a_rollback_is_one_call_and_a_move_may_state_the_expected_targets(platform: Platform) -> None:
    key = tenant_with(platform, "rolls", 2)
    client = platform.api(key)
    assert client.post(alias_path("latest") + "/rollback").json()["versions"] == {"1": 100}
    assert served(platform, key, "voice") == "voice@1"
    nothing = client.post(alias_path("latest") + "/rollback")
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (409, "alias_conflict")
    assert nothing.headers["x-should-retry"] == "false"
    assert client.post(alias_path("prod") + "/rollback").status_code == 404
    assert put(platform, key, "prod", {"1": 100}, expected={}).status_code == 200
    moved = put(platform, key, "prod", {"2": 100}, expected={"2": 100})
    assert (moved.status_code, moved.json()["error"]["code"]) == (409, "alias_conflict")
    assert put(platform, key, "prod", {"2": 100}, expected={"1": 100}).status_code == 200


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"versions": {"1": 60, "2": 60}}, "invalid_alias", "add up to 120"),
        ({"versions": {}}, "invalid_alias", "points at 1 to 8"),
        ({"versions": {"one": 100}}, None, "version numbers"),
        ({"versions": {"1": "100"}}, None, "valid integer"),
        ({"versions": {"1": True}}, None, "valid integer"),
        ({"versions": {"1": 100}, "weight": 3}, "unknown_parameter", "weight"),
        ({}, "missing_parameter", "versions"),
    ],
)
def test_an_invalid_move_is_a_400(
    platform: Platform, body: dict[str, Any], code: str | None, words: str
) -> None:
    client = platform.api(tenant_with(platform, "wrong", 1))
    answer = client.put(alias_path("prod"), json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code) and words in error["message"], answer.text
    assert client.get(alias_path("prod")).status_code == 404


def test_another_tenants_aliases_are_a_404(platform: Platform) -> None:
    put(platform, tenant_with(platform, "owner", 1), "prod", {"1": 100})
    client = platform.api(platform.key("stranger"))
    for path in ("/v1/adapters/voice/versions", "/v1/adapters/voice/aliases", alias_path("prod")):
        assert client.get(path).status_code == 404
    assert client.put(alias_path("prod"), json={"versions": {"1": 100}}).status_code == 404
    assert client.delete(alias_path("prod")).status_code == 404
    assert client.post(alias_path("prod") + "/rollback").status_code == 404


def test_deleting_a_version_that_an_alias_serves_requires_force_and_frees_its_blob(
    platform: Platform,
) -> None:
    key = tenant_with(platform, "deletes", 3)
    put(platform, key, "prod", {"1": 90, "2": 10})

    def blobs() -> int:
        return sum(path.is_file() for path in (platform.directory / "adapters" / "blobs").rglob("*"))

    client = platform.api(key)
    before = blobs()
    for reference in ("voice@2", "voice"):
        refused = client.delete(f"/v1/adapters/{reference}")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "adapter_in_use")
        assert (
            "`prod`" in error["message"]
            and "PUT or DELETE /v1/adapters/voice/aliases/prod" in error["message"]
        )
    assert client.delete("/v1/adapters/voice@prod", params={"force": "true"}).status_code == 400
    assert client.delete("/v1/adapters/voice@2", params={"force": "true"}).json()["deleted"]
    assert client.get(alias_path("prod")).json()["versions"] == {"1": 100}
    assert client.delete(alias_path("latest")).status_code == 400
    assert client.delete(alias_path("prod")).json()["deleted"]
    assert served(platform, key, "voice") == "voice@3"
    assert client.delete("/v1/adapters/voice").status_code == 200
    assert client.get("/v1/adapters").json()["data"] == []
    # The tenants of other tests also have versions 1, 2 and 3 with the same weights.
    assert blobs() <= before


def test_the_pin_of_an_alias_covers_the_versions_that_it_points_to(platform: Platform) -> None:
    key = tenant_with(platform, "pinned", 3)
    put(platform, key, "prod", {"1": 90, "2": 10})

    def pinned_versions() -> list[int]:
        versions = platform.api(key).get("/v1/adapters/voice/versions").json()["data"]
        return [one["version"] for one in versions if one["pinned"]]

    admin = platform.api(ADMIN_KEY)
    answer = admin.put("/admin/tenants/pinned/adapters/voice@prod/pin")
    assert (answer.json()["name"], answer.json()["pinned"]) == ("voice@prod", True)
    assert pinned_versions() == [2, 1]
    put(platform, key, "prod", {"2": 100})
    assert pinned_versions() == [2]
    assert admin.put("/admin/tenants/pinned/adapters/voice/pin").json()["version"] == 3
    platform.upload(key, "voice", members(7))
    assert pinned_versions() == [4, 2]
    refused = admin.put("/admin/tenants/pinned/adapters/voice@1/pin")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_alias")
    assert not admin.delete("/admin/tenants/pinned/adapters/voice@prod/pin").json()["pinned"]
    assert pinned_versions() == [4]


def test_every_version_of_a_canary_counts_towards_the_pin_limit(platform: Platform) -> None:
    """The pool has 100 pages of 1024 bytes. Each of these versions takes 40 pages."""
    key = platform.key("wide")
    for seed in range(2):
        wide = make_members(make_config(r=20), make_tensors(20, seed))
        assert platform.upload(key, "voice", wide).status_code == 201
    put(platform, key, "prod", {"1": 90, "2": 10})
    admin = platform.api(ADMIN_KEY)
    refused = admin.put("/admin/tenants/wide/adapters/voice@prod/pin")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "pins_full")
    assert "With `voice@prod` (80 pages)" in refused.json()["error"]["message"]
    assert admin.put("/admin/tenants/wide/adapters/voice/pin").status_code == 200


def test_all_versions_of_a_reference_are_prewarmed_with_the_tenants_share(platform: Platform) -> None:
    key = tenant_with(platform, "warm", 3)
    put(platform, key, "prod", {"1": 90, "2": 10})
    platform.api(ADMIN_KEY).patch("/admin/tenants/warm", json={"weight": 3}).raise_for_status()
    client = platform.api(key)
    for reference, numbers in (("voice@prod", [1, 2]), ("voice@1", [1]), ("voice", [3])):
        platform.engine.prewarmed.clear()
        answer = client.post(f"/v1/adapters/{reference}/prewarm")
        assert (answer.status_code, answer.json()["name"]) == (202, reference)
        told = answer.json()["versions"]
        assert [(one["version"], one["place"]) for one in told] == [(n, "fetching") for n in numbers]
        asked = [(pin.version.tenant, pin.version.digest) for pin in platform.engine.prewarmed]
        assert asked == [(platform.tenant_id("warm"), one["digest"]) for one in told]
        assert {pin.share.weight for pin in platform.engine.prewarmed} == {3}
    assert client.post("/v1/adapters/voice@4/prewarm").status_code == 404
    platform.engine.ready = False
    assert client.post("/v1/adapters/voice/prewarm").status_code == 503
    platform.engine.ready = True
    assert platform.api(platform.key("cold")).post("/v1/adapters/voice/prewarm").status_code == 404


def test_a_rollout_by_command_line(platform: Platform, tmp_path: Path) -> None:
    key = platform.key("commander")
    run = partial(run_slora, platform.url, "adapter", SLORA_API_KEY=key)
    for seed in range(2):
        write_directory(tmp_path / str(seed), members(seed))
        pushed = run("push", str(tmp_path / str(seed)), "--name", "voice")
        assert pushed.startswith(f"voice@{seed + 1}  new version\n") and "rank         2;" in pushed
    assert "voice@2  already the newest version" in run("push", str(tmp_path / "1"), "--name", "voice")
    assert run("alias", "voice", "prod", "1", "--expect") == "voice@prod  1=100\n"
    assert run("alias", "voice", "prod", "1=90", "2=10", "--expect", "1") == "voice@prod  1=90  2=10\n"
    listed = [line.split()[:-1] for line in run("versions", "voice").splitlines()]
    assert [(row[0], row[3:]) for row in listed[1:]] == [
        ("voice@2", ["latest=100", "prod=10"]),
        ("voice@1", ["prod=90"]),
    ]
    rows = [line.split() for line in run("prewarm", "voice@prod").splitlines()]
    assert rows == [["VERSION", "PLACE"], ["1", "fetching"], ["2", "fetching"]]
    assert run("rollback", "voice", "prod") == run("alias", "voice", "prod") == "voice@prod  1=100\n"
    assert run("rollback", "voice") == "voice@latest  1=100  follows pushes\n"
    assert "several versions each need one, such as 1=10" in run(
        "alias", "voice", "prod", "1", "2=10", code=1
    )
    assert "'4=' is not valid: write VERSION=PERCENT" in run("alias", "voice", "prod", "4=", code=1)
    assert "each version only once" in run("alias", "voice", "prod", "1=50", "1=50", code=1)
    assert "give the VERSION" in run("alias", "voice", "prod", "--follow", code=1)
    # Answers show aliases as voice@prod. The server took this for an adapter without an alias `1=90`.
    assert "as two words: voice prod" in run("alias", "voice@prod", "1=90", "2=10", code=1)
    assert "as two words: voice prod" in run("rollback", "voice@prod", code=1)
    assert "omit the versions" in run("alias", "voice", "prod", "1", "--delete", code=1)
    assert "use --force" in run("rm", "voice@1", code=1)
    assert run("rm", "voice@1", "--force") == "removed voice@1\n"
    assert served(platform, key, "voice") == "voice@2"
    assert (
        run("alias", "voice", "new", "2")
        and run("alias", "voice", "new", "--delete") == "removed voice@new\n"
    )
    assert run("rm", "voice") == "removed voice\n"
