"""The host tier below the page pool: packed adapters in one shared memory arena that other processes map.

The arena is a memfd of fixed size. Each adapter gets one contiguous region, aligned to OS memory pages. A region is
written once and then only read. A reader holds a pin on the region. An unpinned adapter stays cached until its space is
needed. Regions never move, so a reader needs only an offset.

Eviction removes the regions with the smallest total loss. The loss of a region is its reload time divided by the number
of cache uses since its last use. This assumes that the next use is as far in the future as the last use is in the past.
The rule is that of hyperbolic caching (Blankstein et al. 2017), with a use count of one for every entry. Among adapters
with the same reload time, the least recently used one is evicted.

A tenant's share is the arena size divided by the number of tenants with adapters in it, including the tenant that needs
space. Adapters of a tenant that does not exceed its share are evicted last. So a tenant that loads more adapters than
fit evicts its own adapters.

Worked example: tenant A has 60 of 100 MB, tenant B has 20 MB, and A needs 30 MB more. A share is 50 MB, so A's adapters
are evicted, even though B's have been idle for longer. One adapter of A with 30 MB needs 20 ms to load and was last
used 10 uses ago: its loss is 20 / 10 = 2 ms per use. Another needs 300 ms and was last used 100 uses ago: its loss is 3
ms per use. The first one is evicted.

The cache accesses no store and no socket, and does no locking; its owner must hold a lock.
"""

import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from threading import Condition, Thread, get_native_id

import numpy as np
import numpy.typing as npt

from slora_adapters.peft.packing import ByteArray
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import AdapterLayout

AHEAD_BYTES = 512 << 20
# Bytes touched at a time. Touching them takes a few milliseconds, and `close` waits for at most that time.
_STRETCH_BYTES = 4 << 20


class ArenaPrefaulter:
    """Makes the kernel zero the memory of an arena shortly before it is written.

    Linux allocates and zeroes each page of an arena when the page is first touched. Measured on a virtual machine, this
    takes 0.8 s per GB, which is more than reading and hashing the data that is written there. So a thread of the lowest
    priority touches the pages up to AHEAD_BYTES beyond the used part. Later pages take no memory yet.

    The thread reads one byte of each page. In shared memory, a read is enough to make the kernel zero a page. Unlike
    a write, it cannot overwrite the data of a concurrent writer.
    """

    def __init__(self, arena: ByteArray, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._arena = arena
        self._ahead_bytes = ahead_bytes
        self._changed = Condition()
        self._wanted = min(ahead_bytes, len(arena))
        self._closed = False
        self._thread = Thread(target=self._prefault, name="arena-prefault", daemon=True)
        self._thread.start()

    def use(self, end: int) -> None:
        """Reports that the arena is in use up to byte `end`."""
        wanted = min(end + self._ahead_bytes, len(self._arena))
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _prefault(self) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)  # affects this thread only
        done = 0
        while done < len(self._arena):
            with self._changed:
                while not self._closed and self._wanted == done:
                    self._changed.wait()
                if self._closed:
                    return
                end = min(done + _STRETCH_BYTES, self._wanted)
            self._arena[done : end : mmap.PAGESIZE].max()
            done = end


