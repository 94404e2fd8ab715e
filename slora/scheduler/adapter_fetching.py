"""Fetches adapters to the host for waiting requests, and holds the copies while needed.

Tenants take turns (start-time fair queueing, SIGCOMM'96), and the requests of a tenant are in order of arrival. So the
number of a tenant's requests does not delay the fetches of other tenants.

The host cache is limited, and a fetch that finds no room there fails after a while. So only as many adapters are
fetched at a time as fit into the host cache together with the held copies. The next fetch is requested when an earlier
copy has been loaded or released. Prefetches, which no request waits for, come last.

The adapters of a composed request are requested together, and only then does the request hold copies of them. Otherwise
two requests could each hold one adapter, find no room for their other adapter, and wait for each other forever.

This module depends on the adapter source and on sequences, but not on the pool or on pages.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Set

from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence
from slora_adapters.loader.source import AdapterSource, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion


class AdapterFetching:
    """Fetches adapters to the host for the sequences that wait for them.

    Invariant: while a sequence waits for an adapter, at least one adapter is being fetched or held.

    A waiting sequence is pending until its fetches are requested.

    outcomes: number of ended fetches by outcome: `fetched`, or the code of the failure.
    """

    def __init__(self, source: AdapterSource) -> None:
        self.outcomes: Counter[str] = Counter(fetched=0, not_found=0, unavailable=0, corrupt=0)
        self._source = source
        self._missing: dict[Sequence, set[AdapterVersion]] = {}
        self._waiters: dict[AdapterVersion, list[Sequence]] = {}
        self._retaining: set[Sequence] = set()
        # A heap of sequences with their turns, with background sequences last. Sequences that have ended stay in it.
        self._pending: list[tuple[bool, int, Sequence]] = []
        self._turn = 0  # The turn of the last sequence that was taken from the heap.
        self._next_turns: dict[TenantAccount, int] = {}
        self._requested: set[AdapterVersion] = set()
        self._copies: dict[AdapterVersion, PackedAdapter] = {}
        self._users: dict[AdapterVersion, int] = defaultdict(int)
        self._prefetching: set[AdapterVersion] = set()
        self._prefetched: list[Fetched | FetchFailed] = []
        self._held_bytes = 0
        self._largest_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._missing)

    @property
    def waited_for(self) -> Set[AdapterVersion]:
        return self._waiters.keys()

    @property
    def is_short_of_room(self) -> bool:
        """Whether an interactive sequence waits because the host cache has no room for its adapter."""
        if not self._pending or self._pending[0][0]:
            return False
        to_request = self._find_unrequested(self._pending[0][-1])
        return bool(to_request) and not self._has_room(len(to_request))

    @property
    def has_copies(self) -> bool:
        """Whether the host has a copy of an adapter that no load has taken."""
        return bool(self._copies)

    def find(self, version: AdapterVersion) -> PackedAdapter | None:
        return self._copies.get(version)

    def add_waiter(self, sequence: Sequence, missing: Iterable[AdapterVersion]) -> None:
        """Records that the sequence waits until its adapters in `missing` are fetched."""
        self._missing[sequence] = set(missing)
        for version in missing:
            self._waiters.setdefault(version, []).append(sequence)
        turn = max(self._turn, self._next_turns.get(sequence.tenant, 0))
        self._next_turns[sequence.tenant] = turn + 1
        heapq.heappush(self._pending, (sequence.is_background, turn, sequence))
        self._request_fetches()

    def remove_waiter(self, sequence: Sequence) -> None:
        """Ends the wait of a sequence. A no-op if it is not waiting.

        The sequence keeps the copies that it has retained. The fetches continue, because the next request may need
        the same adapters.
        """
        for version in self._missing.pop(sequence, set()):
            self._remove_from_group(sequence, version)

    def has_fetched_all(self, sequence: Sequence) -> bool:
        """Whether every adapter that the waiting sequence was missing has been fetched."""
        return not self._missing[sequence]

    def prefetch(self, version: AdapterVersion) -> None:
        """Fetches an adapter that no request waits for, if there is room beside the adapters that requests wait for."""
        if version not in self._requested:
            # There is no room while the fetch of a waiting sequence is still to be requested.
            if not self._has_room():
                return
            self._requested.add(version)
            self._source.request(version)
        self._prefetching.add(version)

    def pop_prefetched(self) -> list[Fetched | FetchFailed]:
        """Returns the prefetches that ended since the last call. The caller releases their copies in the host cache."""
        prefetched, self._prefetched = self._prefetched, []
        return prefetched

    def collect(self) -> Iterator[tuple[Fetched | FetchFailed, list[Sequence]]]:
        """Yields the fetches that ended, each with the sequences that waited for it.

        After each item, the copy is released unless the caller has retained it.
        """
        for fetch in self._source.poll():
            self._requested.discard(fetch.version)
            self.outcomes["fetched" if isinstance(fetch, Fetched) else fetch.code] += 1
            if isinstance(fetch, Fetched):
                num_bytes = fetch.packed.num_bytes
                self._copies[fetch.version] = fetch.packed
                self._held_bytes += num_bytes
                self._largest_bytes = max(self._largest_bytes, num_bytes)
            if fetch.version in self._prefetching:
                self._prefetching.remove(fetch.version)
                self._prefetched.append(fetch)
                if isinstance(fetch, Fetched):
                    self.retain_version(fetch.version)
            waiters = self._waiters.get(fetch.version, []).copy()
            for sequence in waiters:
                # A pending sequence holds no copy, so it may have to fetch this adapter again.
                if sequence in self._retaining:
                    self._missing[sequence].remove(fetch.version)
                    self._remove_from_group(sequence, fetch.version)
            yield fetch, waiters
            if fetch.version not in self._users:
                self._release_unused(fetch.version)
        self._request_fetches()

    def retain(self, sequence: Sequence) -> None:
        """Keeps the copies of the sequence's adapters until `release`. Does nothing if it already keeps them.

        A load may take over a copy earlier; see `take_copy`.
        """
        if sequence not in self._retaining:
            self._retaining.add(sequence)
            for version in sequence.request.versions:
                self.retain_version(version)

    def release(self, sequence: Sequence) -> None:
        """Called when a sequence is admitted or ends. Releases the copies that no other sequence keeps."""
        if sequence in self._retaining:
            self._retaining.remove(sequence)
            for version in sequence.request.versions:
                self.release_version(version)

    def retain_version(self, version: AdapterVersion) -> None:
        """Counts one more user of the adapter's copy. The copy is kept until each user has called `release_version`."""
        self._users[version] += 1

    def release_version(self, version: AdapterVersion) -> None:
        self._users[version] -= 1
        if self._users[version] == 0:
            del self._users[version]
            self._release_unused(version)

    def take_copy(self, version: AdapterVersion) -> PackedAdapter:
        """Transfers a copy to the caller, which calls `release_taken` after the bytes are copied."""
        packed = self._copies.pop(version)
        self._held_bytes -= packed.num_bytes
        self._request_fetches()
        return packed

    def release_taken(self, version: AdapterVersion) -> None:
        self._source.release(version)

    def remove(self, version: AdapterVersion) -> None:
        self._source.discard(version)

    def purge(self, tenant: str) -> None:
        self._source.purge(tenant)

    def check_invariants(self, waiting: Collection[Sequence]) -> None:
        """Asserts that the held copies and the waits are consistent. waiting: all waiting sequences."""
        assert self._retaining <= set(waiting), "a sequence that does not wait keeps copies"
        assert set(self._copies) <= {v for v, n in self._users.items() if n}, (
            "a host copy is held without a user"
        )
        assert self._held_bytes == sum(packed.num_bytes for packed in self._copies.values())
        assert not self._missing or self._requested or self._copies, (
            "sequences wait, and no fetch is requested"
        )
        for sequence, missing in self._missing.items():
            assert missing, "a sequence waits although its adapters are on the host"
            assert all(sequence in self._waiters[version] for version in missing)
            assert sequence not in self._retaining or missing <= self._requested, (
                "a sequence holds copies and waits for an adapter that is not being fetched"
            )
        assert sum(map(len, self._waiters.values())) == sum(map(len, self._missing.values()))

    def _release_unused(self, version: AdapterVersion) -> None:
        if version in self._copies:
            self.take_copy(version)
            self._source.release(version)

    def _request_fetches(self) -> None:
        """Requests fetches for the next sequences, as long as there is room."""
        while self._pending:
            _, turn, sequence = self._pending[0]
            to_request = self._find_unrequested(sequence)
            if to_request and not self._has_room(len(to_request)):
                return
            heapq.heappop(self._pending)
            self._turn = max(self._turn, turn)
            missing = self._missing.get(sequence)
            if missing is not None:
                self.retain(sequence)
                for version in missing & self._copies.keys():
                    missing.remove(version)
                    self._remove_from_group(sequence, version)
            for version in to_request:
                self._requested.add(version)
                self._source.request(version)
        self._turn = 0
        self._next_turns.clear()

    def _find_unrequested(self, sequence: Sequence) -> list[AdapterVersion]:
        """Returns the missing adapters of a pending sequence that are not on the host and have not been requested."""
        missing = self._missing.get(sequence, set())
        return sorted(missing - self._requested - self._copies.keys(), key=_digest)

    def _remove_from_group(self, sequence: Sequence, version: AdapterVersion) -> None:
        group = self._waiters[version]
        group.remove(sequence)
        if not group:
            del self._waiters[version]

    def _has_room(self, count: int = 1) -> bool:
        """Whether the host cache has room for `count` more fetches.

        Half of the cache is kept free for gaps between copies, and for adapters that are larger than all earlier ones.
        """
        capacity = self._source.capacity_bytes
        if capacity is None or not (self._requested or self._copies):
            return True
        expected = (len(self._requested) + count) * self._largest_bytes
        return self._largest_bytes > 0 and self._held_bytes + expected <= capacity // 2


def _digest(version: AdapterVersion) -> str:
    return version.digest
