"""The health of the host by the minute: the file, the recorder, and what /admin/history makes of it."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from slora_api.metrics.history import (
    CONDITIONS,
    MINUTE_S,
    NUM_MINUTES,
    HealthRecorder,
    HistoryFile,
    find_conditions,
    merge_records,
    quantile,
    seconds_to_end,
)
from tests.api.platform import ADMIN_KEY, Platform, bearer, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.served import wait_for

NOW = 1_800_000_000 // MINUTE_S * MINUTE_S
QUIET: Mapping[str, Any] = {
    "answers": {"200": 10},
    "failures": {},
    "first_token": [0.1, 0.2, 0.3, 10],
    "queue_p95": 0.1,
    "starts": {"warm": 10},
    "engines": [1, 1],
    "ready": True,
    "read_only": False,
    "disk_free": 1 << 30,
    "ledger_lag": 0.5,
    "journal_bytes": 1000,
    "restarts": {},
    "gap": [0.01, 0.02, 0.03, 100],
    "tokens": 100,
    "prompt_tokens": 50,
    "running": 1,
    "waiting": 0,
    "pages": [60, 50, 100],
    "preemptions": 0,
    "fetch_failures": 0,
    "not_finite": 0,
    "pins_missing": 0,
}


def make_records(num_minutes: int, **changed: Any) -> list[dict[str, Any]]:
    """The records of the last minutes, the newest of which has just ended."""
    return [{"at": NOW - back * MINUTE_S, **QUIET, **changed} for back in range(num_minutes, 0, -1)]


def test_the_file_keeps_the_last_24_hours_and_leaves_out_a_torn_record(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "history")
    assert file.read(0) == []
    file.allocate()
    assert (tmp_path / "history").stat().st_size == NUM_MINUTES * 1024 and file.read(0) == []
    records = make_records(NUM_MINUTES + 10)
    for record in records:
        file.write(record)
    assert (tmp_path / "history").stat().st_size == NUM_MINUTES * 1024
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
    again = HistoryFile(tmp_path / "history")
    assert again.read(0) == records[10:]
    assert again.read(NOW - 5 * MINUTE_S) == records[-5:]
    content = bytearray((tmp_path / "history").read_bytes())
    slot = records[-1]["at"] // MINUTE_S % NUM_MINUTES
    content[slot * 1024 + 20 : (slot + 1) * 1024] = bytes(1004)
    (tmp_path / "history").write_bytes(content)
    assert again.read(0) == records[10:-1]


def test_a_record_with_long_names_loses_its_failures_but_not_its_counts(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "history")
    (record,) = make_records(1, failures={f"429 /v1/{'x' * 200}{number}": 1 for number in range(5)})
    file.write(record)
    assert file.read(0) == [{**record, "failures": {}, "failing": {}}]


def test_quantiles_are_those_of_prometheus() -> None:
    inf = float("inf")
    buckets = {0.1: 50.0, 0.5: 90.0, 1.0: 99.0, inf: 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.7) == pytest.approx(0.3)
    assert quantile(buckets, 0.95) == pytest.approx(0.5 + 0.5 * 5 / 9)
    assert quantile(buckets, 0.999) == 1.0, "the last bucket has no upper bound"
    assert quantile({0.1: 0.0, inf: 0.0}, 0.5) is None and quantile({}, 0.5) is None


def test_merged_minutes_add_up_and_hide_no_bad_one() -> None:
    good, bad = make_records(2)
    bad |= {
        "answers": {"200": 5, "500": 5},
        "failures": {"500 /v1/completions": 5},
        "first_token": [0.3, 5.0, 9.0, 30],
        "ready": False,
        "engines": [0, 1],
        "restarts": {"engine": 1},
        "disk_free": 5,
        "waiting": 7,
    }
    (merged,) = merge_records([good, bad], 24 * 3600)
    assert merged["minutes"] == 2
    assert merged["answers"] == {"200": 15, "500": 5} and merged["failures"] == {"500 /v1/completions": 5}
    assert merged["first_token"] == [pytest.approx(0.25), 5.0, 9.0, 40]
    assert (merged["ready"], merged["engines"], merged["disk_free"], merged["waiting"]) == (
        False,
        [0, 1],
        5,
        7,
    )
    assert merged["restarts"] == {"engine": 1} and merged["tokens"] == 200


# The name of a rule -> a record of which the condition holds.
BAD: Mapping[str, Mapping[str, Any]] = {
    "SloraNotReady": {"ready": False},
    "SloraReadOnly": {"read_only": True},
    "SloraProcessRestarts": {"restarts": {"engine": 1}},
    "SloraServerErrors": {"answers": {"200": 90, "503": 10}},
    "SloraUsageNotInLedger": {"ledger_lag": 61},
    "SloraUsageJournalLarge": {"journal_bytes": 6e8},
    "SloraCorruptedRequests": {"not_finite": 1},
    "SloraSlowFirstToken": {"first_token": [1, 11, 12, 10]},
    "SloraLongQueue": {"queue_p95": 6},
    "SloraPoolFull": {"pages": [100, 98, 100]},
    "SloraPreemptions": {"preemptions": 31},
    "SloraColdStarts": {"starts": {"cold": 6, "warm": 4}},
    "SloraAdapterFetchFailures": {"fetch_failures": 1},
    "SloraPinsMissing": {"pins_missing": 2},
}


@pytest.mark.parametrize("name", BAD)
def test_a_condition_holds_after_its_time_and_no_longer_when_a_minute_is_good(name: str) -> None:
    minutes = next(one.minutes for one in CONDITIONS if one.name == name)
    bad = make_records(20, **BAD[name])
    assert [one["name"] for one in find_conditions(bad, NOW) if one["holds"]] == [name]
    assert not any(one["holds"] for one in find_conditions(make_records(20), NOW))
    long_ago = [*bad[: 18 - minutes], *make_records(minutes + 2)]
    assert not any(one["holds"] for one in find_conditions(long_ago, NOW))
    assert not any(one["holds"] for one in find_conditions([], NOW)), "nothing is known yet"
    if name not in ("SloraProcessRestarts", "SloraCorruptedRequests"):  # these count in a window
        short = make_records(minutes - 1, **BAD[name])
        assert not any(one["holds"] for one in find_conditions(short, NOW)), "it has not lasted"


def test_the_conditions_are_those_of_the_rules() -> None:
    """Their names, severities, numbers and times. Only a Prometheus can see that a server does not answer at all."""
    path = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"][0]["rules"]
    by_name = {rule["alert"]: rule for rule in rules}
    assert by_name.keys() - {"SloraDown"} == {one.name for one in CONDITIONS} == BAD.keys()
    for one in CONDITIONS:
        rule = by_name[one.name]
        assert rule["labels"]["severity"] == one.severity
        window = re.search(r"increase\(.*\[(\d+)m\]", rule["expr"])
        written = rule.get("for") or (f"{window[1]}m" if window else "1m")
        assert written == f"{one.minutes}m", one.name


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path, ScriptedEngine()) as running:
        yield running


def test_a_recorded_minute_has_what_happened_in_it(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, foundation = platform.services, platform.services.foundation
    recorder = HealthRecorder(
        foundation,
        services.generator.metrics,
        services.generator.metrics.restarts,
        lambda: True,
        services.shipper,
        clock=lambda: NOW + 0.0,
    )
    platform.says("hello")
    key = platform.key("watched")
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}

    def ask(client: httpx.Client, model: str) -> int:
        return client.post("/v1/chat/completions", json=body | {"model": model}).status_code

    def wait_until_counted(num_answers: int) -> None:
        """An answer is counted after the client has it."""

        def count() -> float:
            counts = services.generator.metrics.read_counts({"slora_http_requests_total": ("route",)})
            return counts.get(("slora_http_requests_total", ("/v1/chat/completions",)), 0)

        wait_for(lambda: count() == num_answers or None)

    with httpx.Client(base_url=platform.url, headers=bearer(key), verify=False) as client:
        ask(client, "default")  # before the minute
        wait_until_counted(1)
        begun = asyncio.run(recorder.count())
        assert [ask(client, "default") for _ in range(3)] == [200] * 3
        assert [ask(client, "nobody") for _ in range(2)] == [404] * 2
        client.get("/healthz")
        wait_until_counted(6)
        asyncio.run(recorder.record(begun))
    with httpx.Client(base_url=platform.url, headers=bearer(ADMIN_KEY), verify=False) as admin:
        assert admin.get("/admin/history", params={"hours": 25}).status_code == 400
    (record,) = HistoryFile(foundation.data.history).read(0)
    assert record["at"] == NOW - MINUTE_S
    assert record["answers"] == {"200": 3, "404": 2}
    assert record["failures"] == {"404 /v1/chat/completions": 2}
    tenant = platform.tenant_id("watched")
    assert record["failing"] == {f"404 {tenant}": 2}
    with httpx.Client(base_url=platform.url, headers=bearer(ADMIN_KEY), verify=False) as admin:
        admin.patch("/admin/tenants/watched", json={"name": "renamed"}).raise_for_status()
        monkeypatch.setattr("slora_api.operations.routes.time.time", lambda: NOW + 1.0)
        shown = admin.get("/admin/history").json()
    assert shown["recent"]["failing"] == {"404 renamed": 2}
    assert record["first_token"][3] == 3 and record["ready"] and not record["read_only"]
    assert len(json.dumps(record)) < 1024


def test_the_history_is_the_operators(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slora_api.operations.routes.time.time", lambda: NOW + 1.0)
    file = HistoryFile(platform.services.foundation.data.history)
    for record in make_records(180, ready=False):
        file.write(record)
    with httpx.Client(base_url=platform.url, verify=False) as client:
        key = platform.key("curious")
        assert client.get("/admin/history", headers=bearer(key)).status_code == 403
        hour = client.get("/admin/history", headers=bearer(ADMIN_KEY)).json()
        day = client.get("/admin/history?hours=24", headers=bearer(ADMIN_KEY)).json()
    assert hour["step"] == 60 and len(hour["points"]) == 60 and hour["points"][-1]["at"] == NOW - MINUTE_S
    assert day["step"] == 720 and len(day["points"]) in (15, 16)
    assert sum(point["tokens"] for point in day["points"]) == 180 * 100
    assert [one["name"] for one in hour["conditions"] if one["holds"]] == ["SloraNotReady"]
    assert hour["recent"] == day["recent"] and day["recent"]["minutes"] == 5, "the range does not matter"


def test_a_sleep_that_ends_early_does_not_record_a_minute_twice() -> None:
    """Born from a fault: the second record of a minute was empty, and replaced the first."""
    assert seconds_to_end(NOW + 0.25) == 59.75
    assert seconds_to_end(NOW + 59.999) == pytest.approx(60.001)
