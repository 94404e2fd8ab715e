from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slora_adapters.loader.host_cache import ALIGNMENT_BYTES, CachedAdapter, HostCache, map_arena
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import SEGMENT_BYTES, AdapterLayout

PAGE_SEGMENTS = ALIGNMENT_BYTES // SEGMENT_BYTES
ARENA_PAGES = 12


def _layout(num_segments: int) -> AdapterLayout:
    tables = [np.zeros(size, np.int32) for size in ((6, 2), (9, 3), (9, 4), (2, 3), (3, 2))]
    return AdapterLayout(*tables, num_segments, 4, True)


def _version(number: int) -> AdapterVersion:
    return AdapterVersion("t", f"{number:064x}")


def _fill(cache: HostCache, number: int, num_pages: int = 1) -> CachedAdapter:
    entry = cache.allocate(_version(number), _layout(num_pages * PAGE_SEGMENTS))
    assert entry is not None
    cache.region(entry)[:] = number
    entry.ready = True
    return entry


@pytest.fixture
def cache():
    cache = HostCache(4 * ALIGNMENT_BYTES)
    yield cache
    cache.check()
    cache.close()


def test_a_purge_leaves_no_byte_of_the_tenant_and_every_byte_of_others(cache: HostCache) -> None:
    """Not even where an evicted adapter was replaced by a smaller one."""
    for number in (1, 2, 3):
        cache.unpin(_fill(cache, number))
    kept = cache.allocate(AdapterVersion("other", "a" * 64), _layout(PAGE_SEGMENTS + 1))
    assert kept is not None and cache.num_evictions == 2
    cache.region(kept)[:] = 9
    kept.ready = True
    running = cache.find(_version(3))
    assert running is not None
    cache.purge("t")
    assert set(np.unique(cache.memory)) == {0, 3, 9}, "a copy in use stays"
    assert (cache.region(kept) == 9).all()
    cache.unpin(running)
    cache.purge("t")
    assert set(np.unique(cache.memory)) == {0, 9} and len(cache) == 1
    cache.unpin(kept)


def test_another_process_sees_what_was_written(cache: HostCache) -> None:
    entry = _fill(cache, 7)
    arena = map_arena(cache.descriptor, cache.num_bytes)
    assert (arena[entry.offset : entry.offset + entry.num_bytes] == 7).all()


def test_the_arena_cannot_be_cut_short_under_a_reader(cache: HostCache) -> None:
    with pytest.raises(PermissionError), open(cache.descriptor, "wb", closefd=False) as file:
        file.truncate(ALIGNMENT_BYTES)


def test_an_adapter_larger_than_the_arena_is_a_clear_error(cache: HostCache) -> None:
    with pytest.raises(ValueError, match="host_cache_bytes"):
        cache.allocate(_version(1), _layout(4 * PAGE_SEGMENTS + 1))


def test_a_discarded_adapter_is_not_found_but_stays_valid_for_its_reader(cache: HostCache) -> None:
    entry = _fill(cache, 1)
    cache.discard(_version(1))
    assert cache.find(_version(1)) is None
    again = _fill(cache, 1)
    assert again.offset != entry.offset and (cache.region(entry) == 1).all()
    cache.unpin(entry)
    assert cache.used_bytes == ALIGNMENT_BYTES


def test_an_adapter_that_was_never_filled_leaves_no_trace(cache: HostCache) -> None:
    entry = cache.allocate(_version(1), _layout(1))
    assert cache.find(_version(1)) is None, "it is not ready"
    cache.unpin(entry)
    assert cache.used_bytes == 0


