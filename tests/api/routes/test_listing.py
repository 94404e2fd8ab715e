"""Lists over HTTP: pages, the command line's walk over all pages, and models in the form that OpenAI clients expect."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import openai
import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.keys.key_admin import KeyAdmin
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform

NUM_NAMES = 25
NAMES = [f"voice-{number:02d}" for number in range(NUM_NAMES)]
VERSIONS = list(range(NUM_NAMES, 0, -1))
DETAILS = AdapterDetails(8, ("q_proj",), 4096)


@pytest.fixture(scope="module")
def registry(platform: Platform) -> Iterator[Registry]:
    """The platform's own registry, so that a test can fill it without uploads."""
    database = Database(platform.directory / "slora.db")
    yield Registry(database)
    database.close()


@pytest.fixture(scope="module")
def key(platform: Platform, registry: Registry) -> str:
    """The key of a tenant with many names. One name has many versions and an alias."""
    key, _ = platform.key("t"), platform.key("u")
    tenant, other = platform.tenant_id("t"), platform.tenant_id("u")
    for number, name in enumerate(NAMES):
        registry.put(name, AdapterVersion(tenant, f"{number:064x}"), DETAILS)
        registry.put("many", AdapterVersion(tenant, f"{number:064x}"), DETAILS)
    registry.move(tenant, "many", "prod", {3: 90, 7: 10})
    registry.put("zoo", AdapterVersion(other, "f" * 64), DETAILS)
    return key


@pytest.fixture
def client(platform: Platform, key: str) -> httpx.Client:
    return platform.api(key)


@pytest.fixture
def admin(platform: Platform) -> httpx.Client:
    return platform.api(ADMIN_KEY)


def walk(client: httpx.Client, path: str, called: str, **params: Any) -> list[list[Any]]:
    """The names of the items on each page."""
    pages = []
    while True:
        page = client.get(path, params=params).raise_for_status().json()
        ids = [one[called] for one in page["data"]]
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        pages.append(ids)
        if not page["has_more"]:
            return pages
        params["after"] = page["last_id"]


def test_adapters_come_in_pages_that_hold_all_of_them_once(client: httpx.Client) -> None:
    everything = ["many", *NAMES]
    assert walk(client, "/v1/adapters", "name") == [everything]
    for limit in (7, 26, 27):
        pages = walk(client, "/v1/adapters", "name", limit=limit)
        assert list(chain(*pages)) == everything and all(len(page) == limit for page in pages[:-1])
        assert pages[-1], "has_more was said of nothing"
    assert walk(client, "/v1/adapters", "name", after="voice-24") == [[]]


def test_an_operator_lists_the_adapters_of_one_tenant_in_pages(platform: Platform, key: str) -> None:
    path, everything = "/admin/tenants/t/adapters", ["many", *NAMES]
    admin = platform.api(ADMIN_KEY)
    assert walk(admin, path, "name", limit=10) == [everything[:10], everything[10:20], everything[20:]]
    shown = admin.get(path, params={"limit": 3, "after": "voice-03"}).json()
    assert shown == platform.api(key).get("/v1/adapters", params={"limit": 3, "after": "voice-03"}).json()
    assert admin.get("/admin/tenants/nobody/adapters").status_code == 404
    platform.key("without-adapters")
    assert walk(admin, "/admin/tenants/without-adapters/adapters", "name") == [[]]


