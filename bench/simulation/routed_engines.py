"""Several simulated engines behind a router. Each engine runs the production scheduler.

This is exact but slow: an engine simulates each of its steps.
"""

import math
import sys
from collections.abc import Sequence

from bench.simulation.request_log import Outcome, Results, summarize
from bench.simulation.simulation import Setup, Simulation
from bench.simulation.traces import Trace, TraceRequest
from slora.client.router import ReplicaState, RoutedWork, Router


class RoutedEngines:
    """Replays a trace on `num_replicas` engines. The router knows the current state of each engine at each arrival.

    token_s: seconds of work per token, from which the load of an engine is estimated.
    share_s: seconds between two reports of what an engine has charged to tenants, to the other engines. None: the
        engines do not know of each other's service.
    """

    def __init__(
        self,
        setup: Setup,
        num_replicas: int,
        router: Router,
        token_s: float,
        *,
        share_s: float | None = None,
    ) -> None:
        self.engines = {f"replica-{i}": Simulation(setup) for i in range(num_replicas)}
        self._router = router
        self._token_s = token_s
        self._share_s = math.inf if share_s is None else share_s
        self._share_at = self._share_s

    def run(self, trace: Trace, *, until_s: float | None = None) -> Results:
        """Replays a trace until all requests have ended, or until `until_s`."""
        for request in trace:
            if until_s is not None and request.arrival_s >= until_s:
                break
            self._advance(request.arrival_s)
            name = self._router.choose(self._describe(request), self.report_states())[0]
            self.engines[name].submit(request)
        if until_s is not None:
            self._advance(until_s)
            return summarize(self.outcomes())
        for engine in self.engines.values():
            engine.run([])
        return summarize(self.outcomes())

    def charged(self, tenant: int) -> float:
        """Returns what all engines have charged to a tenant, in virtual tokens."""
        accounts = (engine.scheduler.paging.tenants for engine in self.engines.values())
        return sum(one.find(f"tenant-{tenant}").charged for one in accounts)

    def _advance(self, until_s: float) -> None:
        while self._share_at < until_s:
            self._advance_engines(self._share_at)
            self._share_service()
            self._share_at += self._share_s
        self._advance_engines(until_s)

    def _advance_engines(self, until_s: float) -> None:
        for engine in self.engines.values():
            engine.advance(until_s)

    def _share_service(self) -> None:
        spans = {
            name: engine.scheduler.paging.tenants.pop_spans(sys.maxsize)
            for name, engine in self.engines.items()
        }
        for name, engine in self.engines.items():
            for other, charged in spans.items():
                if other != name:
                    engine.scheduler.add_service_elsewhere(other, charged)

    def outcomes(self) -> list[Outcome]:
        return [outcome for engine in self.engines.values() for outcome in engine.outcomes.values()]

    def report_states(self) -> Sequence[ReplicaState]:
        return [self._report_state(name, engine) for name, engine in self.engines.items()]

    @property
    def num_loads(self) -> int:
        return sum(engine.totals.loads for engine in self.engines.values())

    def _report_state(self, name: str, engine: Simulation) -> ReplicaState:
        waiting = engine.scheduler.num_waiting
        return ReplicaState(
            name,
            frozenset(resident.version for resident in engine.residency),
            frozenset(),
            waiting,
            engine.num_unfinished - waiting,
            engine.unfinished_tokens * self._token_s,
        )

    def _describe(self, request: TraceRequest) -> RoutedWork:
        engine = next(iter(self.engines.values()))
        versions = () if request.adapter is None else (engine.fleet.version(request.adapter),)
        tokens = request.prompt_tokens + request.output_tokens
        return RoutedWork(f"tenant-{request.tenant}", versions, None, tokens)