ALIGNMENT_BYTES = mmap.PAGESIZE
# Assumed load speed of an adapter until its load has been measured.
_TYPICAL_BYTES_PER_S = 1e9
# Factor on the loss of a tenant's adapters while the tenant does not exceed its share. The large factor makes the cache
# evict these adapters last.
_SPARED = 1e6
# Losses are seconds per use, stored as integer multiples of 1 / _LOSS_SCALE.
_LOSS_SCALE = float(1 << 60)
# From <linux/fcntl.h>. On some systems the module fcntl defines these names only from Python 3.13 on.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class CachedAdapter:
    """A region of the arena and its content. `scales` and `reload_s` are valid once the region is filled (`ready`).

    reload_s: expected seconds to load the adapter again. last_use: value of the cache's use counter at the last use.
    """

    __slots__ = (
        "discarded",
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

    def __init__(self, version: AdapterVersion, offset: int, layout: AdapterLayout, num_bytes: int) -> None:
        self.version = version
        self.offset = offset
        self.num_bytes = num_bytes
        self.layout = layout
        self.scales: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self.reload_s = self.num_bytes / _TYPICAL_BYTES_PER_S
        self.last_use = 0
        self.num_pins = 1
        self.ready = False
        self.discarded = False

    @property
    def end(self) -> int:
        """Offset at which the next region may begin."""
        return self.offset + _aligned(self.num_bytes)


class HostCache:
    """A cache in an arena of `num_bytes`, rounded up to OS memory pages. descriptor: the memfd of the arena, for other
    processes.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = _aligned(num_bytes)
        self.descriptor = _sealed_memory(self.num_bytes)
        self.memory = map_arena(self.descriptor, self.num_bytes)
        self.num_evictions = 0
        self.num_discards = 0
        self._num_uses = 0
        # The largest offset that any adapter's region has reached.
        self._used_end = 0
        self._entries: dict[AdapterVersion, CachedAdapter] = {}
        # Entries that were discarded while they were still pinned.
        self._discarded: list[CachedAdapter] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return sum(entry.end - entry.offset for entry in self._regions())

    @property
    def contents(self) -> dict[AdapterVersion, int]:
        """The sizes of the filled regions, in bytes of the arena."""
        return {entry.version: entry.end - entry.offset for entry in self._entries.values() if entry.ready}

    def find(self, version: AdapterVersion) -> CachedAdapter | None:
        """Returns the filled copy of a version, pinned for the caller; None if the cache has no such copy."""
        entry = self._entries.get(version)
        if entry is None or not entry.ready:
            return None
        entry.num_pins += 1
        self._use(entry)
        return entry

    def allocate(
        self, version: AdapterVersion, layout: AdapterLayout, num_bytes: int | None = None
    ) -> CachedAdapter | None:
        """Allocates a region for a version that has none, pinned for the caller. The caller fills it and sets `scales`
        and `ready`. num_bytes: size of the region; None: one packed adapter of this layout.

        Evicts unpinned adapters, but only if that makes enough space. Otherwise returns None. Raises ValueError if the
        arena is too small for the adapter.
        """
        num_bytes = layout.num_bytes if num_bytes is None else num_bytes
        if num_bytes > self.num_bytes:
            raise ValueError(
                f"the adapter takes {num_bytes} bytes, but the host cache has only "
                f"{self.num_bytes}: raise host_cache_bytes"
            )
        assert version not in self._entries, f"{version} already has a region"
        region = self._choose_region(version.tenant, _aligned(num_bytes))
        if region is None:
            return None
        for evicted in region.evicted:
            del self._entries[evicted.version]
            self.num_evictions += 1
        entry = CachedAdapter(version, region.offset, layout, num_bytes)
        self._used_end = max(self._used_end, entry.end)
        self._entries[version] = entry
        self._use(entry)
        return entry

    def region(self, entry: CachedAdapter) -> ByteArray:
        return self.memory[entry.offset : entry.offset + entry.num_bytes]

    def pin(self, entry: CachedAdapter) -> None:
        entry.num_pins += 1

    def unpin(self, entry: CachedAdapter) -> None:
        """Releases one pin. The last unpin removes an adapter that was discarded or never filled."""
        assert entry.num_pins > 0, f"{entry.version} is not pinned"
        entry.num_pins -= 1
        if entry.num_pins == 0 and (entry.discarded or not entry.ready):
            self._remove(entry)

    def discard(self, version: AdapterVersion) -> None:
        """Removes a version. `find` then returns None for it, and its region is freed when its last pin is released."""
        entry = self._entries.pop(version, None)
        if entry is None:
            return
        self.num_discards += 1
        entry.discarded = True
        if entry.num_pins:
            self._discarded.append(entry)

    def purge(self, tenant: str) -> None:
        """Discards all versions of a tenant, and overwrites every gap between regions with zeros. The cache does not
        know which tenant's bytes are left in a gap. Memory that was never used is not touched.
        """
        for version in [version for version in self._entries if version.tenant == tenant]:
            self.discard(version)
        position = 0
        for entry in sorted(self._regions(), key=lambda entry: entry.offset):
            self.memory[position : entry.offset] = 0
            position = entry.offset + entry.num_bytes
        self.memory[position : self._used_end] = 0

    def check(self) -> None:
        """Asserts that regions are disjoint and inside the arena, and that regions and gaps together fill the arena."""
        position = gaps = 0
        for entry in sorted(self._regions(), key=lambda entry: entry.offset):
            assert entry.offset % ALIGNMENT_BYTES == 0 and entry.num_bytes > 0, entry.version
            assert entry.offset >= position, f"{entry.version} overlaps the region before it"
            gaps += entry.offset - position
            position = entry.end
        assert position <= self.num_bytes, "a region ends beyond the arena"
        assert gaps + self.num_bytes - position + self.used_bytes == self.num_bytes
        assert all(entry.num_pins and entry.discarded for entry in self._discarded)
        assert not any(entry.discarded for entry in self._entries.values())
        assert all(entry.ready or entry.num_pins for entry in self._entries.values())

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when the last process that maps it ends."""
        os.close(self.descriptor)

    def _regions(self) -> list[CachedAdapter]:
        return [*self._entries.values(), *self._discarded]

    def _remove(self, entry: CachedAdapter) -> None:
        if entry.discarded:
            self._discarded.remove(entry)
        else:
            del self._entries[entry.version]

    def _use(self, entry: CachedAdapter) -> None:
        self._num_uses += 1
        entry.last_use = self._num_uses

    def _choose_region(self, tenant: str, num_bytes: int) -> "_EvictionCandidate | None":
        """Returns the place with the smallest loss; None if every place contains a pinned region.

        A gap has no loss. The smallest sufficient gap is chosen, so that large gaps stay whole. Without a sufficient
        gap, a run of adjacent regions is evicted.
        """
        regions = sorted(self._regions(), key=lambda entry: entry.offset)
        # Prefix sums of the losses give the total loss of adjacent regions by one subtraction. Integers keep the sums
        # exact.
        lost = [0, *accumulate(self._losses(regions, tenant, num_bytes))]
        pins = [0, *accumulate(entry.num_pins for entry in regions)]
        starts = [*(entry.offset for entry in regions), self.num_bytes]
        best: _EvictionCandidate | None = None
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
                best = _EvictionCandidate(cost, offset, regions[first:stop])
        return best

    def _losses(self, regions: list[CachedAdapter], tenant: str, num_bytes: int) -> Iterator[int]:
        """Yields the loss of evicting each region if `tenant` needs another `num_bytes`."""
        held: Counter[str] = Counter({tenant: num_bytes})
        for entry in regions:
            held[entry.version.tenant] += entry.end - entry.offset
        share = self.num_bytes / len(held)
        for entry in regions:
            weight = 1 if held[entry.version.tenant] > share else _SPARED
            idle = self._num_uses + 1 - entry.last_use
            yield 1 + int(_LOSS_SCALE * weight * entry.reload_s / idle)


@dataclass(frozen=True, slots=True)
class _EvictionCandidate:
    """A place where a new region would fit if the regions in `evicted` were evicted."""

    # (total loss of the evicted regions, bytes of the resulting gap). The candidate with the least cost is chosen.
    cost: tuple[int, int]
    offset: int
    evicted: list[CachedAdapter]


def map_arena(descriptor: int, num_bytes: int) -> ByteArray:
    """Maps an arena as a uint8 array. It stays mapped while a reference to the array exists.

    Readers must not write. The mapping is writable only because torch and the GPU driver require writable memory.
    """
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED), np.uint8)


def _sealed_memory(num_bytes: int) -> int:
    """Returns a memfd with a sealed size, so that no process can truncate it while another one reads."""
    descriptor = os.memfd_create("slora-adapters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    return descriptor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
