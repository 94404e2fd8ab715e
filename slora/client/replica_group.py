"""Several engines that serve the same model, as one `EngineClient`. A stream survives the loss of its engine.

The router chooses the engine of each request. When an engine is lost or drains, the group sends its requests to another
engine, together with the tokens that have arrived. If there is no other engine, they wait until one serves. The client
sees a pause. The usage of a request is reported once.

A request that may have killed its engines is given up after `MAX_LOSSES` of them, so that it cannot end all engines.

Engines may join and leave while the group runs: see `add` and `remove`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence, Set
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TypeVar

from slora.client.client import RemoteEngine, UsageListener
from slora.client.open_requests import OpenAnswer, Settlement
from slora.client.router import RoutedWork, Router, count_answer_tokens
from slora.core.engine_address import EngineAddress
from slora.core.engine_state import (
    AdapterPlace,
    EngineInfo,
    EngineState,
    EngineStats,
    Pin,
    TenantPurge,
)
from slora.core.errors import EngineUnavailable, RequestFailed, RequestRefused
from slora.core.messages import Served
from slora.core.prefix_key import extend_keys, root_key
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, TenantShare, TokenDelta
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")

# A request is given up after this many engines began to compute it and died without a new token of it.
MAX_LOSSES = 3
# How long an interrupted answer waits for an engine before it ends with an error.
RESUME_S = 120.0
# Requests of a tenant that begin with the same tokens are sent to the same engine, if its load allows. A shorter common
# beginning saves little.
_PREFIX_TOKENS = 64
# How long a list of the engines may wait for their answers, which they give between two steps.
_LISTING_S = 2.0
_NONE_SERVES = "the engine is not running and is being started; send the request again"
_PURGED = "the operator has purged the tenant of this request"


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine."""

    name: str
    client: RemoteEngine
    mismatch: str | None = None  # Why it cannot serve beside the others; None if it can.
    connection: asyncio.Task[None] | None = None  # The task that keeps the client connected.

    @property
    def problem(self) -> str | None:
        """Why it gets no new requests; None if it serves."""
        if self.mismatch is not None:
            return self.mismatch
        if not self.client.connected:
            return "it is starting"
        if self.client.is_leaving:
            return "it stops, and is then started again"
        return None if self.client.ready else "the loader is not connected"

    @property
    def is_serving(self) -> bool:
        return self.problem is None

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests, perhaps without a loader. A request then waits for its adapters."""
        return self.client.connected and not self.client.is_leaving and self.mismatch is None


class ReplicaGroup:
    """An EngineClient over any number of engines. The coroutine `run` must run for as long as the group is used.

    sockets: one for each engine, named after the engine.
    resume_s: how long an interrupted request waits for an engine; with 0, it ends at once.
    is_stalled: whether the engine of this name makes no progress. It then gets no requests while another engine serves.
    """

    def __init__(self, sockets: Sequence[Path], resume_s: float = RESUME_S) -> None:
        self.is_stalled: Callable[[str], bool] = lambda name: False
        self.replicas: dict[str, _Replica] = {}
        self._resume_s = resume_s
        self._router = Router()
        self.answers: dict[str, OpenAnswer] = {}
        self._on_usage: UsageListener = lambda request_id, usage, timing: None
        self._on_hello: Callable[[], None] = lambda: None
        self._info: EngineInfo | None = None
        self._tasks: asyncio.TaskGroup | None = None
        # Set each time an engine may have begun or ceased to serve.
        self._changed = asyncio.Event()
        for path in sockets:
            self.add(path.stem, path)

    @property
    def ready(self) -> bool:
        return any(replica.is_serving for replica in self.replicas.values())

    @property
    def health(self) -> dict[str, bool]:
        """Whether each replica serves, by name."""
        return {replica.name: replica.is_serving for replica in self.replicas.values()}

    @property
    def problems(self) -> dict[str, str | None]:
        """Why each replica gets no new requests, by name; None for a replica that serves.

        Sorted by name, because replicas may have joined the groups of several processes in different orders.
        """
        return {
            name: "it makes no progress" if self.is_stalled(name) else replica.problem
            for name, replica in sorted(self.replicas.items())
        }

    @property
    def sent_versions(self) -> Set[AdapterVersion]:
        """See `RemoteEngine.sent_versions`."""
        return {version for replica in self.replicas.values() for version in replica.client.sent_versions}

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine is starting")
        return self._info

    async def run(self, on_hello: Callable[[], None] = lambda: None) -> None:
        """Keeps the connections to the engines, until cancelled. on_hello: called when an engine has connected."""
        self._on_hello = on_hello
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for replica in self.replicas.values():
                    self._connect(replica)
                await asyncio.Event().wait()  # Engines may still join after all others have left.
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._tasks = None

    def add(self, name: str, address: EngineAddress) -> None:
        """Adds an engine, which gets requests as soon as it has connected. name: no other engine may have it."""
        assert name not in self.replicas, f"there already is an engine {name}"
        replica = self.replicas[name] = _Replica(name, RemoteEngine(address))
        replica.client.listen_for_usage(partial(self._receive_usage, replica))
        replica.client.listen_for_begins(partial(self._note_begin, replica))
        replica.client.listen_for_service(partial(self._pass_on_service, replica))
        if self._tasks is not None:
            self._connect(replica)

    def remove(self, name: str) -> None:
        """Removes an engine. Other engines continue its requests at once, and it gets no new ones.

        The engine process goes on, for the groups of other processes.
        """
        replica = self.replicas.pop(name)
        replica.client.release()
        if replica.connection is not None:
            replica.connection.cancel()

    def _connect(self, replica: _Replica) -> None:
        def greet() -> None:
            self._check_info(replica)
            if replica.mismatch is None:
                self._on_hello()

        assert self._tasks is not None
        replica.connection = self._tasks.create_task(replica.client.run(greet, self._changed.set))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        running = self.answers.get(request.request_id)
        if running is not None and not running.settlement.is_closed:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        answer = self._open_answer(request)
        try:
            while not answer.is_complete:
                try:
                    client, run = self._begin_run(answer)
                    async with aclosing(client.generate(run)) as deltas:
                        async for arrived in deltas:
                            if new := answer.take(arrived):
                                yield new
                    return
                except EngineUnavailable as error:
                    await self._prepare_retry(answer, error)
        finally:
            answer.settlement.close()

    def _open_answer(self, request: EngineRequest) -> OpenAnswer:
        # Neither function holds the answer, which holds both: the collector of cycles then finds nothing to free.
        settlement = Settlement(partial(self._on_usage, request.request_id), partial(self._forget, request))
        answer = self.answers[request.request_id] = OpenAnswer(request, settlement)
        return answer

    def _forget(self, request: EngineRequest) -> None:
        answer = self.answers.get(request.request_id)
        # A line of a batch may have been sent again with the same id.
        if answer is not None and answer.request is request:
            del self.answers[request.request_id]

    def end_choice(self, request_id: str, index: int) -> None:
        answer = self.answers.get(request_id)
        if answer is not None:
            answer.end_choice(index)
            if (owner := self.replicas.get(answer.settlement.owner or "")) is not None:
                owner.client.end_choice(request_id, index)

    def listen_for_usage(self, listener: UsageListener) -> None:
        self._on_usage = listener

    def acknowledge_usage(self, request_id: str) -> None:
        # An engine ignores requests that it does not know.
        for replica in self.replicas.values():
            replica.client.acknowledge_usage(request_id)

    async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
        """Returns the statistics of all engines together, and those of each engine."""
        stats = await self._ask_each(lambda engine: engine.stats(watched), skip_stalled=True)
        return replace(EngineStats.merge(list(stats.values())), engines=self._list_engines(stats))

    async def list_engines(self) -> Sequence[EngineState]:
        """Returns the state of each engine, also while none of them answers."""
        try:
            async with asyncio.timeout(_LISTING_S):
                return (await self.stats(())).engines
        except (EngineUnavailable, TimeoutError):
            return self._list_engines({})

    def can_stop(self, name: str) -> bool:
        """Whether the engine is connected and does not stop already."""
        client = self.replicas[name].client
        return client.connected and not client.is_leaving

    def stop_engine(self, name: str) -> None:
        """Tells an engine to drain and to end. Raises EngineUnavailable if it is not connected.

        The process that has started the engine starts it again.
        """
        self.replicas[name].client.stop()

    def _list_engines(self, stats: Mapping[str, EngineStats]) -> tuple[EngineState, ...]:
        return tuple(
            EngineState(name, problem, self.replicas[name].client.device, stats.get(name))
            for name, problem in self.problems.items()
        )

    async def remove_adapter(self, version: AdapterVersion) -> None:
        with suppress(EngineUnavailable):  # An engine that starts later does not have it.
            await self._ask_all(lambda engine: engine.remove_adapter(version))

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        """Purges the tenant in all connected engines. An engine that starts later has no data of the tenant."""
        for answer in self.answers.values():
            if answer.request.tenant == tenant:
                answer.refusal = RequestFailed(_PURGED)
        return reduce(add, await self._ask_all(lambda engine: engine.purge_tenant(tenant)))

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        """Prewarms the adapter in the engine to which the router would send a request for it."""
        replica = self._choose(RoutedWork(version.tenant, (version,), None, 0))
        return await replica.client.prewarm(version, share)

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        await self._ask_all(lambda engine: engine.set_pins(pins))

    async def _ask_all(
        self, ask: Callable[[RemoteEngine], Awaitable[_Reply]], *, skip_stalled: bool = False
    ) -> list[_Reply]:
        """Returns the replies of all connected engines. See `_ask_each`."""
        return list((await self._ask_each(ask, skip_stalled=skip_stalled)).values())

    async def _ask_each(
        self, ask: Callable[[RemoteEngine], Awaitable[_Reply]], *, skip_stalled: bool = False
    ) -> dict[str, _Reply]:
        """Returns the replies of all connected engines, by name. Raises EngineUnavailable if none of them replies.

        skip_stalled: whether to leave out engines that make no progress. They reply late or never.
        """
        asked = {
            replica.name: replica.client
            for replica in self.replicas.values()
            if replica.client.connected and not (skip_stalled and self.is_stalled(replica.name))
        }
        found = await asyncio.gather(*map(ask, asked.values()), return_exceptions=True)
        replies: dict[str, _Reply] = {}
        for name, reply in zip(asked, found, strict=True):
            if not isinstance(reply, BaseException):
                replies[name] = reply
            elif not isinstance(reply, EngineUnavailable):
                raise reply
        if not replies:
            raise EngineUnavailable(_NONE_SERVES)
        return replies

    def _begin_run(self, answer: OpenAnswer) -> tuple[RemoteEngine, EngineRequest]:
        """Chooses the engine that computes the rest of an answer. Returns it with the request to send to it."""
        replica = self._choose_for(answer.request)
        return replica.client, answer.begin_run(replica.name)

    def _choose_for(self, request: EngineRequest) -> _Replica:
        num_tokens = len(request.prompt_token_ids) + count_answer_tokens(request)
        prefix = self.find_prefix_key(request) if len(self.replicas) > 1 else None
        return self._choose(RoutedWork(request.tenant, request.versions, prefix, num_tokens))

    def find_prefix_key(self, request: EngineRequest) -> bytes | None:
        """Returns the key of the first blocks of the prompt, as in the engines' prefix caches."""
        info = self._info
        if info is None or info.prefix_cache == "off":
            return None
        scope = "" if info.prefix_cache == "public" and not request.adapters else request.tenant
        tokens = request.prompt_token_ids[: max(_PREFIX_TOKENS, info.block_tokens)]
        keys: list[bytes] = []
        extend_keys(keys, root_key(scope, request.adapters, uses_long_rope=False), tokens, info.block_tokens)
        return keys[-1] if keys else None

    def _choose(self, work: RoutedWork) -> _Replica:
        usable = [replica for replica in self.replicas.values() if replica.is_usable]
        best = [
            replica for replica in usable if replica.is_serving and not self.is_stalled(replica.name)
        ] or usable
        if len(best) < 2:
            if not best:
                raise EngineUnavailable(_NONE_SERVES)
            return best[0]
        states = [replica.client.state.describe(replica.name) for replica in best]
        return self.replicas[self._router.choose(work, states)[0]]

    async def _prepare_retry(self, answer: OpenAnswer, error: EngineUnavailable) -> None:
        """Returns when the request can be sent again. Raises `error` if it must not be."""
        # An answer still has an owner if this process ends. The engines then record the usage.
        if answer.num_runs == 0 or answer.settlement.owner is not None or self._resume_s == 0:
            raise error
        if answer.settlement.num_losses >= MAX_LOSSES:
            raise EngineUnavailable(
                f"{MAX_LOSSES} engines died while they processed this request, which may be the cause, so it is not "
                "sent to another one"
            ) from error
        _log.warning(
            "request %s lost its engine after %d tokens; it is sent to another one as soon as one serves",
            answer.request.request_id,
            answer.num_tokens,
        )
        try:
            async with asyncio.timeout(self._resume_s):
                while not self.ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(
                "the engine died while it processed this request, and no engine could continue it within "
                f"{self._resume_s:g} s; send the request again"
            ) from error
        if answer.refusal is not None:
            raise answer.refusal

    def _check_info(self, replica: _Replica) -> None:
        """Takes the facts of an engine that has connected, or refuses the engine if it differs from the others.

        Raises EngineUnavailable if it has another protocol version, and no other engine is connected.
        """
        others = [
            other.client.info
            for other in self.replicas.values()
            if other is not replica and other.client.connected and other.mismatch is None
        ]
        if (refusal := replica.client.refusal) is not None:
            if not others:  # No engine can serve, so the server ends. Its restart takes the new installation.
                raise refusal
            replica.mismatch = str(refusal)
            _log.error("%s gets no requests: %s", replica.name, replica.mismatch)
            return
        found = replica.client.info
        # Compare with the last known facts even if no other engine is connected: an answer in progress must not
        # continue on another model.
        expected = others[0] if others else self._info
        replica.mismatch = expected.explain_difference(found) if expected is not None else None
        if replica.mismatch is None:
            self._info = EngineInfo.merge([*others, found])
        else:
            _log.error(
                "%s gets no requests: %s; restart it with the settings of the others",
                replica.name,
                replica.mismatch,
            )

    def _note_begin(self, replica: _Replica, request_id: str) -> None:
        answer = self.answers.get(request_id)
        if answer is not None:
            answer.settlement.hear_begin(replica.name)

    def _pass_on_service(self, replica: _Replica, service: Served) -> None:
        """Tells the other engines what an engine has charged to tenants.

        All API processes do so. An engine counts each span once: see `ServiceSpan`.
        """
        for other in self.replicas.values():
            if other is not replica:
                other.client.tell_service_elsewhere(service)

    def _receive_usage(
        self, replica: _Replica, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None
    ) -> None:
        answer, is_lost = self.answers.get(request_id), usage is None and not replica.client.is_leaving
        if answer is None or not answer.settlement.hear_usage(
            replica.name, usage, timing, is_lost=is_lost, is_complete=answer.is_complete
        ):
            replica.client.acknowledge_usage(request_id)