class HostCacheMachine(RuleBasedStateMachine):
    """Random operations beside a model of who holds pins. The bytes of a pinned region must never change."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HostCache(ARENA_PAGES * ALIGNMENT_BYTES)
        self.pins: list[tuple[CachedAdapter, int]] = []
        self.stamp = 0

    @rule(number=st.integers(0, 7), segments=st.integers(1, 5 * PAGE_SEGMENTS))
    def load(self, number: int, segments: int) -> None:
        entry = self.cache.find(_version(number))
        if entry is not None:
            self.pins.append((entry, self._stamp_of(entry)))
            return
        if any(pinned.version == _version(number) and not pinned.discarded for pinned, _ in self.pins):
            return  # its load is still in progress
        entry = self.cache.allocate(_version(number), _layout(segments))
        if entry is None:
            return
        self.stamp = self.stamp % 255 + 1
        self.cache.region(entry)[:] = self.stamp
        entry.ready = True
        self.pins.append((entry, self.stamp))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.cache.unpin(entry)

    @rule(number=st.integers(0, 7))
    def discard(self, number: int) -> None:
        self.cache.discard(_version(number))
        assert self.cache.find(_version(number)) is None

    @rule(number=st.integers(0, 7))
    def load_that_fails(self, number: int) -> None:
        entry = self.cache.find(_version(number)) or self.cache.allocate(_version(number), _layout(3))
        if entry is not None:
            self.cache.unpin(entry)

    @invariant()
    def books_are_right_and_readers_undisturbed(self) -> None:
        self.cache.check()
        for entry, stamp in self.pins:
            assert (self.cache.region(entry) == stamp).all()

    def teardown(self) -> None:
        while self.pins:
            self.cache.unpin(self.pins.pop()[0])
        self.cache.check()
        self.cache.close()

    def _stamp_of(self, entry: CachedAdapter) -> int:
        return int(self.cache.region(entry)[0])


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = settings(stateful_step_count=40)


def _held(cache: HostCache, tenant: str) -> set[int]:
    """Numbers of a tenant's adapters in the cache. The lookup does not count as a use."""
    return {int(version.digest, 16) for version in cache.contents if version.tenant == tenant}


def _put(cache: HostCache, tenant: str, number: int, num_pages: int = 1, reload_s: float = 1.0) -> bool:
    """Uses an adapter, and loads it first if it is not cached. Returns whether it was cached."""
    version = AdapterVersion(tenant, f"{number:064x}")
    entry = cache.find(version)
    was_there = entry is not None
    if entry is None:
        entry = cache.allocate(version, _layout(num_pages * PAGE_SEGMENTS))
        assert entry is not None
        entry.ready, entry.reload_s = True, reload_s
    cache.unpin(entry)
    return was_there


def _cache(num_pages: int) -> HostCache:
    return HostCache(num_pages * ALIGNMENT_BYTES)


def test_of_equally_recent_adapters_the_cheapest_to_fetch_is_evicted() -> None:
    for cheap in range(4):
        cache = _cache(4)
        for number in range(4):
            _put(cache, "t", number, reload_s=0.1 if number == cheap else 9.0)
        _put(cache, "t", 9)
        assert _held(cache, "t") == {0, 1, 2, 3, 9} - {cheap}
        cache.close()


def test_an_unused_adapter_is_evicted_in_the_end_even_if_costly_to_fetch(cache: HostCache) -> None:
    _put(cache, "t", 0, reload_s=5.0)
    for number in range(1, 40):
        _put(cache, "t", number, reload_s=1.0)
        assert 0 in _held(cache, "t") or number > 6, "it stays for longer than others"
    assert 0 not in _held(cache, "t")


