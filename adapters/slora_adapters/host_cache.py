"""Packed adapters in one piece of shared memory, which other processes map: the host tier below the page pool.

The arena is a memfd of fixed size. An adapter gets one contiguous region, aligned to memory pages; it is filled once,
then only read. Whoever reads it holds a pin; unpinned ones stay until their room is wanted, and leave in the order of
their last use. Regions never move, so a reader needs nothing but an offset.

Knows no store and no socket, and takes no lock: whoever owns it does.
"""

import fcntl
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slora_adapters.packing import ByteArray
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout

ALIGNMENT_BYTES = mmap.PAGESIZE
# From <linux/fcntl.h>; the module fcntl names them only from Python 3.13 on some systems.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class CachedAdapter:
    """A region and what is in it. `layout` and `scales` are set when it is filled (`ready`)."""

    __slots__ = ("forgotten", "layout", "num_bytes", "num_pins", "offset", "ready", "scales", "version")

    def __init__(self, version: AdapterVersion, offset: int, layout: AdapterLayout) -> None:
        self.version = version
        self.offset = offset
        self.num_bytes = layout.num_bytes
        self.layout = layout
        self.scales: npt.NDArray[np.float32] = np.zeros(0, np.float32)
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
        # Least recently used first; unready and pinned entries are in it too, and passed over.
        self._entries: OrderedDict[AdapterVersion, CachedAdapter] = OrderedDict()
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
        self._entries.move_to_end(version)
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
        place = self._find_place(_aligned(layout.num_bytes))
        if place is None:
            return None
        for evicted in place.evicted:
            del self._entries[evicted.version]
            self.num_evictions += 1
        entry = CachedAdapter(version, place.offset, layout)
        self._entries[version] = entry
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

    def _find_place(self, num_bytes: int) -> "_Place | None":
        """The place to which the fewest recent memories are lost: none if there is a gap (the smallest that will do,
        so that large ones stay whole), otherwise the run of neighbours whose last use is longest ago."""
        regions = sorted(self._regions(), key=lambda entry: entry.offset)
        age = {entry: rank for rank, entry in enumerate(self._entries.values())}
        best: _Place | None = None
        for first in range(len(regions) + 1):
            offset = regions[first - 1].end if first else 0
            best = _better(best, self._extend(regions, first, offset + num_bytes, age), offset)
        return best

    def _extend(
        self, regions: list[CachedAdapter], first: int, needed_end: int, age: dict[CachedAdapter, int]
    ) -> tuple[int, int, list[CachedAdapter]] | None:
        """(rank of the latest use among what must leave, end of the gap, what must leave) if regions from `first` on
        make room up to `needed_end`; None if a pinned one is in the way."""
        newest = -1
        for position in range(first, len(regions) + 1):
            end = regions[position].offset if position < len(regions) else self.num_bytes
            if end >= needed_end:
                return newest, end, regions[first:position]
            if position == len(regions) or regions[position].num_pins:
                return None
            newest = max(newest, age[regions[position]])
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """cost: smaller is better."""

    cost: tuple[int, int]
    offset: int
    evicted: list[CachedAdapter]


def _better(
    best: _Place | None, found: tuple[int, int, list[CachedAdapter]] | None, offset: int
) -> _Place | None:
    if found is None:
        return best
    newest, end, evicted = found
    cost = (newest, end - offset)
    return _Place(cost, offset, evicted) if best is None or cost < best.cost else best


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
