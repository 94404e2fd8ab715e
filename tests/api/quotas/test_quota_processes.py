"""Quotas hold for processes that use them together, and a killed process leaves nothing reserved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.quotas.quota_hammer import QUOTA
from tests.redis_server import RedisServer
from tests.support.forked_program import ForkedProgram

_PROGRAM = Path(__file__).with_name("quota_hammer.py")


def run(*arguments: object) -> Any:
    status, output = ForkedProgram(_PROGRAM.read_text(encoding="utf-8"), *arguments, stderr=2).finish()
    assert status == 0
    return json.loads(output)


def most_within(moments: list[tuple[int, int, int]], width_ms: int) -> int:
    """The largest sum of amounts within any `width_ms`. moments: earliest and latest time, and amount. An amount
    counts only where it lies within for certain."""
    most = 0
    by_start = sorted(moments)
    for first, (start, _, _) in enumerate(by_start):
        within = (amount for _, end, amount in by_start[first:] if end < start + width_ms)
        most = max(most, sum(within))
    return most


@pytest.mark.parametrize("kind", ["host", "redis"])
def test_sixteen_processes_never_get_one_token_request_or_answer_more_than_the_quota(
    kind: str, tmp_path: Path, shared_redis: RedisServer, soak: bool, report: Callable[[str], None]
) -> None:
    url = ""
    if kind == "redis":
        url = shared_redis.url
        shared_redis.client().flushall()
    # With the shorter hold, the processes use all cores all the time.
    found = run("hammer", tmp_path, url, 16, *((60, 0.004) if soak else (1.5, 0.02)))
    grants = found["grants"]
    assert not found["failed"]
    requests = most_within([(before, after, 1) for before, after, _, _ in grants], 60_000)
    tokens = most_within([(before, after, used) for before, after, used, _ in grants], 60_000)
    # Answers are in progress for certain between the reservation and the settlement.
    events = sorted(event for _, after, _, end in grants for event in ((after, 1), (end, -1)))
    answers = peak = 0
    for _, change in events:
        answers += change
        peak = max(peak, answers)
    report(
        f"quota of {kind}: {len(grants)} reservations by 16 processes, {found['refused']} refused; in any 60 s at most "
        f"{requests} of "
        f"{QUOTA.requests_per_minute} requests and {tokens} of {QUOTA.tokens_per_minute} tokens, {peak} of "
        f"{QUOTA.concurrent_answers} answers at once"
    )
    assert requests <= QUOTA.requests_per_minute and tokens <= QUOTA.tokens_per_minute
    assert peak <= QUOTA.concurrent_answers
    assert found["refused"] and grants, "the limit was reached"


def test_killed_processes_leave_nothing_reserved(tmp_path: Path, soak: bool) -> None:
    for account in run("kill", tmp_path, 8, 1000 if soak else 20):
        assert (account["answers"], account["reserved"]) == (0, 0)
        assert account["requests"] >= 0 and account["tokens"] >= 0


def test_a_process_killed_after_any_write_of_a_change_leaves_it_done_or_undone(tmp_path: Path) -> None:
    results = run("crash", tmp_path)
    assert len(results) > 10
    for tenant, key in results:
        assert tenant == key, "both accounts change together"
        assert (tenant["answers"], tenant["reserved"]) == (0, 0)
        assert (tenant["requests"], tenant["tokens"]) in ((0, 0), (1, 0), (1, 40))
    assert results[-1][0] == {"answers": 0, "reserved": 0, "requests": 1, "tokens": 40}
