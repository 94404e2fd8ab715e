"""Several simulated engines behind a router. Each engine runs the production scheduler.

This is exact but slow: an engine simulates each of its steps.
"""

from collections.abc import Sequence

from slora.routing.replica_state import ReplicaState, RoutedWork
from slora.routing.router import Router
from slora.simulation.request_log import Outcome, Results, summarize
from slora.simulation.simulation import Setup, Simulation
from slora.simulation.traces import Trace, TraceRequest


class RoutedEngines:
    """Replays a trace on `num_replicas` engines. The router knows the current state of each engine at each arrival.

    token_s: seconds of work per token, from which the load of an engine is estimated.
    """

    def __init__(self, setup: Setup, num_replicas: int, router: Router, token_s: float) -> None:
        self.engines = {f"replica-{i}": Simulation(setup) for i in range(num_replicas)}
        self._router = router
        self._token_s = token_s

    def run(self, trace: Trace) -> Results:
        for request in trace:
            for engine in self.engines.values():
                engine.advance(request.arrival_s)
            name = self._router.choose(self._describe(request), self.report_states())[0]
            self.engines[name].submit(request)
        for engine in self.engines.values():
            engine.run([])
        return summarize(self.outcomes())

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
