"""Packed adapters in one piece of shared memory, which other processes map: the host tier below the page pool.

The arena is a memfd of fixed size. An adapter gets one contiguous region, aligned to memory pages; it is filled once,
then only read. Whoever reads it holds a pin; unpinned ones stay until their room is wanted. Regions never move, so a
reader needs nothing but an offset.

Room is made where the least is lost: the seconds to bring back what must leave, for each use of the cache, if the next
use of each is as far ahead as its last one is behind (hyperbolic caching, Blankstein et al. 2017, for one use each). Of
things that cost the same the one unused for longest leaves. What belongs to a tenant with no more than its share of
the arena is spared: a share is the arena over those who have something in it. So whoever streams through more than fits
pushes out their own.

Worked example: A has 60 of 100 MB, B 20, and A wants 30 more. A share is 50 MB; what A has goes, though B was idle for
longer. Of A's adapters one of 30 MB that takes 20 ms to load and was used 10 uses ago goes before one that takes 300 ms
and was used 100 uses ago: that loses 2 ms with each use of the cache, the other 3.

Knows no store and no socket, and takes no lock: whoever owns it does.
"""

import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.packing import ByteArray
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout

ALIGNMENT_BYTES = mmap.PAGESIZE
# Until it was measured.
_TYPICAL_BYTES_PER_S = 1e9
# As good as used so many times as recently: whoever keeps within its share loses nothing to who does not.
_SPARED = 1e6
# Losses are seconds over uses, kept as whole numbers of this part.
_LOSS_SCALE = float(1 << 60)
# From <linux/fcntl.h>; the module fcntl names them only from Python 3.13 on some systems.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class CachedAdapter:
    """A region and what is in it. `scales` and `reload_s` are set when it is filled (`ready`).

    reload_s: what it should take to bring it back. last_use: in uses of the cache.
    """

    __slots__ = (
        "forgotten",
        "last_use",
        "layout",
        "num_bytes",
        "num_pins",
        "offset",
        "ready",
        "reload_s",
        "scales",
        "version",
    )

    def __init__(self, version: AdapterVersion, offset: int, layout: AdapterLayout) -> None:
        self.version = version
        self.offset = offset
        self.num_bytes = layout.num_bytes
        self.layout = layout
        self.scales: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self.reload_s = self.num_bytes / _TYPICAL_BYTES_PER_S
        self.last_use = 0
        self.num_pins = 1
        self.ready = False
        self.forgotten = False

    @property
    def end(self) -> int:
        """Where the next region may begin."""
        return self.offset + _aligned(self.num_bytes)


