"""A reduced model of cached prefixes, as the evictor sees them: blocks of one page in chains.

A block can be evicted when it is idle and no idle block follows it. Keys, tokens and prefix matching are not modelled.
"""

from collections.abc import Iterator
from functools import partial

from slora.memory.evictor import Evictor
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount


class IdleBlock:
    """One page of a prefix. It is idle when it has no users. `is_here` is False after its eviction."""

    is_pinned = False

    def __init__(self, page: int, tenant: TenantAccount, parent: "IdleBlock | None") -> None:
        self.pages = [page]
        self.tenant = tenant
        self.parent = parent
        self.num_users = 1
        self.num_idle_children = 0
        self.is_here = True
        self.rank = self.ticket = 0

    @property
    def is_idle(self) -> bool:
        return self.is_here and self.num_users == 0

    def chain(self) -> "list[IdleBlock]":
        """All blocks from the root of the prefix to this block."""
        return [*self.parent.chain(), self] if self.parent else [self]


class IdleBlocks:
    """The blocks of `pool`. A block is offered to the evictor once it is idle and no idle block follows it."""

    def __init__(self, pool: PagePool, evictor: Evictor) -> None:
        self._pool = pool
        self._evictor = evictor
        self._blocks: list[IdleBlock] = []

    def __iter__(self) -> Iterator[IdleBlock]:
        return iter(self._blocks)

    def extend(self, parent: IdleBlock | None, count: int, tenant: TenantAccount) -> list[IdleBlock]:
        """Adds `count` blocks after `parent`, each with one user. The pool must have free pages for them."""
        chain = []
        for page in self._pool.allocate(count, tenant):
            parent = IdleBlock(page, tenant, parent)
            chain.append(parent)
        self._blocks += chain
        return chain

    def acquire(self, block: IdleBlock) -> None:
        assert block.is_here
        if block.is_idle:
            self._evictor.remove(block)
            self._pool.acquire(block.pages)
            self._unhide(block.parent)
        block.num_users += 1

    def release(self, block: IdleBlock) -> None:
        block.num_users -= 1
        if block.num_users:
            return
        self._pool.cache(block.pages)
        if block.parent is not None:
            block.parent.num_idle_children += 1
            self._evictor.remove(block.parent)
        self._offer_if_open(block)

    def _offer_if_open(self, block: IdleBlock) -> None:
        if block.is_idle and not block.num_idle_children:
            block.rank = self._evictor.next_rank()
            self._evictor.add(block, partial(self._evict, block))

    def _unhide(self, parent: IdleBlock | None) -> None:
        if parent is not None:
            parent.num_idle_children -= 1
            self._offer_if_open(parent)

    def _evict(self, block: IdleBlock, taker: TenantAccount) -> None:
        self._pool.evict(block.pages)
        block.is_here = False
        self._blocks.remove(block)
        self._unhide(block.parent)
