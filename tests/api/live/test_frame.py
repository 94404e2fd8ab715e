"""What a viewer sees of an observation, and what it must not see."""

import base64
import json
from array import array
from dataclasses import replace

from slora.core.engine_state import (
    AdapterWork,
    EngineState,
    LiveState,
    PageCounts,
    PageMap,
    PageOwner,
    PoolEvent,
    Quantiles,
    TenantState,
)
from slora_adapters.version import AdapterVersion
from slora_api.metrics.frame import FrameMaker, Names
from tests.api.scripted_engine import STATS

_SECRET, _OWN = "5ec" + "0" * 61, "aaa" + "0" * 61
_OWNERS = (
    PageOwner("kv", "mine"),
    PageOwner("adapter", "mine", _OWN),
    PageOwner("kv", "rival"),
    PageOwner("idle_adapter", "rival", _SECRET),
)
LIVE = LiveState(
    time_s=1000.0,
    page_map=PageMap(1, array("H", [1, 1, 2, 3, 4, 4, 0, 0, 0, 0]).tobytes(), _OWNERS),
    total=TenantState(PageCounts(), 5, 6, 30.0, Quantiles(0.9, 1.9, 9)),
    tenants={
        "rival": TenantState(PageCounts(kv=1, idle_adapters=2), 4, 6, 20.0, Quantiles(0.9, 1.9, 8)),
        "mine": TenantState(PageCounts(kv=2, adapters=1), 1, 0, 10.0, Quantiles(0.2, 0.3, 1)),
    },
    adapters=(AdapterWork("rival", _SECRET, 60), AdapterWork("mine", _OWN, 30), AdapterWork("mine", "", 10)),
    work_tokens=100,
    step=Quantiles(0.01, 0.02, 50),
    steps_per_s=20.0,
    computed_tokens_per_s=100.0,
    events=(
        PoolEvent(1, 999.0, "load", "rival", _SECRET, 1),
        PoolEvent(2, 999.5, "preemption", "mine", "", 3),
    ),
)
STATE = replace(
    STATS,
    running=5,
    waiting=6,
    awaiting_adapter=7,
    pages_total=10,
    pages=PageCounts(kv=3, adapters=1, idle_adapters=2),
    live=LIVE,
)
NAMES = Names({AdapterVersion("mine", _OWN): "own@1", AdapterVersion("rival", _SECRET): "hidden@7"}, {})


def test_only_operators_see_the_engines() -> None:
    state = replace(STATE, engines=(EngineState("engine-0", "it is starting", "cpu", None),))
    assert FrameMaker(state, NAMES).make("mine")["engines"] == []
    (shown,) = FrameMaker(state, NAMES).make(None)["engines"]
    assert (shown["name"], shown["serving"], shown["detail"]) == ("engine-0", False, "it is starting")


def test_a_tenant_sees_itself_by_name_and_others_as_a_sum() -> None:
    frame = FrameMaker(STATE, NAMES).make("mine")
    pool = frame["pool"]
    cells, owners = base64.b64decode(pool["cells"]), pool["owners"]
    shown = ["free" if cell == 0 else owners[cell - 1]["content"] for cell in cells]
    assert shown == ["kv", "kv", "adapter", "other", "other", "other", "free", "free", "free", "free"]
    assert [one.get("adapter") for one in owners] == [None, "own@1", None]
    assert pool["counts"] == {
        "free": 4,
        "kv": 2,
        "prefixes": 0,
        "adapters": 1,
        "idle_adapters": 0,
        "other": 3,
    }
    traffic = frame["traffic"]
    assert (traffic["tokens_per_s"], traffic["running"], traffic["waiting"]) == (10.0, 1, 0)
    assert traffic["first_token"] == {"p50": 0.2, "p99": 0.3, "count": 1}
    assert frame["adapters"] == [
        {"tenant": "mine", "adapter": "own@1", "share": 0.3},
        {"tenant": "mine", "adapter": None, "share": 0.1},
        {"tenant": None, "adapter": None, "share": 0.6},
    ]
    assert [one["tenant"] for one in frame["tenants"]] == ["mine"]
    assert [one["kind"] for one in frame["events"]] == ["preemption"]
    text = json.dumps(frame)
    assert not any(word in text for word in ("rival", "hidden", _SECRET[:12]))


def test_a_tenant_without_pages_sees_nothing_of_its_own() -> None:
    frame = FrameMaker(STATE, NAMES).make("absent")
    assert frame["pool"]["counts"]["other"] == 6 and frame["tenants"] == []
    assert {one["content"] for one in frame["pool"]["owners"]} == {"other"}


def test_shares_count_the_work_of_adapters_that_are_not_listed() -> None:
    state = replace(STATE, live=replace(LIVE, work_tokens=200))
    assert FrameMaker(state, NAMES).make(None)["adapters"] == [
        {"tenant": "rival", "adapter": "hidden@7", "share": 0.3},
        {"tenant": "mine", "adapter": "own@1", "share": 0.15},
        {"tenant": "mine", "adapter": None, "share": 0.05},
        {"tenant": None, "adapter": None, "share": 0.5},
    ]
    assert FrameMaker(state, NAMES).make("mine")["adapters"][-1]["share"] == 0.8


def test_owners_beyond_the_limit_are_shown_as_others() -> None:
    owners = tuple(PageOwner("kv", f"t{number}") for number in range(400))
    cells = array("H", range(1, 401)).tobytes()
    live = replace(LIVE, page_map=PageMap(1, cells, owners), tenants={})
    state = replace(STATE, pages_total=400, pages=PageCounts(kv=400), live=live)
    pool = FrameMaker(state, Names({}, {})).make(None)["pool"]
    assert len(pool["owners"]) == 251 and pool["owners"][-1]["content"] == "other"
    assert base64.b64decode(pool["cells"]).count(251) == 150
