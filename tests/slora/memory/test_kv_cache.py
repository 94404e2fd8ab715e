from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.core.cost_model import CostModel
from slora.core.engine_config import KVFootprint
from slora.core.prefix_key import extend_keys, root_key
from slora.core.request import WeightedAdapter, compose_adapters
from slora.memory.evictor import Evictor
from slora.memory.kv_cache import BlockTable, KVCache, state_key
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora_adapters.version import AdapterVersion

BLOCK = 2
COSTS = CostModel(
    step_s=0.01, token_s=0.002, decode_s=0.001, context_token_s=1e-6, page_copy_s=0.004, load_byte_s=1e-8
)
some_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
# Most prompts have the same beginning, so only different tenants, adapters or weights keep them from sharing blocks.
prompts = some_tokens | st.integers(3, 9).map(lambda count: [0] * count)

Chain = tuple[
    "Root", tuple[int, ...]
]  # the KV of a token or block depends on the root and all tokens up to it

# A block that ends with the last token of the chain, or the recurrent state after it.
Name = tuple[Chain, bool]


@dataclass(frozen=True)
class Root:
    """Everything that KV depends on besides the tokens: sharing scope, weighted adapters and rotary factors."""

    scope: str
    adapters: tuple[WeightedAdapter, ...]
    uses_long_rope: bool

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        return tuple(version for version, _ in self.adapters)

    def key(self) -> bytes:
        return root_key(self.scope, self.adapters, uses_long_rope=self.uses_long_rope)


@dataclass
class Running:
    """A sequence whose tokens [0, num_computed) are computed. Its blocks from num_named on are not yet in the cache."""

    root: Root
    tenant: TenantAccount
    token_ids: list[int]
    blocks: BlockTable
    num_computed: int = 0
    num_named: int = 0

    def keys(self) -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, self.root.key(), self.token_ids, BLOCK)
        return keys

    def chain(self, num_tokens: int) -> Chain:
        return self.root, tuple(self.token_ids[:num_tokens])

    def fork(self, kv: KVCache) -> "Running":
        blocks = self.blocks.fork(kv)
        return Running(
            self.root, self.tenant, self.token_ids.copy(), blocks, self.num_computed, self.num_named
        )


