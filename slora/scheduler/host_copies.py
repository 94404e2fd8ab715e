"""Host copies of the adapters that requests wait for. They are fetched in order of arrival, and held while needed.

The host cache is limited, and a fetch that finds no room there fails after a while. So only as many adapters are
fetched at a time as fit beside the held copies. The next fetch is requested when an earlier copy has been loaded or
released. Prefetches, which no request waits for, come last.

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


class HostCopies:
    """Invariant: while a sequence waits for an adapter, at least one adapter is being fetched or held."""

    def __init__(self, source: AdapterSource) -> None:
        self.pace = FetchPace()
        self._source = source
        self._awaiting: dict[AdapterVersion, list[Sequence]] = {}
        self._unasked: list[Sequence] = []  # a heap by arrival of sequences whose fetch is not requested yet
        self._asked: set[AdapterVersion] = set()
        self._copies: dict[AdapterVersion, PackedAdapter] = {}
        self._users: dict[AdapterVersion, int] = defaultdict(int)
        self._ahead: set[AdapterVersion] = set()
        self._come_ahead: list[Fetched | FetchFailed] = []
        self._pinned_bytes = 0
        self._largest_bytes = 0

    @property
    def num_awaiting(self) -> int:
        return sum(len(group) for group in self._awaiting.values())

    def find(self, version: AdapterVersion) -> PackedAdapter | None:
        return self._copies.get(version)

    def wait(self, sequence: Sequence, version: AdapterVersion) -> None:
        """Puts the sequence aside until its adapter is fetched."""
        self._awaiting.setdefault(version, []).append(sequence)
        if version not in self._asked:
            heapq.heappush(self._unasked, sequence)
            self._ask()

    def leave(self, sequence: Sequence, version: AdapterVersion) -> bool:
        """Ends the wait of a sequence.

        Returns False if it was not waiting. The fetch continues, because the next request may use it.
        """
        group = self._awaiting.get(version, [])
        if sequence not in group:
            return False
        group.remove(sequence)
        if not group:
            del self._awaiting[version]
        return True

    def prefetch(self, version: AdapterVersion) -> None:
        """Fetches an adapter that no request waits for, if there is room beside the adapters that requests wait for."""
        if version not in self._asked:
            # There is no room while the fetch of a waiting sequence is still to be requested.
            if not self._has_room():
                return
            self._asked.add(version)
            self._source.request(version)
        self._ahead.add(version)

    def take_prefetched(self) -> list[Fetched | FetchFailed]:
        """The prefetches that ended since the last call. The caller releases each copy."""
        come, self._come_ahead = self._come_ahead, []
        return come

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """The fetches that ended, each with the sequences that waited for it.

        After each item, the copy is released unless the caller has retained it.
        """
        for fetch in self._source.poll():
            self._asked.discard(fetch.version)
            if isinstance(fetch, Fetched):
                num_bytes = fetch.packed.layout.num_bytes
                self.pace.count(num_bytes, fetch.seconds)
                self._copies[fetch.version] = fetch.packed
                self._pinned_bytes += num_bytes
                self._largest_bytes = max(self._largest_bytes, num_bytes)
            if fetch.version in self._ahead:
                self._ahead.remove(fetch.version)
                self._come_ahead.append(fetch)
                if isinstance(fetch, Fetched):
                    self.retain(fetch.version)
            yield fetch, self._awaiting.pop(fetch.version, [])
            if fetch.version not in self._users:
                self._drop(fetch.version)
        self._ask()

    def retain(self, version: AdapterVersion) -> None:
        """Counts one more sequence that will run on the adapter.

        The copy is released earlier if a load has moved the adapter to the pool.
        """
        self._users[version] += 1

    def release(self, version: AdapterVersion) -> None:
        """Counts one sequence less: it was admitted or ended. The last call releases the copy."""
        self._users[version] -= 1
        if self._users[version] == 0:
            del self._users[version]
            self._drop(version)

    def take(self, version: AdapterVersion) -> PackedAdapter:
        """Transfers a copy to the caller, which calls `give_back` after the bytes are copied."""
        packed = self._copies.pop(version)
        self._pinned_bytes -= packed.layout.num_bytes
        self._ask()
        return packed

    def give_back(self, version: AdapterVersion) -> None:
        self._source.release(version)

    def forget(self, version: AdapterVersion) -> None:
        self._source.forget(version)

    def check(self) -> None:
        assert set(self._copies) <= {v for v, n in self._users.items() if n}, "a host copy is pinned in vain"
        assert self._pinned_bytes == sum(packed.layout.num_bytes for packed in self._copies.values())
        assert not self._awaiting or self._asked or self._copies, "nothing is asked for, and somebody waits"

    def _drop(self, version: AdapterVersion) -> None:
        if version in self._copies:
            self.take(version)
            self._source.release(version)

    def _ask(self) -> None:
        """Requests fetches for the sequences that have waited longest, as long as there is room."""
        while self._unasked and self._has_room():
            version = heapq.heappop(self._unasked).request.adapter
            if version is not None and version in self._awaiting and version not in self._asked:
                self._asked.add(version)
                self._source.request(version)

    def _has_room(self) -> bool:
        """Whether the host cache has room for one more fetch.

        Half of it is left for gaps between copies, and for adapters that are larger than any before.
        """
        capacity = self._source.capacity_bytes
        if capacity is None or not (self._asked or self._copies):
            return True
        expected = (len(self._asked) + 1) * self._largest_bytes
        return self._largest_bytes > 0 and self._pinned_bytes + expected <= capacity // 2
