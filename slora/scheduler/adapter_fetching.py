"""Fetches the adapters that requests wait for to the host, in order of arrival, and holds the copies while needed.

The host cache is limited, and a fetch that finds no room there fails after a while. So only as many adapters are
fetched at a time as fit into the host cache together with the held copies. The next fetch is requested when an earlier
copy has been loaded or released. Prefetches, which no request waits for, come last.

This module depends on the adapter source and on sequences, but not on the pool or on pages.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator

from slora.scheduler.sequence import Sequence
from slora_adapters.loader.fetch_pace import FetchPace
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion


class AdapterFetching:
    """Invariant: while a sequence waits for an adapter, at least one adapter is being fetched or held."""

    def __init__(self, source: AdapterSource) -> None:
        self.pace = FetchPace()
        self._source = source
        self._waiters: dict[AdapterVersion, list[Sequence]] = {}
        # A heap of sequences whose fetch is not requested yet: background sequences last, then by arrival.
        self._unrequested: list[tuple[bool, Sequence]] = []
        self._requested: set[AdapterVersion] = set()
        self._copies: dict[AdapterVersion, PackedAdapter] = {}
        self._users: dict[AdapterVersion, int] = defaultdict(int)
        self._prefetching: set[AdapterVersion] = set()
        self._prefetched: list[Fetched | FetchFailed] = []
        self._held_bytes = 0
        self._largest_bytes = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(group) for group in self._waiters.values())

    @property
    def is_short_of_room(self) -> bool:
        """Whether an interactive sequence waits because the host cache has no room for its adapter."""
        return bool(self._unrequested) and not self._unrequested[0][0] and not self._has_room()

    def find(self, version: AdapterVersion) -> PackedAdapter | None:
        return self._copies.get(version)

    def add_waiter(self, sequence: Sequence, version: AdapterVersion) -> None:
        """Records that the sequence waits until its adapter is fetched."""
        self._waiters.setdefault(version, []).append(sequence)
        if version not in self._requested:
            heapq.heappush(self._unrequested, (sequence.is_background, sequence))
            self._request_fetches()

    def remove_waiter(self, sequence: Sequence, version: AdapterVersion) -> bool:
        """Ends the wait of a sequence.

        Returns False if it was not waiting. The fetch continues, because the next request may use it.
        """
        group = self._waiters.get(version, [])
        if sequence not in group:
            return False
        group.remove(sequence)
        if not group:
            del self._waiters[version]
        return True

    def prefetch(self, version: AdapterVersion) -> None:
        """Fetches an adapter that no request waits for, if the adapters that requests wait for leave room for it."""
        if version not in self._requested:
            # There is no room while the fetch of a waiting sequence is still to be requested.
            if not self._has_room():
                return
            self._requested.add(version)
            self._source.request(version)
        self._prefetching.add(version)

    def pop_prefetched(self) -> list[Fetched | FetchFailed]:
        """The prefetches that ended since the last call. The caller releases each copy."""
        prefetched, self._prefetched = self._prefetched, []
        return prefetched

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """The fetches that ended, each with the sequences that waited for it.

        After each item, the copy is released unless the caller has retained it.
        """
        for fetch in self._source.poll():
            self._requested.discard(fetch.version)
            if isinstance(fetch, Fetched):
                num_bytes = fetch.packed.layout.num_bytes
                self.pace.count(num_bytes, fetch.seconds)
                self._copies[fetch.version] = fetch.packed
                self._held_bytes += num_bytes
                self._largest_bytes = max(self._largest_bytes, num_bytes)
            if fetch.version in self._prefetching:
                self._prefetching.remove(fetch.version)
                self._prefetched.append(fetch)
                if isinstance(fetch, Fetched):
                    self.retain(fetch.version)
            yield fetch, self._waiters.pop(fetch.version, [])
            if fetch.version not in self._users:
                self._release_unused(fetch.version)
        self._request_fetches()

    def retain(self, version: AdapterVersion) -> None:
        """Counts one more sequence that will run on the adapter. The copy is kept until `release`.

        A load may take the copy before that; see `take_copy`.
        """
        self._users[version] += 1

    def release(self, version: AdapterVersion) -> None:
        """Called when a retained sequence is admitted or ends. The last such call releases the copy."""
        self._users[version] -= 1
        if self._users[version] == 0:
            del self._users[version]
            self._release_unused(version)

    def take_copy(self, version: AdapterVersion) -> PackedAdapter:
        """Transfers a copy to the caller, which calls `release_taken` after the bytes are copied."""
        packed = self._copies.pop(version)
        self._held_bytes -= packed.layout.num_bytes
        self._request_fetches()
        return packed

    def release_taken(self, version: AdapterVersion) -> None:
        self._source.release(version)

    def remove(self, version: AdapterVersion) -> None:
        self._source.discard(version)

    def purge(self, tenant: str) -> None:
        self._source.purge(tenant)

    def check_invariants(self) -> None:
        assert set(self._copies) <= {v for v, n in self._users.items() if n}, (
            "a host copy is held without a user"
        )
        assert self._held_bytes == sum(packed.layout.num_bytes for packed in self._copies.values())
        assert not self._waiters or self._requested or self._copies, (
            "sequences wait, and no fetch is requested"
        )

    def _release_unused(self, version: AdapterVersion) -> None:
        if version in self._copies:
            self.take_copy(version)
            self._source.release(version)

    def _request_fetches(self) -> None:
        """Requests fetches for the sequences that have waited longest, as long as there is room."""
        while self._unrequested and self._has_room():
            version = heapq.heappop(self._unrequested)[1].request.adapter
            if version is not None and version in self._waiters and version not in self._requested:
                self._requested.add(version)
                self._source.request(version)

    def _has_room(self) -> bool:
        """Whether the host cache has room for one more fetch.

        Half of the cache is left free for gaps between copies, and for adapters that are larger than any before.
        """
        capacity = self._source.capacity_bytes
        if capacity is None or not (self._requested or self._copies):
            return True
        expected = (len(self._requested) + 1) * self._largest_bytes
        return self._largest_bytes > 0 and self._held_bytes + expected <= capacity // 2