class PrefixMachine(RuleBasedStateMachine):
    """Short sequences of several tenants compute, find, share and lose blocks.

    The model stores two things: the chain of tokens last written to each position of each page, and the pages that hold
    each named block or recurrent state, by the chain of tokens that ends with it. The position of a state's page is
    that within the state.
    """

    @initialize(
        num_pages=st.integers(6, 20),
        window=st.none() | st.integers(2, 6),
        is_public=st.booleans(),
        state_pages=st.integers(0, 2),
    )
    def start(self, num_pages: int, window: int | None, is_public: bool, state_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.tenants = TenantAccounts(num_pages)
        self.evictor = Evictor(self.pool, self.tenants)
        self.kv = KVCache(self.pool, self.evictor)
        self.footprint = KVFootprint(BLOCK, window, state_pages)
        self.is_public = is_public
        self.running: list[Running] = []
        self.content: dict[tuple[int, int], Chain | None] = {}
        self.named: dict[Name, list[int]] = {}

    # -- operations ---------------------------------------------------------------------------------------------

    @rule(
        tenant=st.sampled_from("ab"),
        weights=st.dictionaries(st.sampled_from("xy"), st.sampled_from([1.0, 0.5]), max_size=2),
        token_ids=prompts,
        data=st.data(),
    )
    def a_sequence_arrives(
        self, tenant: str, weights: dict[str, float], token_ids: list[int], data: st.DataObject
    ) -> None:
        weighted = (WeightedAdapter(AdapterVersion(tenant, digest), weights[digest]) for digest in weights)
        adapters = compose_adapters(weighted)
        scope = "" if self.is_public and data.draw(st.just(not adapters) | st.booleans()) else tenant
        root = Root(scope, adapters, uses_long_rope=False)
        blocks = BlockTable(BLOCK, self.footprint.state_pages)
        sequence = Running(root, self.tenants.find(tenant), token_ids, blocks)
        num_found = self._find_prefix(sequence)
        if self._compute(sequence, len(token_ids) - num_found * BLOCK):
            self.running.append(sequence)
            if data.draw(st.booleans()):
                self._name(sequence)
        else:
            sequence.blocks.release(self.kv)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=some_tokens)
    def a_sequence_grows(self, data: st.DataObject, token_ids: list[int]) -> None:
        sequence = self._choose(data)
        sequence.token_ids += token_ids
        if not self._compute(sequence, len(token_ids)):
            del sequence.token_ids[sequence.num_computed :]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def its_whole_blocks_are_named(self, data: st.DataObject) -> None:
        self._name(self._choose(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sequence_forks(self, data: st.DataObject) -> None:
        self.running.append(self._choose(data).fork(self.kv))

    @precondition(lambda self: self.running and not self.footprint.state_pages)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def a_fork_writes_its_last_block_anew(self, data: st.DataObject, token_id: int) -> None:
        """No sequence does this today: it writes to a page that may be named and shared."""
        parent = self._choose(data)
        start = data.draw(st.integers((parent.num_computed - 1) // BLOCK * BLOCK, parent.num_computed - 1))
        if not self._make_room(1, parent.tenant):
            return
        fork = parent.fork(self.kv)
        fork.token_ids[start:] = [token_id]
        fork.num_computed, fork.num_named = start, min(fork.num_named, start // BLOCK)
        assert fork.blocks.count_shared(start, self.kv)
        assert self._compute(fork, 1)
        self.running.append(fork)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sequence_ends(self, data: st.DataObject) -> None:
        sequence = self._choose(data)
        self.running.remove(sequence)
        sequence.blocks.release(self.kv)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sequence_begins_again_with_other_keys(self, data: st.DataObject) -> None:
        sequence = self._choose(data)
        sequence.blocks.release(self.kv)
        root = sequence.root
        sequence.root = Root(root.scope, root.adapters, uses_long_rope=True)
        sequence.num_computed = sequence.num_named = 0
        num_found = self._find_prefix(sequence)
        if not self._compute(sequence, len(sequence.token_ids) - num_found * BLOCK):
            self.running.remove(sequence)
            sequence.blocks.release(self.kv)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sequence_is_not_trusted(self, data: st.DataObject) -> None:
        sequence = self._choose(data)
        self.kv.invalidate(sequence.keys())
        chains = [sequence.chain(end) for end in range(BLOCK, len(sequence.token_ids) + 1, BLOCK)]
        self._forget(lambda name: name[0] in chains)

    @rule(tenant=st.sampled_from("ab"), digest=st.sampled_from("xy"))
    def an_adapter_is_deleted(self, tenant: str, digest: str) -> None:
        adapter = AdapterVersion(tenant, digest)
        self.kv.remove_adapter(adapter)
        self._forget(lambda name: adapter in name[0][0].versions)

    @rule(num_pages=st.integers(0, 6), tenant=st.sampled_from("ab"))
    def room_is_made(self, num_pages: int, tenant: str) -> None:
        possible = num_pages <= self.pool.num_free + self.pool.num_cached
        assert self._make_room(num_pages, self.tenants.find(tenant)) == possible

    @precondition(lambda self: self.pool.num_cached)
    @rule()
    def one_block_leaves(self) -> None:
        before = self.pool.num_cached
        assert self._make_room(self.pool.num_free + 1, self.tenants.find("a"))
        assert self.pool.num_cached in (before - 1, before - self.footprint.state_pages)

    # -- helpers ------------------------------------------------------------------------------------------------

    def _choose(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def _first_needed(self, num_blocks: int) -> int:
        return self.footprint.first_token_seen(num_blocks * BLOCK) // BLOCK

    def _find_prefix(self, sequence: Running) -> int:
        """Acquires the cached prefix. It must be the longest cached one, and must hold only KV of this sequence's
        own tokens."""
        most = (len(sequence.token_ids) - 1) // BLOCK
        keys = sequence.keys()[:most]
        has_states = self.footprint.state_pages > 0
        num_found = self.kv.match(keys, self._first_needed, needs_state=has_states)
        chains = [sequence.chain((index + 1) * BLOCK) for index in range(most)]
        assert num_found == max(n for n in range(most + 1) if self._is_here(chains, n))
        first = self._first_needed(num_found)
        needed, names = keys[first:num_found], [(chain, False) for chain in chains[first:num_found]]
        if has_states and num_found:
            needed, names = [state_key(needed[-1]), *needed], [(names[-1][0], True), *names]
        pages = self.kv.acquire(needed)
        assert pages == [page for name in names for page in self.named[name]]
        sequence.blocks.adopt(first, pages, self.kv)
        sequence.num_computed, sequence.num_named = num_found * BLOCK, num_found
        self._assert_reads_its_own(sequence)
        return num_found

    def _is_here(self, chains: list[Chain], num_blocks: int) -> bool:
        if self.footprint.state_pages and num_blocks and (chains[num_blocks - 1], True) not in self.named:
            return False
        needed = chains[self._first_needed(num_blocks) : num_blocks]
        return all((chain, False) in self.named for chain in needed)

    def _compute(self, sequence: Running, num_tokens: int) -> bool:
        """Computes tokens as the scheduler does. Returns False, and allocates nothing, if there is no room."""
        start, blocks = sequence.num_computed, sequence.blocks
        blocks.free_before(self.footprint.first_token_seen(start), self.kv)
        missing, copied = blocks.pages_missing(start + num_tokens), blocks.count_shared(start, self.kv)
        while not self._make_room(missing + copied, sequence.tenant):
            if not blocks.claim_state(self.kv):
                return False
            self._forget(lambda name: self.named[name] == blocks.state_pages)
            copied = blocks.count_shared(start, self.kv)
        pairs = blocks.copy_on_write(start, self.kv, sequence.tenant)
        assert len(pairs) == copied
        for source, target in pairs:
            for offset in range(BLOCK):
                self.content[target, offset] = self.content[source, offset]
            assert not self.kv.has_key(target)
        blocks.allocate(missing, sequence.tenant, self.kv)
        fresh = blocks.held_pages[len(blocks.held_pages) - missing :]
        self.content.update({(page, offset): None for page in fresh for offset in range(BLOCK)})
        sequence.num_computed = start + num_tokens
        for token in range(start, sequence.num_computed):
            page = int(blocks.pages[token // BLOCK])
            assert not self.kv.is_shared(page) and not self.kv.has_key(page)
            self.content[page, token % BLOCK] = sequence.chain(token + 1)
        for place, page in enumerate(blocks.state_pages):
            assert not self.kv.is_shared(page) and not self.kv.has_key(page)
            self.content[page, place] = sequence.chain(sequence.num_computed)
        return True

    def _name(self, sequence: Running) -> None:
        keys, pages, end = sequence.keys(), sequence.blocks.pages, sequence.num_computed // BLOCK
        for index in range(max(sequence.num_named, sequence.blocks.num_freed), end):
            page = int(pages[index])
            self.kv.insert([page], keys[index], keys[index - 1] if index else None, sequence.root.versions)
            self.named.setdefault((sequence.chain((index + 1) * BLOCK), False), [page])
        sequence.num_named = end
        states = sequence.blocks.state_pages
        if states and end and sequence.num_computed == end * BLOCK and not self.kv.has_key(states[0]):
            self.kv.insert(states, state_key(keys[end - 1]), keys[end - 1], sequence.root.versions)
            self.named.setdefault((sequence.chain(end * BLOCK), True), states)

    def _forget(self, is_meant: Callable[[Name], bool]) -> None:
        for name in [name for name in self.named if is_meant(name)]:
            del self.named[name]

    def _make_room(self, num_pages: int, tenant: TenantAccount) -> bool:
        before = {name for name, pages in self.named.items() if self.pool.is_cached(pages[0])}
        num_evictions = self.kv.num_evictions
        has_room = self.evictor.make_room(num_pages, tenant)
        left = {name for name in before if not self.pool.is_cached(self.named[name][0])}
        assert self.kv.num_evictions - num_evictions == len(left)
        for (root, tokens), is_state in before - left:
            parent = (root, tokens if is_state else tokens[:-BLOCK])
            assert (parent, False) not in left, "a block left before what is idle and follows it"
        self._forget(lambda name: name in left)
        return has_room

    # -- invariants ---------------------------------------------------------------------------------------------

    def _assert_reads_its_own(self, sequence: Running) -> None:
        pages = sequence.blocks.pages.tolist()
        for token in range(sequence.blocks.num_freed * BLOCK, sequence.num_computed):
            assert self.content[pages[token // BLOCK], token % BLOCK] == sequence.chain(token + 1)
        for place, page in enumerate(sequence.blocks.state_pages):
            assert self.content[page, place] == sequence.chain(sequence.num_computed)

    @invariant()
    def every_sequence_reads_what_it_wrote_or_would_have_written(self) -> None:
        for sequence in self.running:
            self._assert_reads_its_own(sequence)

    @invariant()
    def no_reference_is_lost_and_nothing_unnamed_is_kept(self) -> None:
        held = Counter(page for sequence in self.running for page in sequence.blocks.held_pages)
        self.kv.check_invariants()
        self.evictor.check_invariants()
        self.pool.check_invariants(held.elements(), self.kv.cached_pages(), self.tenants)
        named = [page for pages in self.named.values() for page in pages]
        assert set(self.kv.cached_pages()) == set(named) - set(held)
        assert all(self.kv.has_key(page) for page in named)

    @invariant()
    def no_page_is_shared_across_scopes_or_adapters(self) -> None:
        roots: dict[int, set[Root]] = {}
        for sequence in self.running:
            for page in sequence.blocks.held_pages:
                roots.setdefault(page, set()).add(sequence.root)
        for ((root, _), _), pages in self.named.items():
            for page in pages:
                roots.setdefault(page, set()).add(root)
        assert all(len(found) == 1 for found in roots.values())
        owners = {(page, self.pool.owner(page).name) for page in roots}
        for page, name in owners:
            (root,) = roots[page]
            assert root.scope in ("", name)
            assert all(version.tenant == name for version in root.versions)

    def teardown(self) -> None:
        """After all sequences have ended, every cached page can be evicted, and nothing remains."""
        if not hasattr(self, "pool"):
            return
        for sequence in self.running:
            sequence.blocks.release(self.kv)
        self.running.clear()
        assert self._make_room(self.pool.num_pages, self.tenants.find("a"))
        self.no_reference_is_lost_and_nothing_unnamed_is_kept()
        assert not self.named and self.pool.num_free == self.pool.num_pages


TestPrefixes = PrefixMachine.TestCase


class Setup:
    """A pool of 20 pages with chains of named blocks. Keys are derived from two letters for each block."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.pool = PagePool(20)
        self.tenants = TenantAccounts(20)
        self.evictor = Evictor(self.pool, self.tenants)
        self.kv = KVCache(self.pool, self.evictor, enabled=enabled)
        self.tenant = self.tenants.find("a")

    def compute(self, names: str, *adapters: AdapterVersion) -> list[int]:
        """Computes one held and named block for each letter. In "abc", b follows a, and c follows b."""
        pages = self.kv.allocate(len(names), self.tenant)
        for index, page in enumerate(pages):
            parent = names[:index].encode() if index else None
            self.kv.insert([page], names[: index + 1].encode(), parent, adapters)
        return pages

    def keep(self, names: str, *adapters: AdapterVersion) -> None:
        self.kv.release(self.compute(names, *adapters))

    def keys(self, names: str) -> list[bytes]:
        return [names[: index + 1].encode() for index in range(len(names))]

    def found(self, names: str, first_needed: Callable[[int], int] = lambda n: 0) -> int:
        return self.kv.match(self.keys(names), first_needed)

    def evict(self, count: int) -> None:
        assert self.evictor.make_room(self.pool.num_free + count, self.tenant)

    def check(self, held: list[int]) -> None:
        self.pool.check_invariants(held, self.kv.cached_pages(), self.tenants)
        self.kv.check_invariants()
        self.evictor.check_invariants()


@pytest.fixture
def setup() -> Setup:
    return Setup()


@given(
    present=st.lists(st.booleans(), max_size=12), window=st.integers(1, 12), reach=st.sampled_from([0, 1, 2])
)
def test_match_finds_the_longest_prefix_whose_needed_blocks_are_cached(
    present: list[bool], window: int, reach: int
) -> None:
    setup, names = Setup(), "abcdefghijkl"[: len(present)]
    setup.compute(names)
    setup.kv.invalidate(key for key, is_here in zip(setup.keys(names), present, strict=True) if not is_here)

    def first_needed(num_blocks: int) -> int:
        return 0 if reach == 0 else max(0, min(num_blocks - 1, (num_blocks - window) // reach))

    expected = max(n for n in range(len(names) + 1) if all(present[first_needed(n) : n]))
    assert setup.found(names, first_needed) == expected


def test_matching_a_prefix_looks_up_each_block_once(setup: Setup) -> None:
    """A scan from every end back over the window would look up most blocks many times."""
    asked: list[int] = []

    def first_needed(num_blocks: int) -> int:
        asked.append(num_blocks)
        return max(0, num_blocks - 8)

    setup.compute("abcdefg")
    assert setup.found("abcdefg" + "x" * 1000, first_needed) == 7
    assert len(asked) <= 1 + 7


def test_a_page_cannot_have_two_keys(setup: Setup) -> None:
    (page,) = setup.compute("a")
    with pytest.raises(AssertionError, match="already has a key"):
        setup.kv.insert([page], b"b", None, ())


def test_a_free_page_cannot_be_given_a_key(setup: Setup) -> None:
    with pytest.raises(AssertionError, match="page 3 is free"):
        setup.kv.insert([3], b"a", None, ())


def test_check_finds_an_idle_end_that_is_not_a_candidate(setup: Setup) -> None:
    page, _ = setup.compute("ab")
    setup.kv.check_invariants()
    setup.pool.cache([page])  # parked in the pool directly, not through the cache
    with pytest.raises(
        AssertionError, match=f"page {page} of 'a'.* is the end of a prefix and not a candidate"
    ):
        setup.kv.check_invariants()


def test_check_finds_an_idle_block_that_is_not_counted(setup: Setup) -> None:
    _, page = setup.compute("ab")
    setup.pool.cache([page])
    with pytest.raises(AssertionError, match="the number of idle child blocks is wrong"):
        setup.kv.check_invariants()


def test_public_base_blocks_belong_to_the_public_account_once_they_are_cached() -> None:
    """Born from a bug: a tenant at its ceiling could not free a block that was followed by another tenant's idle
    block."""
    setup, common = Setup(), TenantAccount("")
    setup.kv = KVCache(setup.pool, setup.evictor, public_owner=common)
    setup.keep("ab")
    setup.keep("c", AdapterVersion("a", "own"))
    assert (common.num_pages, common.num_cached) == (2, 2)
    assert (setup.tenant.num_pages, setup.tenant.num_cached) == (1, 1), "an adapter's blocks are its tenant's"
    pages = setup.kv.acquire(setup.keys("ab"))
    assert (common.num_pages, common.num_cached) == (2, 0)
    setup.check(held=pages)
    setup.kv.release(pages)
    setup.evict(3)
    assert common.num_pages == setup.tenant.num_pages == 0
