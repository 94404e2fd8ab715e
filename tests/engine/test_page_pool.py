from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.page_pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of legal moves, beside a model that knows of every page how many references it has."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: Counter[int] = Counter()
        self.cached: set[int] = set()

    def _some(self, data: st.DataObject, pages: set[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(pages)), unique=True))

    def _single(self) -> set[int]:
        return {page for page, count in self.held.items() if count == 1}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & (set(self.held) | self.cached), "a page in use was given away"
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = self._some(data, set(self.held))
        self.pool.retain(pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self._some(data, set(self.held))
        self.pool.release(pages)
        self.held -= Counter(pages)

    @precondition(lambda self: self._single())
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        pages = self._some(data, self._single())
        self.pool.park(pages)
        self.held -= Counter(pages)
        self.cached.update(pages)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        pages = self._some(data, self.cached)
        self.pool.unpark(pages)
        self.held.update(pages)
        self.cached -= set(pages)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        pages = self._some(data, self.cached)
        self.pool.evict(pages)
        self.cached -= set(pages)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        self.pool.check(self.held.elements(), self.cached)
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == self.pool.num_pages - len(self.held) - len(self.cached)


TestPagePool = PoolMachine.TestCase


@pytest.fixture
def pool() -> PagePool:
    """Pages 0 and 1 held, 2 cached, 3 and 4 free."""
    pool = PagePool(5)
    assert pool.allocate(3) == [2, 1, 0]
    pool.park([2])
    return pool


def test_check_finds_a_page_that_its_owner_lost(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match=r"pages \[1\]: counted references differ"):
        pool.check(held=[0], cached=[2])


def test_check_finds_a_page_with_one_owner_too_many(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match=r"pages \[0\]: counted references differ"):
        pool.check(held=[0, 0, 1], cached=[2])


def test_check_finds_a_cached_page_that_nobody_keeps(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="1 pages cached, owners know 0"):
        pool.check(held=[0, 1], cached=[])


def test_check_finds_a_cached_page_with_two_owners(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="two owners"):
        pool.check(held=[0, 1], cached=[2, 2])


def test_check_finds_an_owner_who_keeps_a_free_page(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="not cached"):
        pool.check(held=[0, 1], cached=[2, 4])


@pytest.mark.parametrize("move", ["retain", "release", "unpark", "evict", "park"])
def test_a_move_of_a_page_in_the_wrong_state_fails_at_once(pool: PagePool, move: str) -> None:
    with pytest.raises(AssertionError, match="page 4"):
        getattr(pool, move)([4])


def test_a_page_with_two_references_cannot_be_parked(pool: PagePool) -> None:
    pool.retain([0])
    with pytest.raises(AssertionError, match="2 references"):
        pool.park([0])


def test_taking_more_than_is_free_fails(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
