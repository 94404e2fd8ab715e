"""Ten minutes of every attack at random beside honest tenants, see `bench.attacks.mixed`."""

from collections.abc import Callable

import pytest

from bench.attacks.mixed import run_mixed

MINUTES, MINUTES_WITH_WORKERS = 10.0, 3.0
MAX_GROWTH_BYTES = 64 << 20


@pytest.mark.soak
def test_attackers_with_valid_keys_hardly_slow_honest_tenants_down(report: Callable[[str], None]) -> None:
    outcome = run_mixed(MINUTES)
    report(
        f"mixed attacks: goodput {outcome.goodput_ratio:.3f} of that without them, {outcome.server_errors} lost, "
        f"{sum(outcome.sent.values())} attacks"
    )
    assert outcome.goodput_ratio >= 0.9
    assert outcome.server_errors == 0
    before, _, after = outcome.rss_bytes
    assert after - before <= MAX_GROWTH_BYTES


@pytest.mark.soak
def test_attackers_gain_nothing_from_a_second_api_worker(report: Callable[[str], None]) -> None:
    outcome = run_mixed(MINUTES_WITH_WORKERS, api_workers=2)
    report(f"mixed attacks on two API workers: goodput {outcome.goodput_ratio:.3f} of that without them")
    assert outcome.goodput_ratio >= 0.9
    assert outcome.server_errors == 0
