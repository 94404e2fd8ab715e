import pytest

from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount


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
