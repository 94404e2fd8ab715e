"""Usage over HTTP and on the command line: pages, groups, CSV, and who may read what."""

import csv
import io
import itertools
import json
from functools import partial
from typing import Any

import httpx
import pytest

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_adapters.database.database import Database
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.usage import usage_report
from slora_api.usage.usage_ledger import UsageLedger
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform

# 2026-11-01T00:00:00Z, and the day as a query.
DAY = 1_793_491_200
RANGE = {"start_time": DAY, "end_time": DAY + 86_400}
VOICE, GONE, TONE = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture(scope="module")
def key(platform: Platform) -> str:
    """The key of `acme`. The ledger has a request every ten minutes of one day, of two keys and three models, and a
    few requests of another tenant."""
    key, _ = platform.key("acme"), platform.key("beta")
    acme, beta = platform.tenant_id("acme"), platform.tenant_id("beta")
    database = Database(platform.directory / "slora.db")
    models = itertools.cycle([None, VOICE, GONE])
    records = [
        UsageRecord(
            f"{number:04x}", acme, f"key{number % 2}", next(models), DAY + 600 * number,
            RequestUsage(10, 4, number, 100, 0.5),
        )
        for number in range(144)
    ]  # fmt: skip
    records += [
        UsageRecord(f"beta{number}", beta, "keyb", VOICE, DAY + number, RequestUsage(1, 0, 1)) for number in range(3)
    ]  # fmt: skip
    UsageLedger(database).add(records)
    registry = Registry(database)
    registry.put("voice", AdapterVersion(acme, VOICE), AdapterDetails(8, ("q_proj",), 4096))
    database.close()
    return key


@pytest.fixture
def client(platform: Platform, key: str) -> httpx.Client:
    return platform.api(key)


@pytest.fixture
def admin(platform: Platform, key: str) -> httpx.Client:
    return platform.api(ADMIN_KEY)


def read(client: httpx.Client, path: str = "/v1/usage", **params: Any) -> list[dict[str, Any]]:
    """The results of all pages. Pages of one query join to buckets without gaps."""
    results, end = [], None
    while True:
        page = client.get(path, params={**RANGE, **params}).raise_for_status().json()
        for bucket in page["data"]:
            assert end is None or bucket["start_time"] in (
                end,
                end - (bucket["end_time"] - bucket["start_time"]),
            )
            end = bucket["end_time"]
            results += [{"start": bucket["start_time"], **one} for one in bucket["results"]]
        if not page["has_more"]:
            assert page["next_page"] is None and end == RANGE["end_time"]
            return results
        params["page"] = page["next_page"]


def test_a_tenant_reads_the_sums_of_its_own_requests_only(client: httpx.Client) -> None:
    page = client.get("/v1/usage", params=RANGE).raise_for_status().json()
    result = {
        "object": "usage.result", "tenant": None, "tenant_id": None, "api_key_id": None, "model": None,
        "adapter_digest": None,
        "num_model_requests": 144, "input_tokens": 1440, "input_cached_tokens": 576,
        "output_tokens": 143 * 72, "adapter_bytes": 14400, "page_seconds": 72.0, "num_batch_requests": 0,
        "batch_input_tokens": 0, "batch_output_tokens": 0, "billed_input_tokens": 1440.0,
        "billed_output_tokens": 143.0 * 72,
    }  # fmt: skip
    bucket = {"object": "bucket", "start_time": DAY, "end_time": DAY + 86_400, "results": [result]}
    assert page == {"object": "page", "data": [bucket], "has_more": False, "next_page": None}
    assert client.get("/admin/usage", params=RANGE).status_code == 403


@pytest.mark.parametrize(("width", "count"), [("1m", 144), ("1h", 24), ("1d", 1)])
def test_the_sums_of_minutes_hours_and_days_agree(client: httpx.Client, width: str, count: int) -> None:
    results = read(client, bucket_width=width)
    assert len(results) == count
    assert sum(one["num_model_requests"] for one in results) == 144
    assert sum(one["output_tokens"] for one in results) == 143 * 72


def test_sums_are_kept_apart_by_key_and_model(client: httpx.Client) -> None:
    results = read(client, group_by="api_key_id,model")
    found = {(one["api_key_id"], one["model"], one["adapter_digest"]) for one in results}
    models = [("base", None), ("voice@1", VOICE), (None, GONE)]
    assert found == {(key, *model) for key in ("key0", "key1") for model in models}
    assert sum(one["num_model_requests"] for one in results) == 144
    assert read(client, **{"group_by": ["api_key_id", "model"]}) == results


def test_requests_that_add_up_adapters_are_a_group_of_their_own(
    platform: Platform, client: httpx.Client
) -> None:
    database, later = Database(platform.directory / "slora.db"), DAY + 10 * 86_400
    acme = platform.tenant_id("acme")
    adapters = [VOICE, f"{VOICE}+{TONE}", f"{VOICE}+{TONE}", f"{VOICE}+{GONE}"]
    records = [
        UsageRecord(f"sum{number}", acme, "key0", digests, later, RequestUsage(1, 0, 1))
        for number, digests in enumerate(adapters)
    ]
    UsageLedger(database).add(records)
    registry = Registry(database)
    registry.put("tone", AdapterVersion(acme, TONE), AdapterDetails(8, ("q_proj",), 4096))
    database.close()
    params = {"start_time": later, "end_time": later + 86_400, "group_by": "model"}
    (bucket,) = client.get("/v1/usage", params=params).raise_for_status().json()["data"]
    found = {(one["model"], one["adapter_digest"]): one["num_model_requests"] for one in bucket["results"]}
    assert found == {
        ("voice@1", VOICE): 1,
        ("voice@1+tone@1", f"{VOICE}+{TONE}"): 2,
        (None, f"{VOICE}+{GONE}"): 1,
    }


