from hypothesis import given
from hypothesis import strategies as st

from slora_api.http.http_protocol import MinRateTimeout


def test_a_burst_buys_no_more_than_the_grace() -> None:
    timeout = MinRateTimeout(grace_s=20, bytes_per_s=100)
    timeout.charge(1, 10**9)
    assert timeout.left_s == 20


def test_time_spent_not_waiting_for_the_peer_is_credited() -> None:
    timeout = MinRateTimeout(grace_s=20, bytes_per_s=100)
    timeout.charge(15, 0)
    timeout.credit(5)
    assert timeout.left_s == 10
    timeout.credit(100)
    assert timeout.left_s == 20


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10_000)), max_size=50))
def test_a_whole_transfer_takes_no_longer_than_grace_and_rate_allow(steps: list[tuple[float, int]]) -> None:
    timeout, waited_s, num_bytes = MinRateTimeout(20, 100), 0.0, 0
    for seconds, moved in steps:
        timeout.charge(seconds, moved)
        waited_s, num_bytes = waited_s + seconds, num_bytes + moved
        if timeout.left_s <= 0:
            break
        assert waited_s <= 20 + num_bytes / 100 + 1e-6
