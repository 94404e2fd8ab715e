"""Chooses the replica of a request that a Ray program sends by the deployment's handle, as API processes choose it.

Ray's own router knows neither adapters nor tenants. Its subclasses are an alpha API of Ray.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from slora.client.router import ReplicaState, RoutedWork, Router
from slora.core.request import EngineRequest
from slora_adapters.version import AdapterVersion

# Ray asks the replicas this often which adapters they have. Its default of 10 s is too long for cold adapters.
STATS_PERIOD_S = 1.0
# Estimates: the seconds of a token, and the tokens of an answer without max_tokens.
_TOKEN_S, _ANSWER_TOKENS = 1e-3, 256


class AdapterRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types.
    """The router of one handle."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._router = Router(token_s=_TOKEN_S)
        # Name -> the last report, and the state that was made of it. The router tells by identity what is new.
        self._states: dict[str, tuple[dict[str, Any], ReplicaState]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which Ray should try them."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        states = [self._read_state(name, replica.routing_stats) for name, replica in by_name.items()]
        self._states = {name: self._states[name] for name in by_name}
        return [[by_name[name]] for name in self._router.choose(_describe(pending_request), states)]

    def _read_state(self, name: str, report: dict[str, Any]) -> ReplicaState:
        known = self._states.get(name)
        if known is None or known[0] != report:
            running, waiting = report.get("running", 0), report.get("waiting", 0)
            resident = frozenset(AdapterVersion(*pair) for pair in report.get("resident", ()))
            load = (running + waiting) * _ANSWER_TOKENS * _TOKEN_S
            known = report, ReplicaState(name, resident, frozenset(), waiting, running, load)
            self._states[name] = known
        return known[1]


def _describe(pending: PendingRequest | None) -> RoutedWork:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, EngineRequest):
        return RoutedWork("", (), None, 0)
    tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or _ANSWER_TOKENS)
    return RoutedWork(request.tenant, request.versions, None, tokens)
