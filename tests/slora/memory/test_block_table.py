import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


class BlockTableMachine(RuleBasedStateMachine):
    """Sequences grow, fork, free blocks behind their windows and end, over one pool. A model holds what each must
    read.

    Every write stores a unique number, and also in all pages of the recurrent state. This reveals a page that two
    sequences write to, or that was freed too early.
    """

    @initialize(num_pages=st.integers(1, 16), num_state_pages=st.integers(0, 2))
    def start(self, num_pages: int, num_state_pages: int) -> None:
        self.num_state_pages = num_state_pages
        setup = Setup(num_pages)
        self.pool, self.kv, self.tenant = setup.pool, setup.kv, setup.tenant
        self.tables: dict[int, BlockTable] = {}
        self.written: dict[int, list[int]] = {}
        self.bytes: dict[tuple[int, int], int] = {}
        self.count = 0

    def _choose(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tables)))

    @rule()
    def arrive(self) -> None:
        self.count += 1
        table = BlockTable(BLOCK, self.num_state_pages)
        self.tables[self.count], self.written[self.count] = table, []

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def write(self, data: st.DataObject, num_tokens: int) -> None:
        name = self._choose(data)
        table, start = self.tables[name], len(self.written[name])
        missing = table.pages_missing(start + num_tokens)
        if missing + table.count_shared(start, self.kv) > self.pool.num_free:
            return
        if table.count_shared(start, self.kv):
            for source, target in table.copy_on_write(start, self.kv, self.tenant):
                for offset in range(BLOCK):
                    self.bytes[target, offset] = self.bytes.get((source, offset), -1)
        assert not table.count_shared(start, self.kv)
        if missing:
            table.allocate(missing, self.tenant, self.kv)
        for token in range(start, start + num_tokens):
            self.count += 1
            self.written[name].append(self.count)
            page = int(table.pages[token // BLOCK])
            assert not self.kv.is_shared(page)
            self.bytes[page, token % BLOCK] = self.count
        for page in table.state_pages:
            self.bytes[page, 0] = self.count

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = self._choose(data)
        self.count += 1
        self.tables[self.count] = self.tables[name].fork(self.kv)
        self.written[self.count] = self.written[name].copy()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = self._choose(data)
        token = data.draw(st.integers(0, len(self.written[name])))
        self.tables[name].free_before(token, self.kv)
        self.tables[name].free_before(token, self.kv)
        assert self.tables[name].num_freed >= token // BLOCK

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = self._choose(data)
        self.tables.pop(name).release(self.kv)
        del self.written[name]

    @invariant()
    def everybody_reads_what_was_written_and_no_page_leaks(self) -> None:
        self.pool.check_invariants([page for table in self.tables.values() for page in table.held_pages], [])
        for name, table in self.tables.items():
            marks, freed = self.written[name], table.num_freed * BLOCK
            pages = table.pages.tolist()
            assert len(pages) == -(-len(marks) // BLOCK)
            found = [self.bytes[pages[token // BLOCK], token % BLOCK] for token in range(freed, len(marks))]
            assert found == marks[freed:]
            num_state_pages = self.num_state_pages if marks else 0
            assert [self.bytes[page, 0] for page in table.state_pages] == marks[-1:] * num_state_pages
            held = set(table.held_pages) - set(table.state_pages)
            assert not held or set(pages) == held, "an entry is no page of the sequence"
            assert table.filled_pages(len(marks)) == table.held_pages


TestBlockTable = BlockTableMachine.TestCase


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