def test_an_operator_finds_adapters_of_any_tenant_by_a_part_of_a_name(
    platform: Platform, admin: httpx.Client, registry: Registry, key: str
) -> None:
    tenants = ("find-me", "find_me", "elsewhere")
    for tenant in tenants:
        platform.key(tenant)
        for name in ("plain", f"to_{tenant}"):
            registry.put(name, AdapterVersion(platform.tenant_id(tenant), "f" * 64), DETAILS)
    names = {platform.tenant_id(tenant): tenant for tenant in tenants}

    def find(contains: str, limit: int = 100) -> list[list[str]]:
        pages = walk(admin, "/admin/adapters", "id", contains=contains, limit=limit)
        pairs = [[one.split("/") for one in page] for page in pages]
        return [sorted(f"{names.get(tenant)}/{name}" for tenant, name in page) for page in pairs]

    assert find("FIND") == [["find-me/plain", "find-me/to_find-me", "find_me/plain", "find_me/to_find_me"]]
    assert find("find_") == [["find_me/plain", "find_me/to_find_me"]]
    assert find("to_e") == [["elsewhere/to_elsewhere"]]
    assert find("nothing") == find("%") == find("/") == [[]]
    assert [len(page) for page in find("find", limit=3)] == [3, 1]
    assert [*chain(*find("", limit=7))].count("find_me/plain") == 1
    (found,) = admin.get("/admin/adapters", params={"contains": "to_e"}).json()["data"]
    assert (found["tenant"], found["name"], found["digest"]) == (
        "elsewhere",
        "to_elsewhere",
        "f" * 64,
    )
    refused = admin.get("/admin/adapters", params={"after": "plain"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    for tenant_id, tenant in names.items():
        for name in ("plain", f"to_{tenant}"):
            registry.delete(tenant_id, name, force=True)


def test_pins_of_all_tenants_come_in_pages(
    platform: Platform, admin: httpx.Client, registry: Registry, key: str
) -> None:
    t, u = platform.tenant_id("t"), platform.tenant_id("u")
    registry.put("zoo", AdapterVersion(t, "e" * 64), DETAILS)
    registry.move(t, "many", "two", {1: 50, 2: 50})
    pinned = sorted([(t, "many@prod"), (t, "many@two"), (t, "zoo@latest"), (u, "zoo@latest")])
    for tenant, reference in pinned:
        registry.pin(tenant, reference, lambda _wanted, _others: None)
    everything = [f"{tenant}/{reference}" for tenant, reference in pinned]
    assert walk(admin, "/admin/pins", "id") == [everything]
    for limit in (1, 2, 4):
        pages = walk(admin, "/admin/pins", "id", limit=limit)
        assert list(chain(*pages)) == everything and all(len(page) == limit for page in pages[:-1])
        assert pages[-1], "has_more was said of nothing"
    split = admin.get("/admin/pins", params={"limit": 1, "after": f"{t}/many@prod"}).json()["data"]
    assert [(one["tenant"], one["alias"], one["versions"]) for one in split] == [
        ("t", "two", {"1": 50, "2": 50})
    ]
    assert walk(admin, "/admin/pins", "id", after=f"{t}/no-longer@pinned") == [
        [pin for pin in everything if pin > f"{t}/no-longer@pinned"]
    ]
    refused = admin.get("/admin/pins", params={"after": "zoo@latest"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    for tenant, reference in pinned:
        registry.unpin(tenant, reference)
    registry.delete(t, "zoo", force=True)
    registry.delete_alias(t, "many", "two")


def test_keys_come_in_pages_oldest_first(platform: Platform, admin: httpx.Client) -> None:
    store = platform.services.keys.store
    keyed = platform.services.tenant_store.create_tenant("keyed").tenant_id
    own = [KeyAdmin(store).create_key(keyed, None)[0] for _ in range(5)]
    operators = [KeyAdmin(store).create_operator_key(f"operator {number}")[0] for number in range(3)]
    for path, keys in (("/admin/tenants/keyed/keys", own), ("/admin/keys", operators)):
        # Keys that are made in the same second are sorted by id.
        everything = [key.key_id for key in sorted(keys, key=lambda key: (key.created_at, key.key_id))]
        assert walk(admin, path, "key_id") == [everything]
        for limit in (2, 5):
            pages = walk(admin, path, "key_id", limit=limit)
            assert list(chain(*pages)) == everything and all(len(page) == limit for page in pages[:-1])
            assert pages[-1], "has_more was said of nothing"
        assert walk(admin, path, "key_id", after=everything[-1]) == [[]]
        refused = admin.get(path, params={"after": "nothing0"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    for key in operators:
        KeyAdmin(store).revoke_key(key.key_id)


def test_versions_come_in_pages_newest_first_with_their_aliases(client: httpx.Client) -> None:
    path = "/v1/adapters/many/versions"
    assert walk(client, path, "version") == [VERSIONS]
    assert walk(client, path, "version", limit=10) == [VERSIONS[:10], VERSIONS[10:20], VERSIONS[20:]]
    third = client.get(path, params={"limit": 1, "after": 4}).json()["data"]
    assert third == [client.get("/v1/adapters/many@3").json()] and third[0]["aliases"] == {"prod": 90}
    assert walk(client, path, "version", after=1) == [[]]
    assert client.get("/v1/adapters/zoo/versions", params={"after": 1}).status_code == 404


def test_models_come_all_at_once_unless_a_limit_says_how_many(client: httpx.Client) -> None:
    everything = ["base", "many", "many@prod", *NAMES]
    assert walk(client, "/v1/models", "id") == [everything]
    for limit in (7, 28):
        pages = walk(client, "/v1/models", "id", limit=limit)
        assert (
            list(chain(*pages)) == everything and all(len(page) == limit for page in pages[:-1]) and pages[-1]
        )
    assert walk(client, "/v1/models", "id", after="many") == [everything[2:]]
    for model in ("many@3", "No Model", ""):
        refused = client.get("/v1/models", params={"after": model})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


def test_with_anthropics_header_models_are_listed_in_its_form(
    client: httpx.Client, platform: Platform, key: str, *, soak: bool
) -> None:
    """Born from Anthropic's SDK, which found no field of its own in OpenAI's list."""
    everything = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert everything[:3] == ["base", "many", "many@prod"] and len(everything) == 28
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=platform.url, headers=headers, verify=False) as sdk:

        def list_page(**params: Any) -> tuple[list[str], bool]:
            page = sdk.get("/v1/models", params=params).raise_for_status().json()
            ids = [model["id"] for model in page["data"]]
            assert sorted(page) == ["data", "first_id", "has_more", "last_id"]
            assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            return ids, page["has_more"]

        assert list_page() == (everything[:20], True)
        assert list_page(after_id=everything[19]) == (everything[20:], False)
        places = range(28) if soak else (0, 1, 8, 9, 10, 26, 27)
        for limit in (9, 28):
            for at, name in ((at, everything[at]) for at in places):
                start = max(0, at - limit)
                assert list_page(limit=limit, before_id=name) == (everything[start:at], start > 0)
                end = at + 1 + limit
                assert list_page(limit=limit, after_id=name) == (everything[at + 1 : end], end < 28)
        assert list_page(before_id="voice-00-deleted") == (everything[:4], False)
        assert list_page(**{"lifecycle[]": ["retired", "deprecated"]}) == ([], False)
        assert list_page(limit=1, **{"lifecycle[]": ["retired", "active"]}) == (["base"], True)
        model = sdk.get("/v1/models/many@prod").raise_for_status()
        assert model.headers["request-id"] and model.json()["created_at"].endswith("Z")
        assert model.json() == sdk.get("/v1/models", params={"limit": 3}).json()["data"][-1]
        assert (
            model.json().items() >= {"type": "model", "id": "many@prod", "display_name": "many@prod"}.items()
        )
        refused = [
            sdk.get("/v1/models", params={"after_id": "base", "before_id": "many"}),
            sdk.get("/v1/models", params={"before_id": "no name"}),
            sdk.get("/v1/models/nope"),
        ]
        kinds = [(answer.status_code, answer.json()["error"]["type"]) for answer in refused]
        assert kinds == [(400, "invalid_request_error")] * 2 + [(404, "not_found_error")]
    assert client.get("/v1/models", params={"before_id": "many"}).json()["error"]["param"] == "before_id"
    without = httpx.get(platform.url + "/v1/models", headers={"x-api-key": key}, verify=False)
    assert without.status_code == 401


def test_openais_client_sees_every_model(platform: Platform, registry: Registry) -> None:
    """The list is longer than a page of other lists, because OpenAI's client requests only one page."""
    key = platform.key("crowd")
    for number in range(110):
        registry.put(f"name-{number}", AdapterVersion(platform.tenant_id("crowd"), "1" * 64), DETAILS)
    with openai.OpenAI(base_url=platform.url + "/v1", api_key=key) as client:
        assert len(list(client.models.list())) == 111


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many"])
def test_an_invalid_page_limit_is_refused_by_name(
    client: httpx.Client, admin: httpx.Client, limit: str
) -> None:
    for path in ("/v1/adapters", "/v1/models", "/v1/adapters/many/versions", "/admin/pins", "/admin/keys"):
        sender = admin if path.startswith("/admin") else client
        refused = sender.get(path, params={"limit": limit})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("after", ["0", "many@3", str(10**18)])
def test_a_page_after_an_invalid_version_is_refused(client: httpx.Client, after: str) -> None:
    refused = client.get("/v1/adapters/many/versions", params={"after": after})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


def test_the_command_line_walks_all_pages(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora_api.cli.remote.MAX_LIMIT", 10)

    def read_first_column(*arguments: str) -> list[str]:
        shown = run_slora(platform.url, "adapter", *arguments, SLORA_API_KEY=key)
        return [line.split()[0] for line in shown.splitlines()]

    assert read_first_column("list") == ["ADAPTER", "many", *NAMES]
    assert read_first_column("versions", "many") == ["VERSION", *(f"many@{number}" for number in VERSIONS)]
