"""What `slora top` draws: readable in 80 columns, never wider than the screen, and without control characters."""

import copy
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from slora.core.engine_state import EngineState, PageCounts
from slora_api.metrics.frame import FrameMaker
from slora_api.metrics.top_command import LiveHistory, draw_screen
from tests.api.live.test_frame import LIVE, NAMES, STATE


def make_frame(tenant: str | None = None) -> dict[str, Any]:
    return copy.deepcopy(dict(FrameMaker(STATE, NAMES).make(tenant)))


def draw(
    frame: dict[str, Any] | None, width: int = 80, height: int | None = None, message: str = ""
) -> list[str]:
    history = LiveHistory()
    history.take(frame)
    return [line.text.rstrip() for line in draw_screen(history, "slora top", width, height, message)]


def test_an_operator_sees_all_tenants_in_80_columns() -> None:
    clock = datetime.fromtimestamp(LIVE.time_s).strftime("%H:%M:%S")
    assert draw(make_frame()) == [
        f"slora top{clock:>71}",
        "traffic    30.0 tokens/s   running 5   waiting 6 (7 for an adapter)",
        "latency    TTFT p50 900 ms p99 1.90 s   ITL -",
        "steps      p50 10 ms p99 20 ms   20.0/s   5.0 tokens each",
        "pool       [#################======------------.......................] 10 pages",
        "           # KV 3  = adapters 1  - idle adapters 2  . free 4",
        "last 60 s  loads 1   evictions 0   prefix evictions 0   preemptions 3",
        "",
        "TENANT          TOKENS/S  RUNNING  WAITING  PAGES",
        "rival               20.0        4        6      3",
        "mine                10.0        1        0      3",
        "",
        "ADAPTER         TENANT          WORK",
        "hidden@7        rival            60%",
        "own@1           mine             30%",
        "(base model)    mine             10%",
    ]


def test_several_engines_have_a_row_each_and_one_engine_has_none() -> None:
    engines = (
        EngineState("engine-0", None, "cuda:0", replace(STATE, pages=PageCounts(kv=4))),
        EngineState("engine-1", "it is starting", None, None),
    )
    frame = copy.deepcopy(dict(FrameMaker(replace(STATE, engines=engines), NAMES).make(None)))
    assert draw(frame)[8:12] == [
        "ENGINE          STATE           DEVICE          POOL  RUNNING  WAITING  STEPS/S",
        "engine-0        serving         cuda:0           40%        5        6     20.0",
        "engine-1        it is starting  -                  -        -        -        -",
        "",
    ]
    del frame["engines"][1]
    assert "ENGINE" not in "\n".join(draw(frame))


def test_a_screen_ends_with_the_newest_events() -> None:
    lines = draw(make_frame(), height=24)
    assert lines[-3] == "EVENTS"
    assert lines[-2].endswith("preemption, tenant mine (3 times)")
    assert lines[-1].endswith("load of hidden@7, tenant rival")


@pytest.mark.parametrize("tenant", [None, "mine"])
def test_nothing_is_wider_or_higher_than_the_screen(tenant: str | None) -> None:
    frame = make_frame(tenant)
    frame["tenants"] *= 40
    frame["adapters"] *= 40
    for width in (1, 10, 40, 80, 200):
        for height in (1, 5, 10, 24, 60):
            lines = draw(frame, width, height, "a message " * 30)
            assert len(lines) <= height and max(map(len, lines)) <= width
    shown = "\n".join(draw(frame, 80, 24))
    assert all(heading in shown for heading in ("TENANT", "ADAPTER", "EVENTS"))


def test_control_characters_in_names_do_not_reach_the_terminal() -> None:
    frame = make_frame()
    evil = "\x1b]0;title\x07\x9b2J\r\n\u202eabc"
    frame["tenants"][0]["tenant"] = frame["adapters"][0]["adapter"] = frame["adapters"][0]["tenant"] = evil
    frame["events"][0]["adapter"] = evil
    lines = draw(frame, height=40, message=evil)
    assert any("?]0;title??2J???abc" in line for line in lines)
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_an_event_is_counted_once_and_a_new_engine_begins_again() -> None:
    history = LiveHistory()
    frame = make_frame()
    for _ in range(3):
        history.take(frame)
    assert history.count_recent() == {"load": 1, "preemption": 3}
    restarted = make_frame()
    restarted["events"] = [{**restarted["events"][0], "number": 1, "time": LIVE.time_s}]
    history.take(None)
    history.take(restarted)
    assert history.count_recent() == {"load": 2, "preemption": 3}
    restarted["time"] += 3600
    history.take(restarted)
    assert not history.count_recent()
