"""Shares of tenants: an operator's change applies to the next request."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora.core.request import TenantShare
from slora_adapters.database.database import Database
from slora_api.core.errors import BadRequest, NotFound
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from tests.api.platform import Platform, open_tenant_store, post

PROMPT = {"model": "base", "prompt": "hello"}
DEFAULT = {"weight": 1.0, "min_pool_share": 0.0, "max_pool_share": 1.0, "priority": 0}


@pytest.fixture
def tenant_store(database_place: str, tmp_path: Path) -> Iterator[TenantStore]:
    with closing(Database(database_place)) as database:
        yield open_tenant_store(database, tmp_path)


def share_of(tenant: dict[str, Any]) -> dict[str, Any]:
    return {name: tenant[name] for name in DEFAULT}


def test_a_tenant_has_the_default_share_until_it_is_given_another(admin: httpx.Client) -> None:
    made = admin.post("/admin/tenants", json={"name": "plain"})
    assert (made.status_code, share_of(made.json())) == (201, DEFAULT)
    changed = admin.patch("/admin/tenants/plain", json={"weight": 2, "min_pool_share": 0.1})
    assert (changed.status_code, share_of(changed.json())) == (
        200,
        DEFAULT | {"weight": 2.0, "min_pool_share": 0.1},
    )
    # Fields that are not named keep their values.
    again = admin.patch("/admin/tenants/plain", json={"max_pool_share": 0.5, "priority": -5, "weight": None})
    expected = {"weight": 2.0, "min_pool_share": 0.1, "max_pool_share": 0.5, "priority": -5}
    assert share_of(again.json()) == expected
    assert admin.get("/admin/tenants/plain").json() == again.json()
    assert again.json() in admin.get("/admin/tenants").json()["data"]


def test_tenants_are_listed_in_pages_and_found_by_a_part_of_their_name(admin: httpx.Client) -> None:
    for number in range(3):
        admin.post("/admin/tenants", json={"name": f"paged_{number}"}).raise_for_status()
    admin.post("/admin/tenants", json={"name": "pagedx9"}).raise_for_status()

    def read_page(**params: str | int | list[str]) -> tuple[list[str], bool]:
        page = admin.get("/admin/tenants", params=params).raise_for_status().json()
        names = [tenant["name"] for tenant in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
        return names, page["has_more"]

    # An underscore is no wildcard.
    assert read_page(contains="AGED_", limit=2) == (["paged_0", "paged_1"], True)
    assert read_page(contains="AGED_", limit=2, after="paged_1") == (["paged_2"], False)
    assert read_page(name=["paged_2", "no-such-tenant", "paged_0"]) == (["paged_0", "paged_2"], False)
    assert read_page(contains="%") == ([], False)
    walked, more = read_page(limit=1)
    while more:
        page, more = read_page(limit=1, after=walked[-1])
        walked += page
    assert walked == read_page(limit=1000)[0]
    for params in ({"limit": 0}, {"limit": 1001}, {"contains": "a" * 129}, {"name": ["a"] * 101}):
        refused = admin.get("/admin/tenants", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(params)))


def test_a_new_share_holds_for_the_very_next_request_of_the_process_that_makes_it(
    platform: Platform, admin: httpx.Client
) -> None:
    key = platform.key("changing")
    post(platform, key, "/v1/completions", PROMPT)
    admin.patch("/admin/tenants/changing", json={"weight": 4, "min_pool_share": 0.1, "priority": 2})
    post(platform, key, "/v1/completions", PROMPT)
    assert [request.share for request in platform.engine.requests[-2:]] == [
        TenantShare(),
        TenantShare(4, 0.1, 1, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"weight": "2"}, "weight"),
        ({"min_pool_share": -0.1}, "min_pool_share"),
        ({"max_pool_share": 1.1}, "max_pool_share"),
        ({"min_pool_share": 0.5, "max_pool_share": 0.4}, "max_pool_share"),
        ({"priority": 1001}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"wieght": 2}, "wieght"),
    ],
)
def test_an_invalid_share_is_refused_by_field(
    admin: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    admin.post("/admin/tenants", json={"name": "refused"})
    for answer in (
        admin.patch("/admin/tenants/refused", json=changes),
        admin.post("/admin/tenants", json={"name": "never-made", **changes}),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert share_of(admin.get("/admin/tenants/refused").json()) == DEFAULT
    assert admin.get("/admin/tenants/never-made").status_code == 404


@pytest.mark.parametrize("weight", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_non_numeric_weight_is_refused(admin: httpx.Client, weight: bytes) -> None:
    admin.post("/admin/tenants", json={"name": "refused"})
    answer = admin.patch(
        "/admin/tenants/refused",
        content=b'{"weight": %s}' % weight,
        headers={"Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight")


def test_changing_the_share_of_an_unknown_tenant_is_refused(
    admin: httpx.Client, tenant_store: TenantStore
) -> None:
    assert admin.patch("/admin/tenants/nobody", json={"weight": 2}).status_code == 404
    with pytest.raises(NotFound):
        tenant_store.find_tenant("nobody")


def test_floors_of_all_tenants_fit_the_pool_together(tenant_store: TenantStore) -> None:
    a, b, _, d = (
        tenant_store.create_tenant(name, ShareChanges(min_pool_share=floor)).tenant_id
        for name, floor in (("a", 0.7), ("b", 0.2), ("c", 0.1), ("d", 0.0))
    )
    with pytest.raises(
        BadRequest, match=r"is 0.25, but the shares of other tenants leave only 0 of the pool"
    ):
        tenant_store.change_share(d, ShareChanges(min_pool_share=0.25))
    with pytest.raises(BadRequest, match=r"leave only 0\.2 of the pool"):
        tenant_store.change_share(b, ShareChanges(min_pool_share=0.3))
    with pytest.raises(BadRequest):
        tenant_store.create_tenant("e", ShareChanges(min_pool_share=0.01))
    assert [(tenant.name, tenant.share.min_share) for tenant in tenant_store.list_tenants()] == [
        ("a", 0.7),
        ("b", 0.2),
        ("c", 0.1),
        ("d", 0.0),
    ]
    tenant_store.change_share(a, ShareChanges(min_pool_share=0.4))
    assert tenant_store.change_share(d, ShareChanges(min_pool_share=0.25)).share.min_share == 0.25


def test_a_floor_above_the_current_ceiling_is_refused(tenant_store: TenantStore) -> None:
    t = tenant_store.create_tenant("t", ShareChanges(max_pool_share=0.3)).tenant_id
    with pytest.raises(BadRequest, match=r"0\.5, which is more than `max_pool_share` \(0\.3\)") as caught:
        tenant_store.change_share(t, ShareChanges(min_pool_share=0.5))
    assert caught.value.param == "min_pool_share"
