"""Quotas of tenants and keys, over HTTP."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from slora.core.errors import EngineUnavailable
from slora.core.request import FinishReason, RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_api.quotas.quota_meter import format_duration
from slora_api.usage.usage_ledger import UsageLedger
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

# Five tokens of prompt and at most five of answer. The engine answers with two tokens.
PROMPT = {"model": "base", "prompt": "hello", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
NONE = dict.fromkeys(
    [
        "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month", "concurrent_answers",
        "composed_adapters",
    ]
)  # fmt: skip


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([deltas_of(b"ok")])


@pytest.fixture
def platform(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Platform]:
    with running_platform(tmp_path, engine, max_concurrent_per_tenant=6) as running:
        yield running


def set_quota(platform: Platform, path: str, **changes: int | None) -> httpx.Response:
    return platform.api(ADMIN_KEY).patch(f"/admin/{path}/quota", json=changes)


def key_id(key: str) -> str:
    return key.split("_")[1]


def used(platform: Platform, path: str) -> dict[str, int]:
    found: dict[str, int] = (
        platform.api(ADMIN_KEY).get(f"/admin/{path}/quota").raise_for_status().json()["used"]
    )
    return found


def complete(platform: Platform, key: str, **fields: Any) -> httpx.Response:
    return post(platform, key, "/v1/completions", PROMPT | fields)


def test_a_request_is_charged_for_its_prompt_and_for_what_was_generated(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=100, requests_per_minute=10)
    for number in (1, 2):
        assert complete(platform, key).status_code == 200
        found = used(platform, "tenants/acme")
        assert (found["requests_per_minute"], found["tokens_per_minute"]) == (number, number * 7)
        assert (found["tokens_per_day"], found["concurrent_answers"]) == (number * 7, 0)


def test_answers_carry_the_limit_with_less_left(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=100, requests_per_minute=3)
    set_quota(platform, f"keys/{key_id(key)}", tokens_per_minute=60)
    client = platform.api(key)
    whole = client.post("/v1/completions", json=PROMPT)
    stream = client.post("/v1/completions", json=PROMPT | {"stream": True})
    unread = client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    chat = client.post("/v1/chat/completions", json={"model": "base", "messages": [], "stream": True})
    assert [one.status_code for one in (whole, stream, unread, chat)] == [200, 200, 400, 400]
    shown = [
        [one.headers[f"x-ratelimit-{name}"] for name in ("limit-requests", "limit-tokens")]
        for one in (whole, stream, unread, chat)
    ]
    assert shown == [["3", "60"]] * 4
    left = [one.headers["x-ratelimit-remaining-requests"] for one in (whole, stream, unread, chat)]
    assert left == ["2", "1", "1", "1"]
    # A stream has its headers before its tokens are known, so they show the whole reservation.
    assert [one.headers["x-ratelimit-remaining-tokens"] for one in (whole, stream, unread)] == [
        "50",
        "43",
        "46",
    ]
    assert whole.headers["x-ratelimit-reset-tokens"].startswith(("1m", "60.", "59."))


def test_without_a_limit_there_are_no_headers(platform: Platform) -> None:
    assert not [name for name in complete(platform, platform.key("free")).headers if "ratelimit" in name]


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (12, "12ms"), (1000, "1s"), (59_874, "59.874s"), (360_000, "6m0s")]
)
def test_durations_are_written_as_by_openai(ms: int, text: str) -> None:
    assert format_duration(ms) == text


def test_a_refusal_names_the_limit_and_the_exact_wait(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", requests_per_minute=1)
    assert complete(platform, key).status_code == 200
    refused = complete(platform, key)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert "has used 1 requests in the last minute; the limit is 1 (requests_per_minute)" in error["message"]
    wait_ms = int(refused.headers["retry-after-ms"])
    assert 0 < wait_ms <= 61_000 and int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
    assert (
        "x-should-retry" not in refused.headers and refused.headers["x-ratelimit-remaining-requests"] == "0"
    )
    assert (
        'slora_quota_refusals_total{quota="requests_per_minute"} 1.0'
        in platform.api(ADMIN_KEY).get("/metrics").text
    )


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"tokens_per_minute": 9}, {}),
        ({"tokens_per_day": 9}, {}),
        ({"concurrent_answers": 1}, {"n": 2}),
    ],
)
def test_a_request_that_can_never_fit_is_counted_once_as_refused(
    platform: Platform, limits: dict[str, int], fields: dict[str, Any]
) -> None:
    key, (field, _) = platform.key("acme"), *limits.items()
    set_quota(platform, "tenants/acme", **limits)
    assert complete(platform, key, **fields).status_code in (400, 429)
    metrics = platform.api(ADMIN_KEY).get("/metrics").text
    assert f'slora_quota_refusals_total{{quota="{field}"}} 1.0' in metrics


def test_a_request_that_can_never_fit_is_not_retried(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=9)
    refused = complete(platform, key)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in refused.headers
    message = refused.json()["error"]["message"]
    assert "needs up to 10 tokens" in message and "limit of your tenant is 9 (tokens_per_minute)" in message
    retrying = platform.sdk(key).with_options(max_retries=2)
    with pytest.raises(openai.RateLimitError):
        retrying.completions.create(model="base", prompt="hello", max_tokens=5)
    assert platform.engine.requests == []


def test_every_choice_and_every_prompt_is_reserved(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=100)
    for fields, tokens in (
        ({"n": 3, "max_tokens": 40}, 5 + 3 * 40),
        ({"prompt": ["hello", "hell"], "max_tokens": 50}, 9 + 2 * 50),
        ({"best_of": 4, "max_tokens": 30}, 5 + 4 * 30),
    ):
        refused = complete(platform, key, **fields)
        assert refused.status_code == 429 and f"up to {tokens} tokens" in refused.json()["error"]["message"]


def test_an_exhausted_budget_is_not_retried_and_says_when_the_next_one_begins(platform: Platform) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_day=12, tokens_per_month=1000)
    assert complete(platform, key).status_code == 200
    refused = complete(platform, key)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert refused.headers["x-should-retry"] == "false" and int(refused.headers["retry-after"]) <= 86_400
    assert "has used 7 tokens today; the budget is 12 (tokens_per_day)" in error["message"]
    assert "T00:00:00Z" in error["message"]


def test_a_budget_includes_what_the_ledger_knows(platform: Platform) -> None:
    key = platform.key("acme")
    record = UsageRecord(
        "r", platform.tenant_id("acme"), key_id(key), None, time.time(), RequestUsage(60, 0, 35)
    )
    UsageLedger(platform.services.foundation.database).add([record])
    set_quota(platform, "tenants/acme", tokens_per_month=100)
    refused = complete(platform, key)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert "has used 95 tokens this month" in refused.json()["error"]["message"]


def test_tokens_that_running_requests_reserve_of_a_budget_are_worth_a_retry(
    platform: Platform, engine: ScriptedEngine
) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_day=15)
    engine.answers, engine.hang = [deltas_of(b"abc")[:2]], True
    with platform.client(key) as client, client.stream("POST", "/v1/completions", json=STREAM) as stream:
        assert stream.status_code == 200
        refused = complete(platform, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "reserve 10 of them" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 120


def test_without_max_tokens_an_answer_fits_into_the_quota(platform: Platform, engine: ScriptedEngine) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    # The rendered chat has 8 tokens, and the context 64.
    for limit, expected in ((None, 56), (80, 20), (36, 9), (9, 1)):
        key = platform.key(f"acme{limit or 0}")
        set_quota(platform, f"tenants/acme{limit or 0}", tokens_per_minute=limit)
        assert post(platform, key, "/v1/chat/completions", chat).status_code == 200
        assert engine.requests[-1].sampling.max_tokens == expected


def test_a_failed_request_is_charged_for_what_was_computed(
    platform: Platform, engine: ScriptedEngine
) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=100, requests_per_minute=10)
    engine.answers = [[EngineUnavailable("it died")]]
    assert complete(platform, key).status_code == 503
    assert complete(platform, key, temperature=-1).status_code == 400
    found = used(platform, "tenants/acme")
    assert found == dict.fromkeys(found, 0)
    engine.answers = [[*deltas_of(b"okay")[:2], EngineUnavailable("it died")]]
    assert complete(platform, key).status_code == 503
    found = used(platform, "tenants/acme")
    assert (found["requests_per_minute"], found["tokens_per_minute"]) == (1, 7)


def test_a_client_that_hangs_up_is_charged_for_what_was_generated(
    platform: Platform, engine: ScriptedEngine
) -> None:
    key = platform.key("acme")
    set_quota(platform, "tenants/acme", tokens_per_minute=100)
    engine.answers, engine.hang = [deltas_of(b"abc", FinishReason.LENGTH)[:2]], True
    with platform.api(key).stream("POST", "/v1/completions", json=STREAM) as stream:
        lines = stream.iter_lines()
        while '"b"' not in next(lines):
            pass
    while used(platform, "tenants/acme")["concurrent_answers"]:
        pass
    assert used(platform, "tenants/acme")["tokens_per_minute"] == 7


def test_answers_in_progress_are_limited_for_the_tenant_and_for_the_key(
    platform: Platform, engine: ScriptedEngine
) -> None:
    key, other = platform.key("acme"), platform.key("acme")
    set_quota(platform, f"keys/{key_id(key)}", concurrent_answers=2)
    engine.hang = True
    client = platform.api(key)
    others = platform.api(other)
    with client.stream("POST", "/v1/completions", json=STREAM | {"n": 2}):
        refused = client.post("/v1/completions", json=PROMPT)
        assert refused.status_code == 429
        assert "This API key has 2 answers in progress, and the limit is 2" in refused.text
        with others.stream("POST", "/v1/completions", json=STREAM | {"n": 4}):
            # The default of the server is 6 for each tenant.
            refused = others.post("/v1/completions", json=PROMPT)
            assert refused.status_code == 429
            assert "Your tenant has 6 answers in progress, and the limit is 6" in refused.text
            set_quota(platform, "tenants/acme", concurrent_answers=7)
            with others.stream("POST", "/v1/completions", json=STREAM) as seventh:
                assert seventh.status_code == 200
    too_many = client.post("/v1/completions", json=PROMPT | {"n": 3})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


def test_a_long_prompt_counts_as_a_request_before_it_is_tokenized(tmp_path: Path) -> None:
    engine = ScriptedEngine([deltas_of(b"ok")], max_model_len=20_000)
    with running_platform(tmp_path, engine) as platform:
        key = platform.key("acme")
        set_quota(platform, "tenants/acme", tokens_per_minute=10_000, requests_per_minute=2)
        # 10,000 tokens, which do not fit beside the answer. The least that the characters could be is 2,000.
        for _ in range(2):
            refused = complete(platform, key, prompt="x" * 10_000)
            assert "needs up to 10005 tokens" in refused.json()["error"]["message"]
        refused = complete(platform, key, prompt="x" * 10_000)
        assert "(requests_per_minute)" in refused.json()["error"]["message"]
        # 60,000 characters are at least 12,000 tokens, so they are not even tokenized.
        set_quota(platform, "tenants/acme", requests_per_minute=None)
        refused = complete(platform, key, prompt="x" * 60_000)
        assert "needs up to 12000 tokens" in refused.json()["error"]["message"]
        assert used(platform, "tenants/acme")["requests_per_minute"] == 2


def test_an_absurd_limit_is_refused_by_field(platform: Platform) -> None:
    platform.key("acme")
    for field in (*NONE, "adapter_versions", "stored_bytes"):
        for value in (0, -1, 10**16, "5", 1.5, True):
            refused = set_quota(platform, "tenants/acme", **{field: value})  # type: ignore[arg-type]
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_a_quota_is_changed_whole_or_not_at_all(platform: Platform) -> None:
    key = platform.key("acme")
    changed = set_quota(platform, "tenants/acme", tokens_per_day=50, requests_per_minute=5).json()
    assert changed["limits"] == NONE | {
        "tokens_per_day": 50,
        "requests_per_minute": 5,
        "concurrent_answers": 6,
        "adapter_versions": 10_000,
        "stored_bytes": 2**38,
    }
    assert set_quota(platform, "tenants/acme", tokens_per_day=60, requests_per_minute=0).status_code == 400
    kept = set_quota(platform, "tenants/acme", requests_per_minute=None).json()["limits"]
    assert (kept["tokens_per_day"], kept["requests_per_minute"]) == (50, None)
    assert set_quota(platform, "tenants/nobody", tokens_per_day=60).status_code == 404
    assert set_quota(platform, "keys/abcdefgh", tokens_per_day=60).status_code == 404
    refused = set_quota(platform, f"keys/{key_id(key)}", stored_bytes=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stored_bytes")


def test_a_tenant_sees_its_own_quotas(platform: Platform) -> None:
    key, other = platform.key("acme"), platform.key("acme")
    set_quota(platform, f"keys/{key_id(other)}", tokens_per_minute=5)
    set_quota(platform, "tenants/acme", tokens_per_minute=500)
    complete(platform, key)
    of_tenant, of_key = platform.api(key).get("/v1/quotas").json()["data"]
    assert (of_tenant["tenant"], of_tenant["key_id"]) == ("acme", None)
    assert of_tenant["limits"]["tokens_per_minute"] == 500 and of_tenant["used"]["tokens_per_minute"] == 7
    assert of_key["key_id"] == key_id(key) and set(of_key["limits"].values()) == {None}


def test_a_quota_below_what_is_stored_is_refused(platform: Platform) -> None:
    key = platform.key("acme")
    platform.upload(key, "one").raise_for_status()
    stored = used(platform, "tenants/acme")["stored_bytes"]
    platform.upload(key, "two").raise_for_status()
    for field, limit in (("stored_bytes", stored - 1), ("adapter_versions", 1)):
        refused = set_quota(platform, "tenants/acme", **{field: limit})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (409, field)
        assert f"`{field}` would be {limit}, but the tenant `acme` has" in error["message"]
    # Both versions have the same weights, which are stored once.
    assert set_quota(platform, "tenants/acme", adapter_versions=2, stored_bytes=stored).is_success
    full = platform.upload(key, "three")
    assert full.status_code == 409 and "the limit is 2 (adapter_versions)" in full.text


def test_a_change_of_another_process_holds_within_a_second(tmp_path: Path) -> None:
    engines = [ScriptedEngine([deltas_of(b"ok")]) for _ in range(2)]
    with (
        running_platform(tmp_path, engines[0], follows=True) as first,
        running_platform(tmp_path, engines[1], follows=True) as second,
    ):
        key = first.key("acme")
        assert complete(second, key).status_code == 200
        set_quota(first, "tenants/acme", requests_per_minute=1)
        while complete(second, key).status_code == 200:
            pass
        # Both processes count together.
        assert complete(first, key).status_code == 429


def test_the_command_line_sets_and_shows_quotas(platform: Platform) -> None:
    key = platform.key("acme")
    quota = partial(run_slora, platform.url, "quota", SLORA_ADMIN_KEY=ADMIN_KEY)
    quota("set", "acme", "--tokens-per-minute", "70", "--requests-per-minute", "3")
    quota("set", "acme", "--requests-per-minute", "none")
    quota("set", "--key", key_id(key), "--tokens-per-day", "9")
    lines = [line.split() for line in quota("show", "acme").splitlines()]
    assert lines[0] == ["QUOTA", "USED", "LIMIT"]
    assert ["tokens_per_minute", "0", "70"] in lines and ["requests_per_minute", "0", "none"] in lines
    for wrong in (["acme", "--key", "x"], ["acme"]):
        quota("set", *wrong, code=1)
    quota("set", "acme", "--stored-bytes", "1.5GiB")
    assert ["stored_bytes", "0", str(3 * 2**29)] in map(str.split, quota("show", "acme").splitlines())
    assert "such as 512MiB" in quota("set", "acme", "--stored-bytes", "lots", code=1)
    assert "give a whole number, or none" in quota("set", "acme", "--tokens-per-day", "many", code=1)
