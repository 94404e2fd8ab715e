"""Chooses a replica for each request, so that most requests find their adapter in the page pool."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slora.core.engine_state import ANSWER_TOKENS, Backlog
from slora.core.messages import Report, VersionChanges
from slora.core.request import EngineRequest
from slora_adapters.version import AdapterVersion

UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]


def hash_key(*parts: bytes) -> int:
    """Returns 64 bits that are the same in every process, unlike `hash`."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def hash_names(names: Iterable[str]) -> UInt64Array:
    return np.fromiter((hash_key(name.encode()) for name in names), np.uint64)


def rank_names(key: int, name_hashes: UInt64Array, most: int) -> IntArray:
    """Returns the positions of the first `most` names in the key's order.

    Rendezvous hashing: each key has its own order of the replicas. When a replica leaves, the order of all other
    replicas stays the same. So only keys with their home on this replica get another home, and routers agree on homes
    without communicating.
    """
    scores = _mix(name_hashes ^ np.uint64(key))
    if most < len(scores):
        first = np.argpartition(scores, most - 1)[:most]
        return first[np.argsort(scores[first], kind="stable")]
    return np.argsort(scores, kind="stable")


def _mix(values: UInt64Array) -> UInt64Array:
    """The finalizer of SplitMix64: changing one bit of the input changes about half of the bits of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TrafficShare:
    """The share of each adapter in the recent tokens, without a clock.

    It counts tokens in two windows of `window` requests each. The old window counts less as the new window fills. At
    most 2 * window adapters are remembered.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._num_requests = 0
        self._new: dict[AdapterVersion, int] = {}
        self._old: dict[AdapterVersion, int] = {}
        self._new_total = self._old_total = 0

    def add(self, version: AdapterVersion, tokens: int) -> None:
        if self._num_requests >= self.window:
            self._old, self._old_total = self._new, self._new_total
            self._new, self._new_total, self._num_requests = {}, 0, 0
        self._num_requests += 1
        self._new[version] = self._new.get(version, 0) + tokens
        self._new_total += tokens

    def __len__(self) -> int:
        """The adapters that are remembered."""
        return len(self._new.keys() | self._old.keys())

    def share(self, version: AdapterVersion) -> float:
        """Returns the adapter's share of the recent tokens, from 0 to 1.

        Worked example: windows of 100 requests, one token each. The old window is full and has 40 tokens of this
        adapter. The new window has 50 tokens, 10 of them of this adapter. The share is
        (10 + 40 * 0.5) / (50 + 100 * 0.5) = 0.3.
        """
        weight = max(0.0, 1 - self._num_requests / self.window)
        total = self._new_total + weight * self._old_total
        return (self._new.get(version, 0) + weight * self._old.get(version, 0)) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a router knows of one replica: its last report, which may be stale."""

    name: str
    resident: Set[AdapterVersion]  # Adapters in the page pool.
    on_host: Set[AdapterVersion]  # Adapters in the host cache.
    num_waiting: int
    num_running: int
    load: float  # Estimated seconds of work of all requests that wait or run on the replica.
    is_serving: bool = True  # False while the replica starts, drains or is lost.


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """The properties of a request that routing depends on."""

    tenant: str
    versions: tuple[AdapterVersion, ...]  # All adapters that the request combines; empty for the base model.
    # Identifies tenant, adapter and the first block of the prompt. None: no prefix affinity.
    prefix_key: bytes | None
    tokens: int  # Prompt tokens and the expected number of output tokens.


# A choice looks at up to 8 homes and the next 4 replicas in the rendezvous order of the adapter. Further requests for a
# very hot adapter look at its other homes. In a fleet of at most 16 replicas, a choice looks at all of them.
NUM_HOMES, NUM_SPARES, NUM_SMALL_FLEET = 8, 4, 16
# A window of 64 requests per replica is large enough to measure traffic of less than one replica.
WINDOW_REQUESTS, MIN_WINDOW_REQUESTS = 64, 1024
# Computing an order takes about 30 microseconds with 1,000 replicas. 65,536 orders take about 30 MiB.
MAX_ORDERS = 65_536


@dataclass(frozen=True, slots=True)
class Penalties:
    """The seconds that are added to a replica's load if it does not have the adapter or the prefix of a request.

    The request goes to the replica with the least sum. So a replica is never chosen if its load is more than
    `stranger_s + prefix_s` above the least load.
    """

    # The adapter is neither in the pool nor in the host cache. The replica is one of the adapter's homes, comes next
    # after its homes, or is any other replica.
    home_s: float = 0.5
    spare_s: float = 2.0
    stranger_s: float = 4.0
    # The share of these penalties if the adapter is in the host cache. Homes are still preferred, because several
    # replicas may have one host cache.
    host_share: float = 0.2
    prefix_s: float = 0.25  # The replica is not the first candidate for the request's prefix.


DEFAULT_PENALTIES = Penalties()


class Router:
    """Places requests by the residency of adapters, their homes and the load of replicas.

    Each adapter has homes: the first replicas of its rendezvous order. The number of homes grows with the adapter's
    share of the recent tokens. A cold adapter is loaded by one home, and a hot adapter by several homes. Routers with
    the same replicas agree on homes.

    The choice depends only on the sequence of calls. There is no clock and no I/O.

    token_s: estimated seconds of work per token. It is applied to requests that this router has placed since the last
        ReplicaState of their replica. 0: the caller adds them to `load`.
    homes_per_replica_of_traffic: number of homes that an adapter gets, beside its first home, for as much traffic as
        one replica serves on average.
    """

    def __init__(
        self,
        *,
        penalties: Penalties = DEFAULT_PENALTIES,
        token_s: float = 0.0,
        homes_per_replica_of_traffic: float = 2.0,
    ) -> None:
        self._penalties = penalties
        self._token_s = token_s
        self._growth = homes_per_replica_of_traffic
        self._traffic = TrafficShare(MIN_WINDOW_REQUESTS)
        self._turns = itertools.count()
        self._replicas: Sequence[ReplicaState] = ()
        self._serving: list[ReplicaState] = []
        self._names: list[str] = []
        self._hashes: UInt64Array = hash_names(())
        self._loads: npt.NDArray[np.float64] = np.zeros(0)
        self._sent: dict[str, tuple[ReplicaState, float]] = {}
        self._orders: dict[AdapterVersion, list[int]] = {}

    def choose(self, work: RoutedWork, replicas: Sequence[ReplicaState]) -> list[str]:
        """Returns the names of the best replicas, best first; empty if none serves.

        All serving replicas are returned if there are at most 16 of them. The first counts as chosen. A tuple that was
        passed before is not read again, so a large fleet should pass the same tuple until a replica reports.
        """
        if replicas is not self._replicas or not isinstance(replicas, tuple):
            self._read(replicas)
        if not self._serving:
            return []
        ranked = sorted(self._rate_candidates(work, self._count_homes(work)))
        self._place(ranked[0][-1], work.tokens)
        return [self._names[index] for *_, index in ranked]

    def _read(self, replicas: Sequence[ReplicaState]) -> None:
        self._replicas = replicas
        self._serving = [replica for replica in replicas if replica.is_serving]
        names = [replica.name for replica in self._serving]
        if names != self._names:
            self._names, self._hashes = names, hash_names(names)
            self._orders.clear()
            self._traffic.window = max(MIN_WINDOW_REQUESTS, WINDOW_REQUESTS * len(names))
        self._loads = np.array([replica.load for replica in self._serving])
        kept: dict[str, tuple[ReplicaState, float]] = {}
        if self._sent:
            for index, replica in enumerate(self._serving):
                state, seconds = self._sent.get(replica.name, (None, 0.0))
                if state is replica:
                    kept[replica.name] = state, seconds
                    self._loads[index] += seconds
        self._sent = kept

    def _place(self, index: int, tokens: int) -> None:
        if self._token_s == 0:
            return
        seconds, replica = tokens * self._token_s, self._serving[index]
        self._loads[index] += seconds
        self._sent[replica.name] = replica, self._sent.get(replica.name, (replica, 0.0))[1] + seconds

    def _count_homes(self, work: RoutedWork) -> int:
        """Counts the tokens of the request, and returns the number of homes of its first adapter.

        All replicas are homes of the base model.
        """
        if not work.versions:
            return len(self._serving)
        self._traffic.add(work.versions[0], work.tokens)
        replicas_of_traffic = self._traffic.share(work.versions[0]) * len(self._serving)
        return min(len(self._serving), 1 + int(self._growth * replicas_of_traffic))

    def _rate_candidates(self, work: RoutedWork, num_homes: int) -> list[tuple[float, int, int, int]]:
        """Returns (seconds, requests, place among the candidates, index) of each candidate."""
        penalties, is_small = self._penalties, len(self._serving) <= NUM_SMALL_FLEET
        order = self._find_order(work, num_homes + NUM_SPARES)
        homes = self._select_homes(work, order[:num_homes])
        others = range(len(self._serving)) if is_small else [int(self._loads.argmin())]
        rated: dict[int, tuple[float, int, int, int]] = {}
        for indexes, cold_s in (
            (homes, penalties.home_s),
            (order[num_homes : num_homes + NUM_SPARES], penalties.spare_s),
            (others, penalties.stranger_s),
        ):
            for index in indexes:
                if index in rated:
                    continue
                replica = self._serving[index]
                seconds = float(self._loads[index]) + self._fetch_s(replica, work.versions, cold_s)
                if rated and work.prefix_key is not None:
                    seconds += penalties.prefix_s
                rated[index] = seconds, replica.num_waiting + replica.num_running, len(rated), index
        return list(rated.values())

    def _find_order(self, work: RoutedWork, most: int) -> Sequence[int]:
        """Returns at least the first `most` indexes of the rendezvous order of the first adapter."""
        if not work.versions:
            return range(len(self._serving))
        version = work.versions[0]
        order = self._orders.get(version)
        if order is None or len(order) < min(most, len(self._serving)):
            if order is None and len(self._orders) >= MAX_ORDERS:
                del self._orders[next(iter(self._orders))]
            key = hash_key(version.tenant.encode(), version.digest.encode())
            # Twice as many as needed now: the number of homes may grow soon.
            order = rank_names(key, self._hashes, 2 * most).tolist()
            self._orders[version] = order
        return order

    def _select_homes(self, work: RoutedWork, homes: Sequence[int]) -> Sequence[int]:
        """Returns at most NUM_HOMES homes: with a prefix the same at each call, otherwise the next homes in turn."""
        if work.prefix_key is not None and len(homes) > 1:
            hashes = self._hashes if isinstance(homes, range) else self._hashes[homes]
            first = rank_names(hash_key(work.prefix_key), hashes, NUM_HOMES)
            return [homes[position] for position in first.tolist()]
        if len(homes) > NUM_HOMES:
            turn = next(self._turns) * NUM_HOMES
            return [homes[(turn + i) % len(homes)] for i in range(NUM_HOMES)]
        return homes

    def _fetch_s(self, replica: ReplicaState, versions: tuple[AdapterVersion, ...], cold_s: float) -> float:
        """Returns the greatest penalty of the missing adapters. Penalties are not summed: loads run in parallel."""
        seconds = 0.0
        for version in versions:
            if version not in replica.resident:
                share = self._penalties.host_share if version in replica.on_host else 1.0
                seconds = max(seconds, share * cold_s)
        return seconds


def count_answer_tokens(request: EngineRequest) -> int:
    """Returns the expected number of tokens of the answers."""
    if request.pooling is not None:
        return 0
    return request.sampling.width * min(request.sampling.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS)


class _Sent(NamedTuple):
    """A request that the last report does not include. seconds: its estimated work."""

    versions: tuple[AdapterVersion, ...]
    seconds: float


class ReportedState:
    """What an API process knows of an engine: its last report, and what this process has sent since.

    The report says how many of this process's requests the engine had taken by then. So each request counts once: as
    sent, or as part of the report.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything, because the engine was lost."""
        self.backlog = Backlog()
        self._resident: set[AdapterVersion] = set()
        self._on_host: set[AdapterVersion] = set()
        # The resident adapters, and those of the requests in `_sent`.
        self._expected: set[AdapterVersion] = set()
        self._num_taken = 0
        self._sent: deque[_Sent] = deque()
        self._sent_s = 0.0

    def add_sent(self, request: EngineRequest) -> None:
        """Adds a request that has been sent to the engine."""
        backlog = self.backlog
        seconds = len(request.prompt_token_ids) * backlog.prompt_token_s
        seconds += count_answer_tokens(request) * backlog.answer_token_s
        self._sent.append(_Sent(request.versions, seconds))
        self._sent_s += seconds
        self._expected.update(request.versions)

    def receive(self, report: Report) -> None:
        """Takes in a report of the engine."""
        self.backlog = report.backlog
        _apply(report.resident, self._resident)
        _apply(report.on_host, self._on_host)
        for _ in range(report.num_taken - self._num_taken):
            self._sent.popleft()
        self._num_taken = report.num_taken
        self._sent_s = sum(request.seconds for request in self._sent)
        self._expected = self._resident.union(*(request.versions for request in self._sent))

    def describe(self, name: str) -> ReplicaState:
        """Returns the state for the router. The sets are not copied, so they change with the next request."""
        backlog = self.backlog
        return ReplicaState(
            name,
            self._expected,
            self._on_host,
            backlog.num_waiting + len(self._sent),
            backlog.num_running,
            backlog.load_s + self._sent_s,
        )


def _apply(changes: VersionChanges, versions: set[AdapterVersion]) -> None:
    versions -= changes.removed
    versions |= changes.added
