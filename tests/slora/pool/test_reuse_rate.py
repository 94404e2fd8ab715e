import pytest

from slora.errors import ConfigError
from slora.pool.reuse_rate import ReuseRate
from slora_adapters.loader.fetch_pace import FetchPace


def test_a_reuse_rate_starts_at_one_half_and_follows_the_counts() -> None:
    share = ReuseRate()
    assert share.value == 0.5
    for _ in range(8):
        share.record(was_used=False)
    assert share.value == pytest.approx(0.25, abs=0.01)
    for _ in range(5000):
        share.record(was_used=True)
    assert 0.98 < share.value < 1


def test_recent_outcomes_count_most() -> None:
    share = ReuseRate()
    for was_used in [True] * 10_000 + [False] * 2_000:
        share.record(was_used=was_used)
    assert share.value < 0.2


def test_an_initial_rate_without_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the weight of the initial rate is 0; it must be above 0"):
        ReuseRate(0)


def test_the_expected_fetch_time_per_byte_follows_recent_fetches() -> None:
    pace = FetchPace()
    assert pace.fetch_s(100) == 0
    pace.count(100_000_000, 0.5)
    assert pace.fetch_s(20_000_000) == pytest.approx(0.1)
    pace.count(100_000_000, 0.0)
    assert pace.fetch_s(20_000_000) == pytest.approx(0.0487, abs=1e-4)