def _trace(seed: int, length: int = 1500) -> list[int]:
    """Random adapter numbers with a Zipf distribution. Each third of the trace has other popular numbers."""
    random = np.random.default_rng(seed)
    thirds = [(random.zipf(1.3, length // 3) + shift) % 60 for shift in (0, 20, 40)]
    return [int(number) for third in thirds for number in third]


@pytest.mark.parametrize("seed", range(3))
def test_with_equal_costs_eviction_is_lru(seed: int) -> None:
    cache, lru = _cache(12), OrderedDict[int, None]()
    for number in _trace(seed):
        was_there = number in lru
        lru[number] = None
        lru.move_to_end(number)
        if len(lru) > 12:
            lru.popitem(last=False)
        assert _put(cache, "t", number) == was_there
        assert _held(cache, "t") == set(lru)
    cache.close()


@pytest.mark.parametrize("seed", range(3))
def test_with_mixed_sizes_the_hit_rate_is_close_to_lru_without_an_arena(seed: int, report) -> None:
    """The reference is plain LRU, which may scatter an adapter over free pages. Reload time is proportional to size."""
    pages = [1 + number * 7 % 5 for number in range(60)]
    cache, lru = _cache(40), OrderedDict[int, None]()
    ours = plain = 0
    for number in _trace(seed):
        ours += _put(cache, "t", number, pages[number], reload_s=float(pages[number]))
        plain += number in lru
        lru[number] = None
        lru.move_to_end(number)
        while sum(pages[other] for other in lru) > 40:
            lru.popitem(last=False)
        cache.check()
    report(f"host cache, mixed sizes: {ours} hits, LRU without an arena {plain}")
    assert ours >= 0.95 * plain
    cache.close()


@given(data=st.data())
def test_eviction_chooses_the_run_of_entries_with_the_lowest_cost(data: st.DataObject) -> None:
    """Compares the cache's choice with a brute-force search over every run of adjacent entries."""
    cache = _cache(ARENA_PAGES)
    draw = data.draw
    for number in range(draw(st.integers(3, 12))):
        size, tenant = draw(st.integers(1, 4)), draw(st.sampled_from("ab"))
        _put(cache, tenant, number, size, reload_s=draw(st.sampled_from([0.5, 1.0, 4.0])))
    found = [entry for version in cache.contents if (entry := cache.find(version))]
    entries = sorted(found, key=lambda entry: entry.offset)
    for entry in entries:
        if draw(st.integers(0, 5)) > 0:
            cache.unpin(entry)
    wanted, tenant = draw(st.integers(1, 6)) * ALIGNMENT_BYTES, draw(st.sampled_from("abc"))
    best = _least_loss(cache, entries, tenant, wanted)
    new = cache.allocate(AdapterVersion(tenant, "f" * 64), _layout(wanted // SEGMENT_BYTES))
    gone = [entry for entry in entries if entry.version not in cache.contents]
    assert (new is None) == (best is None)
    assert not any(entry.num_pins for entry in gone)
    if best is None:
        assert not gone
    else:
        assert _loss(cache, entries, gone, tenant, wanted) == pytest.approx(best, abs=1e-15)
        cache.check()
    cache.close()


def _loss(
    cache: HostCache, entries: list[CachedAdapter], gone: list[CachedAdapter], tenant: str, wanted: int
) -> float:
    now = 1 + max(entry.last_use for entry in entries)
    tenants = {entry.version.tenant for entry in entries} | {tenant}
    loss = 0.0
    for entry in gone:
        owner = entry.version.tenant
        held = sum(other.num_bytes for other in entries if other.version.tenant == owner)
        held += wanted if owner == tenant else 0
        spared = held * len(tenants) <= cache.num_bytes
        loss += entry.reload_s / (now - entry.last_use) * (1e6 if spared else 1)
    return loss


def _least_loss(cache: HostCache, entries: list[CachedAdapter], tenant: str, wanted: int) -> float | None:
    losses = []
    for first in range(len(entries) + 1):
        for stop in range(first, len(entries) + 1):
            begin = entries[first - 1].end if first else 0
            end = entries[stop].offset if stop < len(entries) else cache.num_bytes
            run = entries[first:stop]
            if end - begin >= wanted and not any(entry.num_pins for entry in run):
                losses.append(_loss(cache, entries, run, tenant, wanted))
    return min(losses, default=None)


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_that_streams_through_many_adapters_evicts_only_its_own(seed: int) -> None:
    cache, random = _cache(64), np.random.default_rng(seed)
    sizes = {"b": [2, 5, 3], "c": [7, 1]}
    streamed = 0
    for tenant, pages in sizes.items():
        for number, num_pages in enumerate(pages):
            _put(cache, "a", streamed, int(random.integers(1, 9)))
            streamed += 1
            _put(cache, tenant, number, num_pages, reload_s=1e-3)
    for _ in range(1000):
        _put(cache, "a", streamed, int(random.integers(1, 9)), reload_s=1.0)
        streamed += 1
        cache.check()
    assert _held(cache, "b") == {0, 1, 2} and _held(cache, "c") == {0, 1}
    assert cache.num_evictions > 900
    cache.close()


def test_a_tenant_within_its_share_evicts_from_a_tenant_above_its_share(cache: HostCache) -> None:
    _put(cache, "b", 0)
    for number in range(3):
        _put(cache, "greedy", number, reload_s=100.0)
    _put(cache, "new", 0)
    assert _held(cache, "b") == {0} and _held(cache, "greedy") == {1, 2}
