"""Who is admitted, and what those are told who are not."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_api.errors import ServerBusy, TenantBusy, describe_error
from slora_api.generation.admission import Admission
from slora_api.generation.places import Places


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(clock: Clock, requests: int = 4, per_tenant: int = 4, uploads: int = 4) -> Admission:
    return Admission(max_requests=requests, max_per_tenant=per_tenant, max_uploads=uploads, clock=clock)


def serve(admitted: Admission, clock: Clock, tenant: str, seconds: float, num_answers: int = 1) -> None:
    with admitted.generation(tenant, num_answers):
        clock.now_s += seconds


def refusal(admitted: Admission, tenant: str, num_answers: int = 1) -> TenantBusy | ServerBusy:
    with pytest.raises((TenantBusy, ServerBusy)) as caught, admitted.generation(tenant, num_answers):
        pass
    assert isinstance(caught.value, TenantBusy | ServerBusy)
    return caught.value


def test_nothing_is_known_before_a_place_was_given_back() -> None:
    clock = Clock()
    places = Places(clock)
    assert places.wait_s(1) is None
    places.take(1)
    clock.now_s += 5
    assert places.wait_s(1) is None
    places.give_back(1)
    assert places.wait_s(1) is None and places.num_taken == 0


def test_the_wait_is_what_places_took_so_far_shared_by_all_that_are_taken() -> None:
    clock = Clock()
    places = Places(clock)
    places.take(1)
    clock.now_s += 20
    places.give_back(1)
    places.take(40)
    assert places.wait_s(1) == pytest.approx(0.5)
    assert places.wait_s(40) == pytest.approx(20)


def test_idle_time_changes_nothing() -> None:
    clock = Clock()
    places = Places(clock)
    places.take(2)
    clock.now_s += 10
    places.give_back(2)
    clock.now_s += 100_000
    places.take(2)
    assert places.wait_s(1) == pytest.approx(5)


def test_answers_that_take_longer_than_those_before_lengthen_the_wait_while_they_run() -> None:
    clock = Clock()
    places = Places(clock)
    places.take(1)
    clock.now_s += 1
    places.give_back(1)
    places.take(1)
    clock.now_s += 9
    # The one that was given back counts a little less already than the one that runs.
    assert places.wait_s(1) == pytest.approx(10, rel=0.02)


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    places = Places(clock)
    for seconds, count in ((1000, 10), (1, 1000)):
        for _ in range(count):
            places.take(1)
            clock.now_s += seconds
            places.give_back(1)
    places.take(1)
    assert places.wait_s(1) == pytest.approx(1, rel=0.01)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 128), st.booleans()),
        max_size=60,
    )
)
def test_a_wait_is_never_negative_and_counts_never_drift(steps: list[tuple[float, int, bool]]) -> None:
    clock, taken = Clock(), []
    places = Places(clock)
    for seconds, count, gives_back in steps:
        clock.now_s += seconds
        if gives_back and taken:
            places.give_back(taken.pop())
        else:
            places.take(count)
            taken.append(count)
        wait_s = places.wait_s(1)
        assert wait_s is None or wait_s >= 0
    assert places.num_taken == sum(taken)


def test_a_tenant_at_its_limit_is_told_when_its_own_answers_make_room() -> None:
    clock = Clock()
    admitted = admission(clock, requests=100, per_tenant=4)
    serve(admitted, clock, "slow", 40)
    serve(admitted, clock, "quick", 2)
    with admitted.generation("slow", 4), admitted.generation("quick", 4):
        slow, quick = refusal(admitted, "slow"), refusal(admitted, "quick")
        most = refusal(admitted, "slow", 4)
    assert (slow.retry_after_s, quick.retry_after_s, most.retry_after_s) == (10, 1, 40)
    assert isinstance(slow, TenantBusy) and "try again in 10 s" in str(slow)
    answer = describe_error(slow)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "10")


def test_a_full_server_tells_when_anybodys_answers_make_room() -> None:
    clock = Clock()
    admitted = admission(clock, requests=5, per_tenant=4)
    serve(admitted, clock, "one", 30)
    with admitted.generation("one", 1), admitted.generation("two", 4):
        error = refusal(admitted, "three", 2)
    # 30 s for each of 5 places: one comes back every 6 s, and two are wanted.
    assert isinstance(error, ServerBusy) and error.retry_after_s == 12
    answer = describe_error(error)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "12")
    assert "try again in 12 s" in answer.message


def test_without_experience_the_wait_is_the_usual_one_and_never_below_a_second_or_beyond_what_clients_obey() -> (
    None
):
    clock = Clock()
    admitted = admission(clock, per_tenant=1)
    with admitted.generation("t", 1):
        assert refusal(admitted, "t").retry_after_s == 2
    for seconds, told in ((0, 1), (0.001, 1), (1e6, 120)):
        admitted = admission(clock, per_tenant=1)
        serve(admitted, clock, "t", seconds)
        with admitted.generation("t", 1):
            assert refusal(admitted, "t").retry_after_s == told


def test_places_are_given_back_when_a_request_fails() -> None:
    admitted = admission(Clock())
    with pytest.raises(ZeroDivisionError), admitted.generation("t", 2, 2):
        assert admitted.generations == 4
        raise ZeroDivisionError
    assert admitted.generations == 0


def test_uploads_wait_for_uploads_not_for_answers() -> None:
    clock = Clock()
    admitted = admission(clock, uploads=2)
    serve(admitted, clock, "t", 90)
    with admitted.upload("t"):
        clock.now_s += 8
    with ExitStack() as stack:
        stack.enter_context(admitted.upload("t"))
        with pytest.raises(TenantBusy) as own, admitted.upload("t"):
            pass
        stack.enter_context(admitted.upload("u"))
        with pytest.raises(ServerBusy) as everybodys, admitted.upload("v"):
            pass
    assert (own.value.retry_after_s, everybodys.value.retry_after_s) == (8, 4)
