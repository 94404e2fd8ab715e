"""The engines of this host, as operators see and restart them.

An operator's restart is an orderly stop: the engine drains, as after SIGTERM, and the main process starts it again. Any
API process can request it, because each of them is connected to every engine. No request is refused as long as another
engine serves. So an engine is restarted only if another engine serves in all API processes of the host, unless the
operator accepts an outage.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from slora.client.replica_group import RESUME_S, ReplicaGroup
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_api.core.errors import EngineConflict, NotFound
from slora_api.core.host_board import HostBoard
from slora_api.core.threads import control_thread
from slora_api.metrics.frame import EngineObject, describe_engine
from slora_api.metrics.metrics import Metrics


class HostEngineObject(EngineObject):
    """One of the engines of the host. restarts: how often the engine process has ended since the server started."""

    object: Literal["engine"]
    restarts: int


class Engines:
    """Lists and restarts the engines of this host."""

    def __init__(self, group: ReplicaGroup, metrics: Metrics, board: HostBoard, database: Database) -> None:
        self._group = group
        self._metrics = metrics
        self._board = board
        self._database = database
        self._restarting = asyncio.Lock()

    @property
    def problems(self) -> Mapping[str, str | None]:
        """Why each engine gets no new requests, by name; None for an engine that serves."""
        return self._group.problems

    def publish(self) -> None:
        """Tells the other API processes of the host which engines serve in this process."""
        self._board.set_serving(problem is None for problem in self._group.problems.values())

    async def list(self) -> Sequence[HostEngineObject]:
        """Lists the engines, by name."""
        problems = self._find_problems()
        return [
            {
                **describe_engine(one._replace(problem=problems[one.name])),
                "object": "engine",
                "restarts": self._metrics.restarts[one.name],
            }
            for one in await self._group.list_engines()
        ]

    async def restart(self, name: str, *, allow_outage: bool) -> HostEngineObject:
        """Begins to restart an engine, and records it in the audit log. Returns before the engine has ended.

        allow_outage: restart it even if no other engine serves.

        Raises NotFound, EngineConflict, EngineUnavailable, and the errors of the database.
        """
        async with self._restarting:
            self._check(name, allow_outage=allow_outage)
            await control_thread(self._record, name, allow_outage=allow_outage)
            self._group.stop_engine(name)
        return next(one for one in await self.list() if one["name"] == name)

    def _find_problems(self) -> dict[str, str | None]:
        """Returns why each engine gets no new requests, in this API process or another one."""
        found = dict(self._group.problems)
        for number, (name, problem) in enumerate(found.items()):
            if problem is None and not self._board.serves_elsewhere(number):
                found[name] = "some API processes are not connected to it yet"
        return found

    def _check(self, name: str, *, allow_outage: bool) -> None:
        problems = self._find_problems()
        if name not in problems:
            raise NotFound(
                f"There is no engine `{name[:128]}`. The engines of this server are {', '.join(problems)}."
            )
        if not self._group.can_stop(name):
            raise EngineConflict(
                f"The engine `{name}` cannot be restarted now: {problems[name]}. Try again later."
            )
        if not allow_outage and not any(why is None for one, why in problems.items() if one != name):
            raise EngineConflict(
                f"The engine `{name}` is not restarted, because no other engine serves: until it serves again, new "
                f"requests would be refused, and answers in progress would pause for up to {RESUME_S:g} s. Send "
                "`allow_outage: true` to accept this."
            )

    def _record(self, name: str, *, allow_outage: bool) -> None:
        with self._database.transaction(CHANGES) as connection:
            record_change(connection, "engine.restart", "", name, {"allow_outage": allow_outage})
