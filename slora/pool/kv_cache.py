"""The pool's pages that hold KV: those that sequences use, and those kept in case that somebody wants them again.

A block that was computed whole gets a name: the key of its content (`prefix_key`). With its last reference a page with
a name becomes cached, another one is free. Whoever needs the same content later finds the block by its key.

       allocate         name                release (last)            evicted, forgotten
    ------------> held -------> held, named --------------> cached ----------------------> free
                   |             |        ^                   |
    free <---------+<------------+        +------ acquire ----+
           release     discard

A cached block may leave when no cached block follows it: so a prefix leaves from its end, what is left of it stays of
use, and every cached page comes up, one after the other. Where sequences give back what is behind a window, a block may
outlive one before it; it is found again when that one has been computed again.

Knows pages and keys; no token, no sequence, no torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from slora.cost_model import Costs
from slora.pool.eviction_policy import Content
from slora.pool.evictor import Evictor
from slora.pool.page_pool import PagePool
from slora.pool.tenant import Tenant
from slora_adapters.version import AdapterVersion


class CachedBlock:
    """A page whose content has a name, in use or idle.

    parent: key of the block before it, named or not; None for a first block. tenant: who owns the page, which may be
    used by others where the scope is common. rank, ticket: the evictor's.
    """

    content = Content.PREFIX
    is_pinned = False

    __slots__ = ("_num_tokens", "adapter", "key", "pages", "parent", "rank", "tenant", "ticket")

    def __init__(
        self,
        page: int,
        key: bytes,
        parent: bytes | None,
        tenant: Tenant,
        adapter: AdapterVersion | None,
        num_tokens: int,
    ) -> None:
        self._num_tokens = num_tokens
        self.rank = 0.0
        self.pages = [page]
        self.key = key
        self.parent = parent
        self.tenant = tenant
        self.adapter = adapter
        self.ticket = 0

    def __repr__(self) -> str:
        return f"CachedBlock({self.key.hex()[:8]}, page {self.page} of {self.tenant.name!r})"

    @property
    def page(self) -> int:
        return self.pages[0]

    def reload_s(self, costs: Costs) -> float:
        """Seconds to compute it again. Its adapter is not counted: whoever finds the block needs that all the same."""
        return costs.prefill_s(self._num_tokens)


class KVCache:
    """Whoever holds a page of KV has its reference from here.

    block_tokens: tokens of a page.
    enabled: whether blocks are kept at all; if not, none ever gets a name. common: where the bare base's blocks are
    everybody's, who owns those that fall idle: a block that one tenant's floor protects would hide what another has to
    give up. num_evictions: blocks that left for others.
    """

    def __init__(
        self,
        pool: PagePool,
        evictor: Evictor,
        block_tokens: int,
        *,
        enabled: bool = True,
        common: Tenant | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._common = common
        self.enabled = enabled
        self.num_evictions = 0
        self._pool = pool
        self._evictor = evictor
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_page: dict[int, CachedBlock] = {}
        # In the order of naming: a set's order would differ from run to run, and with it the pages that are taken next.
        self._by_adapter: dict[AdapterVersion, dict[bytes, CachedBlock]] = {}
        # How many idle blocks follow the block of a key. By key, because the block before may leave and come again.
        self._num_idle_children: dict[bytes, int] = {}

    # -- references ---------------------------------------------------------------------------------------------

    def allocate(self, count: int, tenant: Tenant) -> list[int]:
        """Free pages without a name, each with one reference. The caller has made room."""
        return self._pool.allocate(count, tenant)

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page, which has one."""
        self._pool.retain(pages)

    def release(self, pages: list[int]) -> None:
        """Drops a reference from each page, which lie in the order of their tokens. With the last one a named page is
        cached, another is free."""
        unnamed = []
        # From the end: a block is offered only when nothing idle follows it, and would be withdrawn at once otherwise.
        for page in reversed(pages):
            block = self._by_page.get(page)
            if block is None:
                unnamed.append(page)
            elif self._pool.is_shared(page):
                self._pool.release([page])
            else:
                self._pool.park([page])
                self._fall_idle(block)
        self._pool.release(unnamed)

    def is_shared(self, page: int) -> bool:
        """Whether a page in use has more than one reference: nobody may write to it then."""
        return self._pool.is_shared(page)

    def is_named(self, page: int) -> bool:
        """Whether others can find it by its content: nobody may write to it then."""
        return page in self._by_page

    # -- names --------------------------------------------------------------------------------------------------

    def name(self, page: int, key: bytes, parent: bytes | None, adapter: AdapterVersion | None) -> None:
        """The block in `page`, which is in use, is computed whole, by `adapter`. Nothing happens if the key is known:
        of two pages with the same content one is enough to keep. parent: the key of the block before it."""
        if not self.enabled or key in self._by_key:
            return
        assert page not in self._by_page, f"{self._by_page[page]!r} can't have a second name"
        assert not self._pool.is_cached(page), f"page {page} is cached without a name"
        block = CachedBlock(page, key, parent, self._pool.owner(page), adapter, self._block_tokens)
        self._by_key[key] = self._by_page[page] = block
        if adapter is not None:
            self._by_adapter.setdefault(adapter, {})[key] = block

    def match(self, keys: list[bytes], first_needed: Callable[[int], int]) -> int:
        """The most leading blocks n of which all that are needed, [first_needed(n), n), are here. keys: of all blocks.

        first_needed(n) is below n and never falls as n grows. It is 0 without a window; with one, blocks that no later
        token looks back on need not be here. Worked example: of 5 blocks the third is missing. Without a window n is 2;
        if only the last two blocks before n are needed, n is 5.
        """
        longest, num_present = 0, 0  # num_present: blocks that are here in one piece, up to this one
        first_of_all = first_needed(len(keys))
        for index, key in enumerate(keys):
            if key in self._by_key:
                num_present += 1
                if first_needed(index + 1) > index - num_present:
                    longest = index + 1
            elif first_of_all <= index:
                break  # whatever comes later needs this one
            else:
                num_present = 0
        return longest

    def acquire(self, keys: list[bytes]) -> list[int]:
        """The pages of named blocks, with a reference more to each. keys: of exactly those that are needed."""
        blocks = [self._by_key[key] for key in keys]
        for block in blocks:
            if self._is_idle(block):
                self._evictor.reuse(block)
                self._pool.unpark(block.pages)
                self._leave_idle(block)
            else:
                self._pool.retain(block.pages)
        return [block.page for block in blocks]

    def discard(self, keys: Iterable[bytes]) -> None:
        """The content of these blocks is not to be trusted: nobody finds it any more. Those who use them keep them."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None:
                self._remove(block)

    def forget(self, adapter: AdapterVersion) -> None:
        """The adapter was deleted: nobody finds its blocks any more, and those that are idle are free."""
        # Those named last first: they stand at the end of their prefixes.
        for block in list(self._by_adapter.get(adapter, {}).values())[::-1]:
            self._remove(block)

    # -- proof --------------------------------------------------------------------------------------------------

    def cached_pages(self) -> Iterator[int]:
        """For `PagePool.check`: the pages of KV that it counts as cached."""
        return (page for page, block in self._by_page.items() if self._is_idle(block))

    def check(self) -> None:
        """Proves that names, idle blocks and offers add up. Raises AssertionError with what does not."""
        self._check_names()
        idle = [block for block in self._by_page.values() if self._is_idle(block)]
        counted = Counter(block.parent for block in idle if block.parent is not None)
        assert counted == self._num_idle_children, "idle blocks that follow a block do not add up"
        for block in self._by_page.values():
            is_end = self._is_idle(block) and not counted[block.key]
            assert bool(block.ticket) == is_end, (
                f"{block!r} is {'the end of a prefix and not ' * is_end}offered to the evictor"
            )

    def _check_names(self) -> None:
        assert len(self._by_key) == len(self._by_page), "a key has no page of its own"
        named = Counter(block.adapter for block in self._by_page.values() if block.adapter is not None)
        assert named == {adapter: len(blocks) for adapter, blocks in self._by_adapter.items()}, (
            "an adapter's blocks do not add up"
        )
        for page, block in self._by_page.items():
            assert block.pages == [page] and self._by_key.get(block.key) is block, f"{block!r} is misfiled"
            assert self._pool.owner(page) is block.tenant, f"{block!r} is another's page"
            if block.adapter is not None:
                assert block.key in self._by_adapter[block.adapter], f"{block!r} outlives its adapter"

    # -- idle blocks --------------------------------------------------------------------------------------------

    def _is_idle(self, block: CachedBlock) -> bool:
        return self._pool.is_cached(block.page)

    def _fall_idle(self, block: CachedBlock) -> None:
        """Its page was parked. What it is worth is settled now, though others may hide it for long."""
        if self._common is not None and block.adapter is None:
            self._pool.transfer(block.page, self._common)
            block.tenant = self._common
        block.rank = self._evictor.rank(block)
        if block.key not in self._num_idle_children:
            self._offer(block)
        if block.parent is None:
            return
        count = self._num_idle_children.get(block.parent, 0)
        self._num_idle_children[block.parent] = count + 1
        parent = self._by_key.get(block.parent)
        if parent is not None:
            self._evictor.withdraw(parent)

    def _leave_idle(self, block: CachedBlock) -> None:
        """Its page is not cached any more."""
        self._evictor.withdraw(block)
        if block.parent is None:
            return
        count = self._num_idle_children[block.parent] - 1
        if count:
            self._num_idle_children[block.parent] = count
            return
        del self._num_idle_children[block.parent]
        parent = self._by_key.get(block.parent)
        if parent is not None and self._is_idle(parent):
            self._offer(parent)

    def _offer(self, block: CachedBlock) -> None:
        self._evictor.offer(block, partial(self._evict, block), block.rank)

    def _evict(self, block: CachedBlock, taker: Tenant) -> None:
        self.num_evictions += 1
        self._remove(block)

    def _remove(self, block: CachedBlock) -> None:
        """Takes its name, and its page if nobody uses it."""
        del self._by_key[block.key], self._by_page[block.page]
        if block.adapter is not None:
            blocks = self._by_adapter[block.adapter]
            del blocks[block.key]
            if not blocks:
                del self._by_adapter[block.adapter]
        if self._is_idle(block):
            self._pool.evict(block.pages)
            self._leave_idle(block)
