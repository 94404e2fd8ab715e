import pytest

from slora.memory.evictor import Evictor
from slora.memory.kv_cache import BlockTable, KVCache
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount, TenantAccounts

BLOCK = 4


class Setup:
    """A pool of one tenant and a prefix cache. Blocks are in the cache only if a test names them."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        tenants = TenantAccounts(num_pages)
        evictor = Evictor(self.pool, tenants)
        self.kv = KVCache(self.pool, evictor)
        self.tenant: TenantAccount = tenants.find("a")

    def table(self, num_pages: int) -> BlockTable:
        table = BlockTable(BLOCK)
        table.allocate(num_pages, self.tenant, self.kv)
        return table


def test_copy_on_write_of_the_first_held_page_also_updates_the_freed_entries() -> None:
    setup = Setup(5)
    table = setup.table(3)
    table.free_before(9, setup.kv)
    other = table.fork(setup.kv)
    [(source, target)] = table.copy_on_write(9, setup.kv, setup.tenant)
    assert table.pages.tolist() == [target] * 3 and other.pages.tolist() == [source] * 3
    setup.pool.check_invariants([target, source], [])


def test_a_copy_belongs_to_the_tenant_that_writes_it() -> None:
    setup = Setup(5)
    table, writer = setup.table(1), TenantAccount("writer")
    [(_, target)] = table.fork(setup.kv).copy_on_write(0, setup.kv, writer)
    assert setup.pool.owner(target) is writer


def test_copy_on_write_of_a_cached_page_keeps_the_key_on_the_original() -> None:
    setup = Setup(5)
    table = setup.table(1)
    setup.kv.insert([int(table.pages[0])], b"key", None, ())
    fork = table.fork(setup.kv)
    assert fork.count_shared(3, setup.kv)
    [(source, target)] = fork.copy_on_write(3, setup.kv, setup.tenant)
    assert setup.kv.has_key(source) and not setup.kv.has_key(target)
    fork.release(setup.kv)
    table.release(setup.kv)
    setup.pool.check_invariants([], cached=[source])


def test_writing_into_a_page_that_others_can_find_is_an_error() -> None:
    setup = Setup(5)
    table = setup.table(2)
    setup.kv.insert([int(table.pages[0])], b"key", None, ())
    assert not table.count_shared(4, setup.kv)
    with pytest.raises(AssertionError, match=r"token 3 would be written into page \d, which has a key"):
        table.count_shared(3, setup.kv)


@pytest.mark.parametrize("num_freed", [0, 1, 20])
def test_pages_are_adopted_behind_blocks_outside_the_window(num_freed: int) -> None:
    setup = Setup(5)
    table = BlockTable(BLOCK)
    first, second = setup.kv.allocate(2, setup.tenant)
    table.adopt(num_freed, [first, second], setup.kv)
    assert table.pages.tolist() == [first] * num_freed + [first, second]
    assert table.held_pages == [first, second]
    assert table.pages_missing((num_freed + 2) * BLOCK + 1) == 1
    table.release(setup.kv)
    setup.pool.check_invariants([], [])


def test_a_table_that_adopted_only_freed_blocks_points_to_its_next_page() -> None:
    setup = Setup(5)
    table = BlockTable(BLOCK)
    table.adopt(2, [], setup.kv)
    assert (table.num_pages, table.held_pages) == (2, [])
    table.allocate(1, setup.tenant, setup.kv)
    (page,) = table.held_pages
    assert table.pages.tolist() == [page] * 3


def test_a_table_that_has_pages_cannot_adopt_others() -> None:
    setup = Setup(5)
    table = setup.table(1)
    with pytest.raises(AssertionError, match="a block table with 1 pages cannot adopt other pages"):
        table.adopt(0, [3], setup.kv)