class HostCache:
    """An arena of `num_bytes` (rounded up to memory pages). descriptor: its memfd, for other processes to map."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = _aligned(num_bytes)
        self.descriptor = _sealed_memory(self.num_bytes)
        self.memory = map_arena(self.descriptor, self.num_bytes)
        self.num_evictions = 0
        self._num_uses = 0
        self._entries: dict[AdapterVersion, CachedAdapter] = {}
        # Entries that lost their name while somebody still held them.
        self._nameless: list[CachedAdapter] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return sum(entry.end - entry.offset for entry in self._regions())

    def find(self, version: AdapterVersion) -> CachedAdapter | None:
        """The filled copy of a version, pinned for the caller."""
        entry = self._entries.get(version)
        if entry is None or not entry.ready:
            return None
        entry.num_pins += 1
        self._use(entry)
        return entry

    def allocate(self, version: AdapterVersion, layout: AdapterLayout) -> CachedAdapter | None:
        """A region for a version that has none, pinned for the caller, who fills it and sets `scales` and `ready`.

        Unpinned adapters are evicted for it, none in vain; None if even that makes no room for now. Raises ValueError
        if the arena is too small for it at all.
        """
        if layout.num_bytes > self.num_bytes:
            raise ValueError(
                f"the adapter takes {layout.num_bytes} bytes, the host cache has {self.num_bytes} (host_cache_bytes)"
            )
        assert version not in self._entries, f"{version} has a region already"
        place = self._find_place(version.tenant, _aligned(layout.num_bytes))
        if place is None:
            return None
        for evicted in place.evicted:
            del self._entries[evicted.version]
            self.num_evictions += 1
        entry = CachedAdapter(version, place.offset, layout)
        self._entries[version] = entry
        self._use(entry)
        return entry

    def region(self, entry: CachedAdapter) -> ByteArray:
        return self.memory[entry.offset : entry.offset + entry.num_bytes]

    def pin(self, entry: CachedAdapter) -> None:
        entry.num_pins += 1

    def unpin(self, entry: CachedAdapter) -> None:
        """Gives back one pin. An adapter that was forgotten or never filled goes with its last one."""
        assert entry.num_pins > 0, f"{entry.version} is not pinned"
        entry.num_pins -= 1
        if entry.num_pins == 0 and (entry.forgotten or not entry.ready):
            self._remove(entry)

    def forget(self, version: AdapterVersion) -> None:
        """The version is found no more from now on; its region is free as soon as nobody pins it."""
        entry = self._entries.pop(version, None)
        if entry is None:
            return
        entry.forgotten = True
        if entry.num_pins:
            self._nameless.append(entry)

    def check(self) -> None:
        """Proves that regions are disjoint, inside the arena, and with the gaps between them add up to all of it."""
        position = gaps = 0
        for entry in sorted(self._regions(), key=lambda entry: entry.offset):
            assert entry.offset % ALIGNMENT_BYTES == 0 and entry.num_bytes > 0, entry.version
            assert entry.offset >= position, f"{entry.version} overlaps the region before it"
            gaps += entry.offset - position
            position = entry.end
        assert position <= self.num_bytes, "a region ends beyond the arena"
        assert gaps + self.num_bytes - position + self.used_bytes == self.num_bytes
        assert all(entry.num_pins and entry.forgotten for entry in self._nameless)
        assert not any(entry.forgotten for entry in self._entries.values())
        assert all(entry.ready or entry.num_pins for entry in self._entries.values())

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last process that maps it."""
        os.close(self.descriptor)

    def _regions(self) -> list[CachedAdapter]:
        return [*self._entries.values(), *self._nameless]

    def _remove(self, entry: CachedAdapter) -> None:
        if entry.forgotten:
            self._nameless.remove(entry)
        else:
            del self._entries[entry.version]

    def _use(self, entry: CachedAdapter) -> None:
        self._num_uses += 1
        entry.last_use = self._num_uses

    def _find_place(self, tenant: str, num_bytes: int) -> "_Place | None":
        """Where the least is lost: nothing if there is a gap (the smallest that will do, so that large ones stay
        whole), otherwise a run of neighbours. None if each has a pinned one in it."""
        regions = sorted(self._regions(), key=lambda entry: entry.offset)
        # Of all regions before each one, so that a run's is a difference; whole numbers, so that it is exact.
        lost = [0, *accumulate(self._losses(regions, tenant, num_bytes))]
        pins = [0, *accumulate(entry.num_pins for entry in regions)]
        starts = [*(entry.offset for entry in regions), self.num_bytes]
        best: _Place | None = None
        stop = 0
        for first in range(len(regions) + 1):
            offset = regions[first - 1].end if first else 0
            if offset + num_bytes > self.num_bytes:
                break
            stop = max(stop, first)
            while starts[stop] < offset + num_bytes:
                stop += 1
            cost = (lost[stop] - lost[first], starts[stop] - offset)
            if pins[stop] == pins[first] and (best is None or cost < best.cost):
                best = _Place(cost, offset, regions[first:stop])
        return best

    def _losses(self, regions: list[CachedAdapter], tenant: str, num_bytes: int) -> Iterator[int]:
        """What is lost with each region if `tenant` takes so many bytes more."""
        held: Counter[str] = Counter({tenant: num_bytes})
        for entry in regions:
            held[entry.version.tenant] += entry.end - entry.offset
        share = self.num_bytes / len(held)
        for entry in regions:
            weight = 1 if held[entry.version.tenant] > share else _SPARED
            idle = self._num_uses + 1 - entry.last_use
            yield 1 + int(_LOSS_SCALE * weight * entry.reload_s / idle)


@dataclass(frozen=True, slots=True)
class _Place:
    """cost: smaller is better."""

    cost: tuple[int, int]
    offset: int
    evicted: list[CachedAdapter]


def map_arena(descriptor: int, num_bytes: int) -> ByteArray:
    """All of an arena as an array, mapped until nothing refers to it. Readers must not write, though they could:
    torch and the GPU's driver want memory that is mapped writable."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED), np.uint8)


def _sealed_memory(num_bytes: int) -> int:
    """A memfd whose size is final: nobody can cut it short under a reader."""
    descriptor = os.memfd_create("slora-adapters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    return descriptor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
