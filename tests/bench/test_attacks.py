"""The attacks of the bench, and ten minutes of every attack at random beside honest tenants (`bench.attacks.mixed`)."""

from collections.abc import Callable

import pytest

from bench.attacks.catalogue import ATTACKS
from bench.attacks.honest import Harvest
from bench.attacks.mixed import Outcome, run_mixed

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


def test_each_finding_has_an_attack() -> None:
    assert {attack.number for attack in ATTACKS} == set(range(1, 19))
    assert len({attack.title for attack in ATTACKS}) == len(ATTACKS)


def test_goodput_is_compared_by_share_of_what_was_offered() -> None:
    alone = Harvest(10.0, 100, 90, {}, 1.0, 1.0)
    attacked = Harvest(40.0, 400, 324, {"503": 2, "0": 1, "429": 5}, 1.0, 1.0)
    outcome = Outcome(alone, attacked, (1, 2, 1), {})
    assert outcome.goodput_ratio == pytest.approx(0.9)
    assert outcome.server_errors == 3
