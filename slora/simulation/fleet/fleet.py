"""A fleet of replica models behind a routing policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slora.routing.replica_state import ReplicaState, RoutedWork
from slora.routing.router import Router
from slora.simulation.fleet.replica_model import FleetLog, ReplicaModel, ReplicaSettings
from slora.simulation.fleet.traffic import Traffic
from slora.simulation.lengths import FloatArray
from slora.simulation.request_log import SLO_S
from slora_adapters.version import AdapterVersion

NUM_TENANTS = 1000


class RoutingPolicy(Protocol):
    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        """Called when all replicas have reported. `models`: for policies that read what ReplicaState does not have."""

    def choose(self, work: RoutedWork, adapter: int) -> int:
        """Returns the index of a serving replica."""


class RouterPolicy:
    """The production router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._states: tuple[ReplicaState, ...] = ()
        self._indexes: dict[str, int] = {}

    def publish(self, states: tuple[ReplicaState, ...], models: Sequence[ReplicaModel]) -> None:
        self._states = states
        if len(self._indexes) != len(states):
            self._indexes = {state.name: index for index, state in enumerate(states)}

    def choose(self, work: RoutedWork, adapter: int) -> int:
        return self._indexes[self._router.choose(work, self._states)[0]]


@dataclass(frozen=True, slots=True)
class Loss:
    """Replicas that are lost at a time, as with their rack. Their requests continue on other replicas."""

    at_s: float
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class FleetResults:
    """Statistics over all requests.

    goodput_tokens_per_s: prompt and answer tokens of the requests whose first token came within the SLO, from the first
        to the last arrival.
    warm_share: the share of requests that found their adapter in the page pool.
    loads, distinct_adapters: adapter fetches; different adapters that were requested: the least possible loads.
    """

    requests: int
    goodput_tokens_per_s: float
    attainment: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_mean_s: float
    warm_share: float
    loads: int
    distinct_adapters: int
    preemptions: int


class Fleet:
    """Replicas, their policy and one traffic.

    report_s: replicas report their states in this interval, so the router's view is up to this old.
    token_s: seconds of work of one token on a busy replica, for the loads.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        num_replicas: int,
        policy: RoutingPolicy,
        traffic: Traffic,
        *,
        token_s: float,
        report_s: float = 0.5,
        loss: Loss | None = None,
    ) -> None:
        self.log = FleetLog.empty(len(traffic))
        self.models = [ReplicaModel(settings, self.log) for _ in range(num_replicas)]
        self.traffic = traffic
        self._policy = policy
        self._token_s = token_s
        self._report_s = report_s
        self._loss = loss
        self._lost: set[int] = set()
        self._names = [f"replica-{i}" for i in range(num_replicas)]
        self._versions: dict[int, AdapterVersion] = {}
        self._resident: list[frozenset[AdapterVersion]] = [frozenset()] * num_replicas

    def run(self) -> FleetResults:
        traffic, models = self.traffic, self.models
        next_report_s = 0.0
        block = 65_536
        for start in range(0, len(traffic), block):
            columns = (
                column[start : start + block].tolist()
                for column in (
                    traffic.arrival_s,
                    traffic.adapter,
                    traffic.prompt_tokens,
                    traffic.output_tokens,
                )
            )
            for index, (now, adapter, prompt, output) in enumerate(zip(*columns, strict=True), start):
                if now >= next_report_s:
                    if self._loss is not None and now >= self._loss.at_s:
                        self._lose_replicas(now, self._loss)
                        self._loss = None
                    self._report(now)
                    next_report_s = now + self._report_s
                chosen = models[self._choose(adapter, prompt + output)]
                chosen.advance(now)
                chosen.submit(now, index, adapter, prompt, output)
        for model in models:
            model.advance(float("inf"))
        return self._summarize()

    def _choose(self, adapter: int, tokens: int) -> int:
        version = self._version(adapter)
        return self._policy.choose(RoutedWork(version.tenant, (version,), None, tokens), adapter)

    def _version(self, adapter: int) -> AdapterVersion:
        version = self._versions.get(adapter)
        if version is None:
            version = AdapterVersion(f"tenant-{adapter % NUM_TENANTS}", f"{adapter:064x}")
            self._versions[adapter] = version
        return version

    def _report(self, now: float) -> None:
        states = []
        for index, model in enumerate(self.models):
            model.advance(now)
            if model.residency_changed:
                self._resident[index] = frozenset(map(self._version, model.resident))
                model.residency_changed = False
            state = ReplicaState(
                self._names[index],
                self._resident[index],
                frozenset(),
                model.num_waiting,
                model.num_running,
                model.unfinished_tokens * self._token_s,
                index not in self._lost,
            )
            states.append(state)
        self._policy.publish(tuple(states), self.models)

    def _lose_replicas(self, now: float, loss: Loss) -> None:
        self._lost = set(range(loss.first, loss.first + loss.count))
        requests = []
        for index in self._lost:
            self.models[index].advance(now)
            requests += self.models[index].fail()
        self._report(now)
        for request in requests:
            chosen = self.models[self._choose(request.adapter, request.prompt_tokens + request.output_tokens)]
            chosen.advance(now)
            chosen.submit(now, request.number, request.adapter, request.prompt_tokens, request.output_tokens)

    def _summarize(self) -> FleetResults:
        ttft, traffic = self.ttft_s(), self.traffic
        latency = np.frombuffer(self.log.end_s) - traffic.arrival_s
        assert not np.isnan(latency).any(), "requests are unfinished, but no event is left (deadlock)"
        in_time = ttft < SLO_S
        duration = float(traffic.arrival_s[-1])
        hits, loads = (
            sum(model.num_hits for model in self.models),
            sum(model.num_loads for model in self.models),
        )
        return FleetResults(
            requests=len(traffic),
            goodput_tokens_per_s=float(traffic.total_tokens[in_time].sum()) / duration,
            attainment=float(in_time.mean()),
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p99_s=float(np.percentile(ttft, 99)),
            latency_mean_s=float(latency.mean()),
            warm_share=hits / len(traffic),
            loads=loads,
            distinct_adapters=len(np.unique(traffic.adapter)),
            preemptions=sum(model.num_preemptions for model in self.models),
        )

    def ttft_s(self) -> FloatArray:
        first: FloatArray = np.frombuffer(self.log.first_token_s) - self.traffic.arrival_s
        return first
