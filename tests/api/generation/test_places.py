"""Places: how many are reserved for tenants that hold none, and the retry time that a refused request gets."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_api.generation.places import Places


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_places(num_places: int, max_per_tenant: int, clock: Clock | None = None) -> Places:
    return Places(num_places, max_per_tenant, "things", "max_things", clock or Clock())


def pass_time(places: Places, clock: Clock, seconds: float, count: int = 1) -> None:
    with places.hold("t", count):
        clock.now_s += seconds


def test_a_tenant_with_places_leaves_a_quarter_to_tenants_without() -> None:
    places = make_places(8, 8)
    with places.hold("one", 1):
        assert (places.num_reserved, places.open_to("one"), places.open_to("two")) == (2, 5, 5)
        with places.hold("one", 5):
            assert (places.open_to("one"), places.open_to("two")) == (0, 1)
            with places.hold("two", 1):
                assert (places.open_to("two"), places.open_to("three")) == (0, 1)
                with places.hold("three", 1):
                    assert places.open_to("four") == 0


@given(st.integers(3, 600), st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300)), max_size=60))
def test_two_tenants_never_hold_all_places(num_places: int, wishes: list[tuple[int, int]]) -> None:
    places = make_places(num_places, num_places)
    with ExitStack() as stack:
        for tenant, count in wishes:
            if count <= places.open_to(str(tenant)):
                stack.enter_context(places.hold(str(tenant), count))
        for tenant in ("0", "1"):
            stack.enter_context(places.hold(tenant, places.open_to(tenant)))
        assert places.num_free >= 1 and places.open_to("another") >= 1
    assert places.num_taken == 0


def test_the_wait_is_the_average_time_shared_by_all_places_that_are_taken() -> None:
    clock = Clock()
    places = make_places(100, 100, clock)
    assert places.wait_s(1, 5) == 2, "nothing is known yet"
    pass_time(places, clock, 20)
    assert (places.wait_s(1, 4), places.wait_s(4, 4), places.wait_s(1, 0)) == (5, 20, 2)


def test_the_average_follows_what_places_take_lately() -> None:
    clock = Clock()
    places = make_places(200, 200, clock)
    pass_time(places, clock, 1000)
    for _ in range(200):
        pass_time(places, clock, 1)
    assert places.wait_s(100, 100) == 2
    pass_time(places, clock, 10, count=100)
    assert places.wait_s(100, 100) == 10


@pytest.mark.parametrize(("seconds", "told"), [(0, 1), (0.001, 1), (1e6, 120)])
def test_a_wait_is_at_least_a_second_and_at_most_what_clients_obey(seconds: float, told: int) -> None:
    clock = Clock()
    places = make_places(4, 4, clock)
    pass_time(places, clock, seconds)
    assert places.wait_s(1, 1) == told


def test_places_are_given_back_when_the_work_fails() -> None:
    places = make_places(8, 8)
    with pytest.raises(ZeroDivisionError), places.hold("t", 3):
        raise ZeroDivisionError
    assert (places.num_taken, places.held_by("t")) == (0, 0)
