"""A fleet of replica models behind routers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from bench.simulation.fleet.autoscaling import Autoscaler, ScalingRule
from bench.simulation.fleet.model_request import FleetLog, ModelRequest
from bench.simulation.fleet.replica_model import ReplicaModel, ReplicaSettings
from bench.simulation.fleet.traffic import Traffic
from bench.simulation.lengths import FloatArray
from bench.simulation.request_log import SLO_S
from slora.client.router import ReplicaState, RoutedWork, Router
from slora_adapters.version import AdapterVersion


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


class Phase(Enum):
    OFF = "off"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class FleetResults:
    """Statistics over all requests.

    goodput_tokens_per_s: prompt and answer tokens of the requests whose first token came within the SLO, from the first
        to the last arrival.
    warm_share: the share of requests that found their adapter in the page pool.
    loads, distinct_adapters: fetches from the store; different adapters that were requested: the least possible loads.
    host_loads: adapters that were found in a host cache.
    pool_use: the mean share of pages that running requests hold in serving replicas, until the last arrival.
    replica_s: seconds of replicas that start, serve or drain, until the last arrival.
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
    host_loads: int
    preemptions: int
    pool_use: float
    replica_s: float


class Fleet:
    """Replicas, their routers and one traffic.

    policies: the routers. They take the requests in turn, and each sees only its own placements and all reports.
    report_s: all replicas report their states in this interval, so a router's view is up to this old.
    token_s: seconds of work of one token on a busy replica, for the loads.
    scaling: the rule by which replicas start and drain; None: all replicas serve.
    phases: what each replica does now.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        num_replicas: int,
        policies: Sequence[RoutingPolicy],
        traffic: Traffic,
        *,
        token_s: float,
        report_s: float = 0.5,
        loss: Loss | None = None,
        scaling: ScalingRule | None = None,
    ) -> None:
        self.log = FleetLog.empty(len(traffic))
        self.models = [ReplicaModel(settings, self.log) for _ in range(num_replicas)]
        self.traffic = traffic
        self._num_tenants = settings.num_tenants
        self._policies = policies
        self._token_s = token_s
        self._report_s = report_s
        self._loss = loss
        self._scaler = None if scaling is None else Autoscaler(scaling, num_replicas)
        num_serving = num_replicas if scaling is None else scaling.num_initial
        self.phases = [Phase.SERVING] * num_serving + [Phase.OFF] * (num_replicas - num_serving)
        self._ready_s: dict[int, float] = {}  # When each starting replica serves.
        self._replica_s = self._reported_s = 0.0
        self._pool_use = 0.0  # Sum over all reports of serving replicas.
        self._num_reports = 0
        self._names = [f"replica-{i}" for i in range(num_replicas)]
        self._versions: dict[int, AdapterVersion] = {}
        nothing: frozenset[AdapterVersion] = frozenset()
        self._reported = [(nothing, nothing)] * num_replicas

    def run(self) -> FleetResults:
        traffic, models, policies = self.traffic, self.models, self._policies
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
                policy = policies[index % len(policies)]
                chosen = models[self._choose(policy, adapter, prompt + output)]
                chosen.advance(now)
                chosen.submit(now, index, adapter, prompt, output)
        for model in models:
            model.advance(float("inf"))
        return self._summarize()

    def _choose(self, policy: RoutingPolicy, adapter: int, tokens: int) -> int:
        version = self._version(adapter)
        return policy.choose(RoutedWork(version.tenant, (version,), None, tokens), adapter)

    def _version(self, adapter: int) -> AdapterVersion:
        version = self._versions.get(adapter)
        if version is None:
            version = AdapterVersion(f"tenant-{adapter % self._num_tenants}", f"{adapter:064x}")
            self._versions[adapter] = version
        return version

    def _report(self, now: float) -> None:
        for model in self.models:
            model.advance(now)
        self._count_time(now)
        if self._scaler is not None:
            self._scale(now, self._scaler)
        states = []
        for index, model in enumerate(self.models):
            adapters = model.adapters
            if adapters.changed:
                self._reported[index] = self._name_all(adapters.uses), self._name_all(adapters.on_host)
                adapters.changed = False
            if self.phases[index] is Phase.SERVING:
                self._pool_use += model.pool_use
                self._num_reports += 1
            state = ReplicaState(
                self._names[index],
                *self._reported[index],
                model.num_waiting,
                model.num_running,
                model.unfinished_tokens * self._token_s,
                self.phases[index] is Phase.SERVING,
            )
            states.append(state)
        published = tuple(states)
        for policy in self._policies:
            policy.publish(published, self.models)

    def _name_all(self, adapters: Iterable[int]) -> frozenset[AdapterVersion]:
        return frozenset(map(self._version, adapters))

    def _count_time(self, now: float) -> None:
        idle = self.phases.count(Phase.OFF) + self.phases.count(Phase.LOST)
        self._replica_s += (now - self._reported_s) * (len(self.models) - idle)
        self._reported_s = now

    def _scale(self, now: float, scaler: Autoscaler) -> None:
        phases = self.phases
        for index in [index for index, ready_s in self._ready_s.items() if ready_s <= now]:
            del self._ready_s[index]
            phases[index] = Phase.SERVING
        for index in self._find(Phase.DRAINING):
            if not self.models[index].unfinished_tokens:
                self.models[index].fail()  # Its memory is lost when it stops.
                phases[index] = Phase.OFF
        serving = self._find(Phase.SERVING)
        wanted = scaler.count_wanted(now, [self.models[index] for index in serving], len(self._ready_s))
        if wanted is None:
            return
        missing = wanted - len(serving) - len(self._ready_s)
        # Draining replicas serve again at once.
        for index in self._find(Phase.DRAINING)[: max(0, missing)]:
            phases[index] = Phase.SERVING
            missing -= 1
        for index in self._find(Phase.OFF)[: max(0, missing)]:
            phases[index] = Phase.STARTING
            self._ready_s[index] = now + scaler.rule.start_s
        if missing < 0 and not self._ready_s:
            for index in serving[missing:]:
                phases[index] = Phase.DRAINING

    def _find(self, phase: Phase) -> list[int]:
        return [index for index, one in enumerate(self.phases) if one is phase]

    def _lose_replicas(self, now: float, loss: Loss) -> None:
        requests: list[ModelRequest] = []
        for index in range(loss.first, loss.first + loss.count):
            self.phases[index] = Phase.LOST
            self._ready_s.pop(index, None)
            self.models[index].advance(now)
            requests += self.models[index].fail()
        self._report(now)
        for request in requests:
            left = request.output_tokens - request.num_generated
            chosen = self.models[self._choose(self._policies[0], request.adapter, request.num_tokens + left)]
            chosen.advance(now)
            chosen.submit(now, request.number, request.adapter, request.num_tokens, left)

    def _summarize(self) -> FleetResults:
        ttft, traffic = self.ttft_s(), self.traffic
        latency = np.frombuffer(self.log.end_s) - traffic.arrival_s
        assert not np.isnan(latency).any(), "requests are unfinished, but no event is left (deadlock)"
        in_time = ttft < SLO_S
        duration = float(traffic.arrival_s[-1])

        def add_up(count: Callable[[ReplicaModel], int]) -> int:
            return sum(map(count, self.models))

        return FleetResults(
            requests=len(traffic),
            goodput_tokens_per_s=float(traffic.total_tokens[in_time].sum()) / duration,
            attainment=float(in_time.mean()),
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p99_s=float(np.percentile(ttft, 99)),
            latency_mean_s=float(latency.mean()),
            warm_share=add_up(lambda model: model.num_hits) / len(traffic),
            loads=add_up(lambda model: model.adapters.num_fetches),
            distinct_adapters=len(np.unique(traffic.adapter)),
            host_loads=add_up(lambda model: model.adapters.num_host_fetches),
            preemptions=add_up(lambda model: model.num_preemptions),
            pool_use=self._pool_use / self._num_reports,
            replica_s=self._replica_s,
        )

    def ttft_s(self) -> FloatArray:
        first: FloatArray = np.frombuffer(self.log.first_token_s) - self.traffic.arrival_s
        return first