def test_the_operator_reads_all_tenants_or_one(admin: httpx.Client) -> None:
    assert [one["num_model_requests"] for one in read(admin, "/admin/usage")] == [147]
    grouped = read(admin, "/admin/usage", group_by="model")
    found = {(one["tenant"], one["model"]): one["num_model_requests"] for one in grouped}
    assert found == {
        ("acme", "base"): 48, ("acme", "voice@1"): 48, ("acme", None): 48, ("beta", None): 3,
    }  # fmt: skip
    assert [one["num_model_requests"] for one in read(admin, "/admin/usage", tenant="beta")] == [3]
    assert admin.get("/admin/usage", params={"tenant": "unknown"}).status_code == 404


def test_a_bucket_with_too_many_results_continues_on_the_next_page(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(client, bucket_width="1h", group_by="api_key_id,model")
    monkeypatch.setattr(usage_report, "MAX_RESULTS", 7)
    assert read(client, bucket_width="1h", group_by="api_key_id,model") == whole


def test_pages_have_the_number_of_buckets_that_the_limit_says(client: httpx.Client) -> None:
    page = client.get("/v1/usage", params={**RANGE, "bucket_width": "1h", "limit": 5}).json()
    assert [one["start_time"] for one in page["data"]] == [DAY + 3600 * hour for hour in range(5)]
    assert page["has_more"]
    default = client.get("/v1/usage", params={"bucket_width": "1h"}).json()
    assert len(default["data"]) == 24 and not default["has_more"]


def test_times_may_be_unix_seconds_or_iso_8601(client: httpx.Client) -> None:
    for start in (DAY, f"{DAY}.5", "2026-11-01", "2026-11-01T00:59:59Z", "2026-11-01T02:00:00+02:00"):
        params = {"start_time": start, "end_time": "2026-11-01T00:30:00", "bucket_width": "1h"}
        (bucket,) = client.get("/v1/usage", params=params).raise_for_status().json()["data"]
        assert (bucket["start_time"], bucket["end_time"]) == (DAY, DAY + 3600)


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"bucket_width": "1w"}, "bucket_width", "1m"),
        ({"start_time": "yesterday"}, "start_time", "ISO 8601"),
        ({"start_time": "nan"}, "start_time", "from 0 to"),
        ({"end_time": "-1"}, "end_time", "from 0 to"),
        ({"start_time": DAY, "end_time": DAY}, "start_time", "not before the end"),
        ({"limit": 0}, "limit", "from 1 to 31"),
        ({"limit": 169, "bucket_width": "1h"}, "limit", "from 1 to 168"),
        ({"group_by": "tenant"}, "group_by", "it accepts api_key_id and model"),
        ({"format": "xml"}, "format", "csv"),
        ({"page": "!"}, "page", "next_page"),
        ({"page": "WzFd"}, "page", "next_page"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    client: httpx.Client, params: dict[str, Any], param: str, message: str
) -> None:
    answer = client.get("/v1/usage", params=params)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"], error


def test_csv_has_the_rows_of_all_pages(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_report, "MAX_RESULTS", 7)
    asked = {**RANGE, "bucket_width": "1h", "group_by": "model", "limit": 2}
    answer = client.get("/v1/usage", params={**asked, "format": "csv"}).raise_for_status()
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    results = read(client, **asked)
    assert len(rows) == len(results) == 72
    assert rows[0]["start_time"] == "2026-11-01T00:00:00Z" and rows[-1]["end_time"] == "2026-11-02T00:00:00Z"
    for row, result in zip(rows, results, strict=True):
        assert "tenant" not in row and "api_key_id" not in row
        for name, text in list(row.items())[2:]:
            assert text == ("" if result[name] is None else str(result[name]))


def test_the_command_line_shows_the_usage(platform: Platform, key: str) -> None:
    run = partial(run_slora, platform.url, "usage", SLORA_ADMIN_KEY=ADMIN_KEY)
    times = ["--since", "2026-11-01", "--until", "2026-11-02"]
    assert json.loads(run(*times, "--json"))[0]["num_model_requests"] == 147
    lines = run(*times, "--by", "hour", "--group-by", "tenant", "--tenant", "beta").splitlines()
    assert [line.split()[2:5] for line in lines[1:]] == [["beta", "3", "3"]] and "TENANT" in lines[0]
    run = partial(run, SLORA_API_KEY=key)
    assert (
        run(*times, "--csv").splitlines()[1].startswith("2026-11-01T00:00:00Z,2026-11-02T00:00:00Z,144,1440")
    )
    lines = run(*times, "--group-by", "tenant").splitlines()
    assert sorted(line.split()[2] for line in lines[1:]) == ["acme", "beta"]
    assert len(run("--since", "30d").splitlines()) >= 1
    assert "7x" in run("--since", "7x", code=1)
