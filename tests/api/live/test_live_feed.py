"""The live feed over HTTP: its viewers share one observation, and each sees what its key may see."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from slora.core.engine_state import EngineStats
from slora_api.core.errors import TenantBusy
from slora_api.metrics.live_feed import LiveFeed
from slora_api.metrics.names import CachedNames, ServerNames
from tests.api.live.test_frame import LIVE, STATE
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(snapshot=STATE), follows=True)


def read_events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def make_state(mine: str) -> EngineStats:
    """`STATE` with this id of the tenant `mine`."""
    owners = tuple(
        owner._replace(tenant=mine if owner.tenant == "mine" else owner.tenant)
        for owner in LIVE.page_map.owners
    )
    live = replace(
        LIVE,
        page_map=replace(LIVE.page_map, owners=owners),
        tenants={"rival": LIVE.tenants["rival"], mine: LIVE.tenants["mine"]},
    )
    return replace(STATE, live=live)


def no_names() -> ServerNames:
    return ServerNames(*(CachedNames(lambda keys: {}, 1.0) for _ in range(3)))


def test_each_key_gets_the_frames_of_its_rights(platform: Platform) -> None:
    key = platform.key("mine")
    platform.engine.snapshot = make_state(platform.tenant_id("mine"))
    answer = platform.api(key).get("/v1/live", params={"frames": 2}).raise_for_status()
    own = list(read_events(answer))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [one["tenants"][0]["tenant"] for one in own] == ["mine", "mine"]
    assert "rival" not in answer.text
    (frame,) = read_events(platform.api(ADMIN_KEY).get("/admin/live"))
    assert [one["tenant"] for one in frame["tenants"]] == ["rival", "mine"]


@pytest.mark.parametrize("path", ["/v1/live", "/admin/live"])
def test_frames_are_as_the_openapi_document_says(platform: Platform, path: str) -> None:
    document = httpx.get(f"{platform.url}/openapi.json", verify=False).json()
    answer = document["paths"][path]["get"]["responses"]["200"]["content"]["text/event-stream"]
    schema = answer["schema"]["contentSchema"] | {"components": document["components"]}
    (frame,) = read_events(platform.api(platform.key("mine") if path == "/v1/live" else ADMIN_KEY).get(path))
    Draft202012Validator(schema).validate(frame)
    assert frame is not None
    wrong = {**frame, "pool": {}}
    assert not Draft202012Validator(schema).is_valid(wrong)


def test_frames_are_null_while_no_engine_answers(platform: Platform) -> None:
    platform.engine.ready = False
    assert list(read_events(platform.api(platform.key("mine")).get("/v1/live"))) == [None]
    platform.engine.ready = True


@pytest.mark.parametrize("is_operator", [False, True])
def test_a_revoked_key_ends_its_feed_with_the_reason(platform: Platform, is_operator: bool) -> None:
    admin = platform.api(ADMIN_KEY)
    path = "/admin/keys" if is_operator else "/admin/tenants/mine/keys"
    platform.key("mine")
    made = admin.post(path, json={"name": "watcher"}).json()
    path = "/admin/live" if is_operator else "/v1/live"
    with platform.api(made["key"]).stream("GET", path, params={"frames": 1000}) as answer:
        events = read_events(answer)
        assert next(events)["object"] == "live.frame"
        admin.delete(f"/admin/keys/{made['key_id']}").raise_for_status()
        *_, last = events
    assert last["error"]["code"] == "invalid_api_key"
    assert "revoked" in last["error"]["message"]


@pytest.mark.parametrize("is_operator", [False, True])
def test_a_feed_ends_when_its_key_expires(
    platform: Platform, is_operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/admin/keys" if is_operator else "/admin/tenants/mine/keys"
    platform.key("mine")
    body = {"name": "watcher", "expires_at": int(time.time()) + 3600}
    made = platform.api(ADMIN_KEY).post(path, json=body).json()
    path = "/admin/live" if is_operator else "/v1/live"
    with platform.api(made["key"]).stream("GET", path, params={"frames": 1000}) as answer:
        events = read_events(answer)
        assert next(events)["object"] == "live.frame"
        monkeypatch.setattr(platform.services.keys.store, "wall_clock", lambda: time.time() + 7200)
        *_, last = events
    assert last["error"]["code"] == "invalid_api_key" and "expired" in last["error"]["message"]


def test_viewers_share_observations_and_a_slow_one_skips_frames() -> None:
    async def watch() -> None:
        engine = ScriptedEngine(snapshot=STATE)
        feed = LiveFeed(engine, no_names())
        slow, *others = [feed.watch("mine") for _ in range(20)]
        await anext(slow)
        for _ in range(5):
            await asyncio.gather(*map(anext, others))
        engine.snapshot = replace(STATE, live=replace(LIVE, time_s=2000.0))
        await asyncio.gather(*map(anext, others))
        await asyncio.gather(*map(anext, others))
        assert b'"time":2000.0' in await anext(slow)  # the newest, not the second
        assert engine.num_observations <= 10
        for viewer in (slow, *others):
            await viewer.aclose()
        num_observations = engine.num_observations
        await asyncio.sleep(1.0)
        assert engine.num_observations <= num_observations + 1  # nothing is observed without viewers

    asyncio.run(watch())


def test_a_tenant_may_open_a_bounded_number_of_feeds() -> None:
    async def watch() -> None:
        feed = LiveFeed(ScriptedEngine(snapshot=STATE), no_names())
        open_ones = [feed.watch("mine") for _ in range(64)]
        await asyncio.gather(*map(anext, open_ones))
        with pytest.raises(TenantBusy, match="64 consoles"):
            await anext(feed.watch("mine"))
        other = feed.watch("other")
        await anext(other)
        await open_ones.pop().aclose()
        again = feed.watch("mine")
        await anext(again)
        for viewer in (*open_ones, other, again):
            await viewer.aclose()

    asyncio.run(watch())


def test_a_feed_ends_when_the_server_stops() -> None:
    async def watch() -> None:
        is_stopping = False
        feed = LiveFeed(ScriptedEngine(snapshot=STATE), no_names(), lambda: is_stopping)
        viewer = feed.watch("mine")
        await anext(viewer)
        is_stopping = True
        with pytest.raises(StopAsyncIteration):
            await anext(viewer)

    asyncio.run(watch())
