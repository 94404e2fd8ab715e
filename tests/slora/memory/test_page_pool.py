from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of legal operations, beside a model that counts the references of every page."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.tenants = [TenantAccount(name) for name in "abc"]
        self.owners: dict[int, TenantAccount] = {}  # the owner of each page; for a free page, the last owner

    def _some(self, data: st.DataObject, pages: set[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(pages)), unique=True))

    def _single(self) -> set[int]:
        return {page for page, count in self.held.items() if count == 1}

    @rule(data=st.data(), owner=st.integers(0, 2))
    def allocate(self, data: st.DataObject, owner: int) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        pages = self.pool.allocate(count, self.tenants[owner])
        assert len(set(pages)) == count
        assert not set(pages) & (set(self.held) | self.cached), "a page in use was given away"
        self.held.update(pages)
        self.owners.update(dict.fromkeys(pages, self.tenants[owner]))

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
        self.pool.cache(pages)
        self.held -= Counter(pages)
        self.cached.update(pages)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        pages = self._some(data, self.cached)
        self.pool.acquire(pages)
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
        self.pool.check_invariants(self.held.elements(), self.cached, self.tenants)
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == self.pool.num_pages - len(self.held) - len(self.cached)

    @invariant()
    def each_tenant_owns_what_was_allocated_for_it(self) -> None:
        in_use = {*self.held, *self.cached}
        assert all(self.pool.owner(page) is self.owners[page] for page in in_use)
        for tenant in self.tenants:
            assert tenant.num_pages == sum(self.owners[page] is tenant for page in in_use)
            assert tenant.num_cached == sum(self.owners[page] is tenant for page in self.cached)
        assert {page for page in range(self.pool.num_pages) if self.pool.is_cached(page)} == self.cached


TestPagePool = PoolMachine.TestCase


@pytest.fixture
def tenant() -> TenantAccount:
    return TenantAccount("a")


@pytest.fixture
def pool(tenant: TenantAccount) -> PagePool:
    """A pool of 5 pages. The tenant owns pages 0 to 2: pages 0 and 1 are held, and page 2 is cached. Pages 3 and 4
    are free."""
    pool = PagePool(5)
    assert pool.allocate(3, tenant) == [2, 1, 0]
    pool.cache([2])
    return pool


@pytest.mark.parametrize(
    ("held", "cached", "message"),
    [
        ([0], [2], r"pages \[1\]: the reference counts differ"),
        ([0, 0, 1], [2], r"pages \[0\]: the reference counts differ"),
        ([0, 1], [], "1 pages are cached, but the owners keep 0"),
        ([0, 1], [2, 2], "two owners"),
        ([0, 1], [2, 4], "not cached"),
    ],
    ids=["lost", "held too often", "cached and lost", "cached with two owners", "free with an owner"],
)
def test_check_finds_a_page_whose_owners_do_not_add_up(
    pool: PagePool, held: list[int], cached: list[int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants(held, cached)


@pytest.mark.parametrize("move", ["retain", "release", "acquire", "evict", "cache"])
def test_a_move_of_a_page_in_the_wrong_state_fails_at_once(pool: PagePool, move: str) -> None:
    with pytest.raises(AssertionError, match="page 4"):
        getattr(pool, move)([4])


def test_a_page_with_two_references_cannot_be_parked(pool: PagePool) -> None:
    pool.retain([0])
    with pytest.raises(AssertionError, match="2 references"):
        pool.cache([0])


def test_taking_more_than_is_free_fails(pool: PagePool, tenant: TenantAccount) -> None:
    with pytest.raises(AssertionError, match="3 pages are requested, but only 2 are free"):
        pool.allocate(3, tenant)


@pytest.mark.parametrize("count", ["num_pages", "num_cached"])
def test_check_finds_a_tenant_whose_counts_do_not_add_up(
    pool: PagePool, tenant: TenantAccount, count: str
) -> None:
    setattr(tenant, count, getattr(tenant, count) + 1)
    with pytest.raises(AssertionError, match="owns 3 pages, 1 of them cached"):
        pool.check_invariants(held=[0, 1], cached=[2])


def test_check_finds_a_tenant_that_owns_nothing_and_thinks_that_it_does(pool: PagePool) -> None:
    stranger = TenantAccount("b")
    stranger.num_pages = 1
    with pytest.raises(AssertionError, match=r"'b'.* owns 0 pages"):
        pool.check_invariants(held=[0, 1], cached=[2], tenants=[stranger])


def test_a_free_page_has_no_owner(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="page 4 is free"):
        pool.owner(4)


def test_a_page_that_others_share_stays_with_the_tenant_that_it_was_allocated_for(
    pool: PagePool, tenant: TenantAccount
) -> None:
    pool.retain([0])
    pool.release([0])
    assert pool.owner(0) is tenant
    assert (tenant.num_pages, tenant.num_cached) == (3, 1)
