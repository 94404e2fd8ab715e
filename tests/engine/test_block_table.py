from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.block_table import BlockTable
from slora.page_pool import PagePool

BLOCK = 4


class BlockTableMachine(RuleBasedStateMachine):
    """Sequences grow, fork, forget what is behind them and leave, over one pool; beside them, what each must read.

    Every write has a number of its own, so a page that two write to, or that was given back too soon, is found.
    """

    @initialize(num_pages=st.integers(1, 16))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.tables: dict[int, BlockTable] = {}
        self.written: dict[int, list[int]] = {}
        self.bytes: dict[tuple[int, int], int] = {}
        self.count = 0

    def _choose(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tables)))

    @rule()
    def arrive(self) -> None:
        self.count += 1
        self.tables[self.count], self.written[self.count] = BlockTable(BLOCK), []

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def write(self, data: st.DataObject, num_tokens: int) -> None:
        name = self._choose(data)
        table, start = self.tables[name], len(self.written[name])
        missing = table.pages_missing(start + num_tokens)
        if missing + table.must_copy(start, self.pool) > self.pool.num_free:
            return
        if table.must_copy(start, self.pool):
            source, target = table.copy_on_write(start, self.pool)
            for offset in range(BLOCK):
                self.bytes[target, offset] = self.bytes.get((source, offset), -1)
        if missing:
            table.extend(self.pool.allocate(missing))
        for token in range(start, start + num_tokens):
            self.count += 1
            self.written[name].append(self.count)
            page = int(table.pages[token // BLOCK])
            assert not self.pool.is_shared(page)
            self.bytes[page, token % BLOCK] = self.count

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = self._choose(data)
        self.count += 1
        self.tables[self.count] = self.tables[name].fork(self.pool)
        self.written[self.count] = self.written[name].copy()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = self._choose(data)
        token = data.draw(st.integers(0, len(self.written[name])))
        self.tables[name].free_before(token, self.pool)
        self.tables[name].free_before(token, self.pool)
        assert self.tables[name].num_freed >= token // BLOCK

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = self._choose(data)
        self.tables.pop(name).release(self.pool)
        del self.written[name]

    @invariant()
    def everybody_reads_what_was_written_and_no_page_leaks(self) -> None:
        self.pool.check([page for table in self.tables.values() for page in table.held], [])
        for name, table in self.tables.items():
            marks, freed = self.written[name], table.num_freed * BLOCK
            pages = table.pages.tolist()
            assert len(pages) == -(-len(marks) // BLOCK)
            found = [self.bytes[pages[token // BLOCK], token % BLOCK] for token in range(freed, len(marks))]
            assert found == marks[freed:]
            assert not table.held or set(pages) == set(table.held), "an entry is no page of the sequence"


TestBlockTable = BlockTableMachine.TestCase


def test_a_copy_of_the_first_page_held_stands_in_for_those_before_it() -> None:
    pool = PagePool(5)
    table = BlockTable(BLOCK)
    table.extend(pool.allocate(3))
    table.free_before(9, pool)
    other = table.fork(pool)
    source, target = table.copy_on_write(9, pool)
    assert table.pages.tolist() == [target] * 3 and other.pages.tolist() == [source] * 3
    pool.check([target, source], [])
