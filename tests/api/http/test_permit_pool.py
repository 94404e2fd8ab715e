"""PermitPool: how many are reserved for tenants that hold none, and the retry time that a refused request gets."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_api.http.permit_pool import PermitPool
from tests.support.clock import Clock


def make_pool(num_permits: int, max_per_tenant: int, clock: Clock | None = None) -> PermitPool:
    return PermitPool(num_permits, max_per_tenant, "things", "max_things", clock or Clock(100.0))


def pass_time(pool: PermitPool, clock: Clock, seconds: float, count: int = 1) -> None:
    with pool.hold("t", count):
        clock.now += seconds


def test_a_tenant_with_permits_leaves_a_quarter_to_tenants_without() -> None:
    pool = make_pool(8, 8)
    with pool.hold("one", 1):
        assert (pool.num_reserved, pool.num_available_to("one"), pool.num_available_to("two")) == (2, 5, 5)
        with pool.hold("one", 5):
            assert (pool.num_available_to("one"), pool.num_available_to("two")) == (0, 1)
            with pool.hold("two", 1):
                assert (pool.num_available_to("two"), pool.num_available_to("three")) == (0, 1)
                with pool.hold("three", 1):
                    assert pool.num_available_to("four") == 0


@given(st.integers(3, 600), st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300)), max_size=60))
def test_two_tenants_never_hold_all_permits(num_permits: int, wishes: list[tuple[int, int]]) -> None:
    pool = make_pool(num_permits, num_permits)
    with ExitStack() as stack:
        for tenant, count in wishes:
            if count <= pool.num_available_to(str(tenant)):
                stack.enter_context(pool.hold(str(tenant), count))
        for tenant in ("0", "1"):
            stack.enter_context(pool.hold(tenant, pool.num_available_to(tenant)))
        assert pool.num_free >= 1 and pool.num_available_to("another") >= 1
    assert pool.num_taken == 0


def test_the_wait_is_the_average_hold_time_divided_by_the_held_permits() -> None:
    clock = Clock(100.0)
    pool = make_pool(100, 100, clock)
    assert pool.wait_s(1, 5) == 2, "nothing is known yet"
    pass_time(pool, clock, 20)
    assert (pool.wait_s(1, 4), pool.wait_s(4, 4), pool.wait_s(1, 0)) == (5, 20, 2)


def test_the_average_follows_how_long_permits_are_held() -> None:
    clock = Clock(100.0)
    pool = make_pool(200, 200, clock)
    pass_time(pool, clock, 1000)
    for _ in range(200):
        pass_time(pool, clock, 1)
    assert pool.wait_s(100, 100) == 2
    pass_time(pool, clock, 10, count=100)
    assert pool.wait_s(100, 100) == 10


@pytest.mark.parametrize(("seconds", "told"), [(0, 1), (0.001, 1), (1e6, 120)])
def test_a_wait_is_at_least_a_second_and_at_most_what_clients_honour(seconds: float, told: int) -> None:
    clock = Clock(100.0)
    pool = make_pool(4, 4, clock)
    pass_time(pool, clock, seconds)
    assert pool.wait_s(1, 1) == told
