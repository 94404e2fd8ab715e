"""Other policies than slora's router, for `bench.fleet`. All see the same reports, and count what they placed since.

Each follows the description of its project, in a few lines: which replica it prefers, not how it is built.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.simulation.fleet.model_adapters import ModelAdapters
from bench.simulation.fleet.replica_model import ReplicaModel
from bench.simulation.lengths import FloatArray, IntArray
from slora.client.router import ReplicaState, RoutedWork, hash_key, hash_names, rank_names


class _Reported:
    """What the policies share: serving replicas, their loads in seconds, and a random generator."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.random = np.random.default_rng(1)
        self.loads: FloatArray = np.zeros(0)
        self.serving: IntArray = np.zeros(0, np.int64)

    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        self.loads = np.array([state.load for state in states])
        self.serving = np.array([i for i, state in enumerate(states) if state.is_serving])

    def place(self, index: int, work: RoutedWork) -> int:
        self.loads[index] += work.tokens * self.token_s
        return index

    def pick_two(self, indexes: Sequence[int] | IntArray) -> int:
        """Returns the less loaded of two random ones."""
        one, two = (int(indexes[i]) for i in (self.random.random(2) * len(indexes)).astype(int))
        return one if self.loads[one] <= self.loads[two] else two


class RandomChoice(_Reported):
    def choose(self, work: RoutedWork, adapter: int) -> int:
        return int(self.serving[int(self.random.random() * len(self.serving))])


class PowerOfTwo(_Reported):
    def choose(self, work: RoutedWork, adapter: int) -> int:
        return self.place(self.pick_two(self.serving), work)


class PlainAffinity(_Reported):
    """The first replica of the rendezvous order, at any load."""

    def __init__(self, token_s: float) -> None:
        super().__init__(token_s)
        self._hashes = hash_names(())
        self._homes: dict[int, int] = {}
        self._known: bytes = b""

    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        super().publish(states, models)
        if self.serving.tobytes() != self._known:
            self._known = self.serving.tobytes()
            self._hashes = hash_names(states[i].name for i in self.serving)
            self._homes.clear()

    def choose(self, work: RoutedWork, adapter: int) -> int:
        home = self._homes.get(adapter)
        if home is None:
            key = hash_key(work.versions[0].digest.encode())
            home = self._homes[adapter] = int(self.serving[rank_names(key, self._hashes, 1)[0]])
        return home


class ScoredAffinity(_Reported):
    """llm-d's scorers for queues, KV use and LoRA affinity, each with weight 1; the highest sum wins.

    LoRA affinity is 1 where the adapter runs, 0.8 where there is room for another, and 0 where there is none. vLLM's
    metric names running adapters only, so idle ones that are still in memory don't count.
    """

    def __init__(self, token_s: float, max_adapters: int = 32) -> None:
        super().__init__(token_s)
        self._max_adapters = max_adapters
        self._scores: FloatArray = np.zeros(0)
        self._active: dict[int, list[int]] = {}
        self._tokens = 14_500.0

    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        super().publish(states, models)
        waiting = np.array([state.num_waiting for state in states], float)
        spread = waiting.max() - waiting.min()
        queue = (waiting.max() - waiting) / spread if spread else np.ones(len(states))
        room = np.array([0.8 if len(model.adapters.active) < self._max_adapters else 0.0 for model in models])
        self._scores = queue + 1 - np.array([model.pool_use for model in models]) + room
        self._scores[[i for i, state in enumerate(states) if not state.is_serving]] = -np.inf
        active: dict[int, list[int]] = defaultdict(list)
        for index, model in enumerate(models):
            for adapter in model.adapters.active:
                active[adapter].append(index)
        self._active = active

    def choose(self, work: RoutedWork, adapter: int) -> int:
        best = int(self._scores.argmax())
        holders = self._active.get(adapter)
        if holders:
            holder = max(holders, key=self._scores.__getitem__)
            if self._scores[holder] + 0.2 > self._scores[best]:
                best = holder
        self._scores[best] -= work.tokens / self._tokens
        return best


class Multiplexing(_Reported):
    """Ray Serve's: two choices among the replicas that hold the adapter, unless they are busy; then among those with
    the fewest adapters.
    """

    def __init__(self, token_s: float, max_requests: int = 32) -> None:
        super().__init__(token_s)
        self._max_requests = max_requests
        self._requests: IntArray = np.zeros(0, np.int64)
        self._holders: dict[int, list[int]] = {}
        self._fewest: IntArray = np.zeros(0, np.int64)

    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        super().publish(states, models)
        self._requests = np.array([state.num_waiting + state.num_running for state in states])
        counts = np.array([len(model.adapters.uses) for model in models])
        self._fewest = self.serving[counts[self.serving] <= np.percentile(counts[self.serving], 10)]
        holders: dict[int, list[int]] = defaultdict(list)
        for index in self.serving.tolist():
            for adapter in models[index].adapters.uses:
                holders[adapter].append(index)
        self._holders = holders

    def choose(self, work: RoutedWork, adapter: int) -> int:
        holders = [i for i in self._holders.get(adapter, ()) if self._requests[i] < self._max_requests]
        index = self.pick_two(holders or self._fewest)
        self._requests[index] += 1
        if not holders:
            self._holders.setdefault(adapter, []).append(index)
        return self.place(index, work)


def choose_chameleon_victim(idle: Sequence[int], adapters: ModelAdapters) -> int:
    """Chameleon's score: 0.45 frequency, 0.10 recency, 0.45 size; the least goes."""
    uses = [adapters.uses[adapter] for adapter in idle]
    pages = [adapters.count_pages(adapter) for adapter in idle]
    most_uses, most_pages, count = max(uses), max(pages), len(idle)
    scores = [
        0.45 * uses[i] / most_uses + 0.10 * (i + 1) / count + 0.45 * pages[i] / most_pages
        for i in range(count)
    ]
    return idle[scores.index(min(scores))]
