from hypothesis import given
from hypothesis import strategies as st

from slora_api.server.allowance import Allowance


def test_a_peer_that_stops_is_given_up_after_the_grace() -> None:
    allowance = Allowance(grace_s=20, bytes_per_s=100)
    allowance.spend(19.9, 0)
    assert allowance.left_s > 0
    allowance.spend(0.2, 0)
    assert allowance.left_s < 0


def test_a_burst_buys_no_more_than_the_grace() -> None:
    allowance = Allowance(grace_s=20, bytes_per_s=100)
    allowance.spend(1, 10**9)
    assert allowance.left_s == 20


def test_time_in_which_the_peer_is_not_awaited_is_given_back() -> None:
    allowance = Allowance(grace_s=20, bytes_per_s=100)
    allowance.spend(15, 0)
    allowance.rest(5)
    assert allowance.left_s == 10
    allowance.rest(100)
    assert allowance.left_s == 20


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10_000)), max_size=50))
def test_a_whole_transfer_takes_no_longer_than_grace_and_rate_allow(steps: list[tuple[float, int]]) -> None:
    allowance, waited_s, num_bytes = Allowance(20, 100), 0.0, 0
    for seconds, moved in steps:
        allowance.spend(seconds, moved)
        waited_s, num_bytes = waited_s + seconds, num_bytes + moved
        if allowance.left_s <= 0:
            break
        assert waited_s <= 20 + num_bytes / 100 + 1e-6
