import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slora_adapters.host_cache import ALIGNMENT_BYTES, CachedAdapter, HostCache, map_arena
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import SEGMENT_BYTES, AdapterLayout

PAGE_SEGMENTS = ALIGNMENT_BYTES // SEGMENT_BYTES
ARENA_PAGES = 12


def _layout(num_segments: int) -> AdapterLayout:
    return AdapterLayout(np.zeros((6, 2), np.int32), np.zeros((9, 3), np.int32), num_segments)


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


def test_a_filled_adapter_is_found_again(cache: HostCache) -> None:
    entry = _fill(cache, 1)
    cache.unpin(entry)
    assert cache.find(_version(1)) is entry and entry.num_pins == 1
    assert cache.find(_version(2)) is None


def test_another_process_sees_what_was_written(cache: HostCache) -> None:
    entry = _fill(cache, 7)
    arena = map_arena(cache.descriptor, cache.num_bytes)
    assert (arena[entry.offset : entry.offset + entry.num_bytes] == 7).all()


def test_the_arena_cannot_be_cut_short_under_a_reader(cache: HostCache) -> None:
    with pytest.raises(PermissionError), open(cache.descriptor, "wb", closefd=False) as file:
        file.truncate(ALIGNMENT_BYTES)


def test_the_least_recently_used_leaves_first(cache: HostCache) -> None:
    for number in range(4):
        cache.unpin(_fill(cache, number))
    cache.unpin(cache.find(_version(0)))
    _fill(cache, 9)
    assert [number for number in range(4) if cache.find(_version(number))] == [0, 2, 3]
    assert cache.num_evictions == 1


def test_a_pinned_adapter_is_never_evicted(cache: HostCache) -> None:
    pinned = [_fill(cache, number) for number in range(4)]
    assert cache.allocate(_version(9), _layout(PAGE_SEGMENTS)) is None
    cache.unpin(pinned[2])
    assert _fill(cache, 9).offset == pinned[2].offset


def test_nothing_is_evicted_for_an_adapter_that_finds_no_room_anyway(cache: HostCache) -> None:
    entries = [_fill(cache, number) for number in range(4)]
    cache.unpin(entries[0])
    cache.unpin(entries[2])
    assert cache.allocate(_version(9), _layout(2 * PAGE_SEGMENTS)) is None
    assert cache.find(_version(0)) and cache.find(_version(2))


def test_an_adapter_larger_than_the_arena_is_a_clear_error(cache: HostCache) -> None:
    with pytest.raises(ValueError, match="host_cache_bytes"):
        cache.allocate(_version(1), _layout(4 * PAGE_SEGMENTS + 1))


def test_a_forgotten_adapter_is_not_found_but_stays_for_its_reader(cache: HostCache) -> None:
    entry = _fill(cache, 1)
    cache.forget(_version(1))
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
    """Random use, with a model of who may read what: bytes of a pinned region must never change."""

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
        if any(pinned.version == _version(number) and not pinned.forgotten for pinned, _ in self.pins):
            return  # being filled
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
    def forget(self, number: int) -> None:
        self.cache.forget(_version(number))
        assert self.cache.find(_version(number)) is None

    @rule(number=st.integers(0, 7))
    def load_that_fails(self, number: int) -> None:
        if self.cache.find(_version(number)) is None:
            entry = self.cache.allocate(_version(number), _layout(3))
            if entry is not None:
                self.cache.unpin(entry)
        else:
            self.cache.unpin(self.cache._entries[_version(number)])

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
