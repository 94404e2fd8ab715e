"""Copies of adapters on the host that requests wait for: asked for in order of arrival, pinned while they are needed.

The host holds only so many. A load that finds no room there waits a while and then fails, so no more is asked for at a
time than has room beside what is pinned; those who came later are asked for when earlier ones have moved on. What is
fetched ahead, before anybody waits for it, comes behind them all.

Knows the source and who waits, but no pool and no page.
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
    """Invariant: an adapter that somebody waits for is asked for, or another one is asked for or pinned."""

    def __init__(self, source: AdapterSource) -> None:
        self.pace = FetchPace()
        self._source = source
        self._awaiting: dict[AdapterVersion, list[Sequence]] = {}
        self._unasked: list[Sequence] = []  # a heap by arrival; those that have moved on are passed over
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
        """Aside, until its adapter arrives."""
        self._awaiting.setdefault(version, []).append(sequence)
        if version not in self._asked:
            heapq.heappush(self._unasked, sequence)
            self._ask()

    def leave(self, sequence: Sequence, version: AdapterVersion) -> bool:
        """It waits no longer; False if it did not. A fetch goes on: its bytes may serve the next request."""
        group = self._awaiting.get(version, [])
        if sequence not in group:
            return False
        group.remove(sequence)
        if not group:
            del self._awaiting[version]
        return True

    def prefetch(self, version: AdapterVersion) -> None:
        """For nobody who waits yet: asked for if there is room beside what others wait for, else not."""
        if version not in self._asked:
            if not self._has_room():  # as it is while anybody waits to be asked for
                return
            self._asked.add(version)
            self._source.request(version)
        self._ahead.add(version)

    def take_prefetched(self) -> list[Fetched | FetchFailed]:
        """What was fetched ahead and has been collected since the last call. The caller releases each copy."""
        come, self._come_ahead = self._come_ahead, []
        return come

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """What has arrived or failed, with those who waited for it. A copy that nobody retains then is let go."""
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
        """One more sequence will start on it. The copy may go sooner, when another one has brought it to the pool."""
        self._users[version] += 1

    def release(self, version: AdapterVersion) -> None:
        """One has started, or will not; the last one lets the copy go."""
        self._users[version] -= 1
        if self._users[version] == 0:
            del self._users[version]
            self._drop(version)

    def take(self, version: AdapterVersion) -> PackedAdapter:
        """The caller owns the copy from now on, and gives it back when its bytes have been copied."""
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
        """For the adapters of those who have waited longest, as far as there is room."""
        while self._unasked and self._has_room():
            version = heapq.heappop(self._unasked).request.adapter
            if version is not None and version in self._awaiting and version not in self._asked:
                self._asked.add(version)
                self._source.request(version)

    def _has_room(self) -> bool:
        """Half of the host is left to gaps between copies, and to those that are larger than any before."""
        capacity = self._source.capacity_bytes
        if capacity is None or not (self._asked or self._copies):
            return True
        expected = (len(self._asked) + 1) * self._largest_bytes
        return self._largest_bytes > 0 and self._pinned_bytes + expected <= capacity // 2
