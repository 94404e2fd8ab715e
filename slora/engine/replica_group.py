"""Several engines that serve the same model, as one `EngineClient`. A stream survives the loss of its engine.

The router chooses the engine of each request. When an engine is lost, the group sends its requests to another engine,
together with the tokens that have arrived. If there is no other engine, they wait until one has restarted. The client
sees a pause. The usage of a request is reported once.

A request that may have killed its engines is given up after `MAX_LOSSES` of them, so that it cannot end all engines.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from slora.adapter_place import AdapterPlace
from slora.engine.client import RemoteEngine, UsageListener
from slora.engine.info import EngineInfo, EngineStats, TenantPurge
from slora.engine.live_state import LiveState
from slora.engine.merged_states import explain_difference, merge_live_states, merge_purges, merge_stats
from slora.engine.open_answer import OpenAnswer
from slora.engine.pin import Pin
from slora.errors import EngineUnavailable, RequestFailed, RequestRefused
from slora.request import EngineRequest, RequestTiming, RequestUsage, TokenDelta
from slora.routing.replica_state import ReplicaState, RoutedWork
from slora.routing.router import Router
from slora.tenant_share import TenantShare
from slora_adapters.version import AdapterVersion

__all__ = ["MAX_LOSSES", "ReplicaGroup"]

_log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")

# A request is sent again after the loss of its first two engines.
MAX_LOSSES = 3
_POLL_S = 0.05
# Estimates for the router: the length of an answer without max_tokens, and the time of a token.
_ANSWER_TOKENS = 256
_TOKEN_S = 1e-3
_NONE_SERVES = "the engine is not running and is being started; send the request again"
_PURGED = "the operator has purged the tenant of this request"


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine. mismatch: why it cannot serve beside the others. open_tokens: estimated tokens of its requests."""

    name: str
    client: RemoteEngine
    mismatch: str | None = None
    open_tokens: int = 0

    @property
    def is_serving(self) -> bool:
        return self.client.ready and self.mismatch is None


class ReplicaGroup:
    """An EngineClient over one or more engines. The coroutine `run` must run for as long as the group is used.

    resume_s: how long an interrupted request waits for an engine.
    """

    def __init__(self, sockets: Sequence[Path], resume_s: float) -> None:
        self._replicas = [_Replica(path.stem, RemoteEngine(path)) for path in sockets]
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._resume_s = resume_s
        self._router = Router()
        self._answers: dict[str, OpenAnswer] = {}
        self._owners: dict[str, _Replica] = {}
        self._on_usage: UsageListener = lambda request_id, usage, timing: None
        self._info: EngineInfo | None = None
        self._has_serving = asyncio.Event()
        # Number of times that a request was continued on another engine.
        self.num_resumed = 0
        for replica in self._replicas:
            replica.client.listen_for_usage(self._receive_usage)

    @property
    def ready(self) -> bool:
        return any(replica.is_serving for replica in self._replicas)

    @property
    def health(self) -> dict[str, bool]:
        """Whether each replica serves, by name."""
        return {replica.name: replica.is_serving for replica in self._replicas}

    @property
    def versions(self) -> Set[AdapterVersion]:
        """See `RemoteEngine.versions`."""
        return {version for replica in self._replicas for version in replica.client.versions}

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine is starting")
        return self._info

    async def run(self, on_hello: Callable[[], None] = lambda: None) -> None:
        """Keeps the connections to the engines, until cancelled. on_hello: called when an engine has connected."""

        def greet(replica: _Replica) -> None:
            self._check_info(replica)
            on_hello()

        connections = [replica.client.run(partial(greet, replica)) for replica in self._replicas]
        await asyncio.gather(*connections, self._watch())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        running = self._answers.get(request.request_id)
        if running is not None and not running.is_closed:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        answer = self._answers[request.request_id] = OpenAnswer(request)
        try:
            while True:
                try:
                    async with aclosing(self._compute(answer)) as deltas:
                        async for arrived in deltas:
                            yield arrived
                    return
                except EngineUnavailable as error:
                    if answer.is_complete:
                        return
                    await self._prepare_retry(answer, error)
        finally:
            self._close(answer)

    def end_choice(self, request_id: str, index: int) -> None:
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.end_choice(index)
        if (owner := self._owners.get(request_id)) is not None:
            owner.client.end_choice(request_id, index)

    def owner_of(self, request_id: str) -> str | None:
        """The name of the replica that computes a request now; None if none does."""
        owner = self._owners.get(request_id)
        return None if owner is None else owner.name

    def listen_for_usage(self, listener: UsageListener) -> None:
        self._on_usage = listener

    def acknowledge_usage(self, request_id: str) -> None:
        # An engine ignores requests that it does not know.
        for replica in self._replicas:
            replica.client.acknowledge_usage(request_id)

    async def stats(self) -> EngineStats:
        return merge_stats(await self._ask_all(lambda engine: engine.stats()))

    async def observe(self, tenants: Collection[str]) -> LiveState:
        return merge_live_states(await self._ask_all(lambda engine: engine.observe(tenants)))

    async def remove_adapter(self, version: AdapterVersion) -> None:
        for replica in self._replicas:
            await replica.client.remove_adapter(version)

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        """Purges the tenant in all connected engines. An engine that starts later has no data of the tenant."""
        for answer in self._answers.values():
            if answer.request.tenant == tenant:
                answer.refusal = RequestFailed(_PURGED)
        return merge_purges(await self._ask_all(lambda engine: engine.purge_tenant(tenant)))

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        """Prewarms the adapter in the engine to which the router would send a request for it."""
        replica = self._choose(RoutedWork(version.tenant, (version,), None, 0))
        return await replica.client.prewarm(version, share)

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        await self._ask_all(lambda engine: engine.set_pins(pins))

    async def _ask_all(self, ask: Callable[[RemoteEngine], Awaitable[_Reply]]) -> list[_Reply]:
        """Returns the replies of all connected engines. Raises EngineUnavailable if none of them replies."""
        connected = [replica.client for replica in self._replicas if replica.client.connected]
        found = await asyncio.gather(*map(ask, connected), return_exceptions=True)
        replies: list[_Reply] = []
        for one in found:
            if not isinstance(one, BaseException):
                replies.append(one)
            elif not isinstance(one, EngineUnavailable):
                raise one
        if not replies:
            raise EngineUnavailable(_NONE_SERVES)
        return replies

    async def _compute(self, answer: OpenAnswer) -> AsyncGenerator[list[TokenDelta], None]:
        """Computes the rest of an answer on one engine. Raises EngineUnavailable if the engine is lost."""
        request = answer.request
        num_tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or _ANSWER_TOKENS)
        replica = self._choose(RoutedWork(request.tenant, request.versions, None, num_tokens))
        run = answer.begin_run()
        self._owners[request.request_id] = replica
        replica.open_tokens += num_tokens
        answer.is_sent = True
        try:
            async with aclosing(replica.client.generate(run)) as deltas:
                async for arrived in deltas:
                    if kept := answer.take(arrived):
                        yield kept
        finally:
            replica.open_tokens -= num_tokens
            self._owners.pop(request.request_id, None)

    def _choose(self, work: RoutedWork) -> _Replica:
        if len(self._replicas) == 1:
            replica = self._replicas[0]
            if replica.mismatch is None:
                return replica
        states = [
            ReplicaState(
                replica.name,
                replica.client.versions,
                frozenset(),
                0,
                0,
                _TOKEN_S * replica.open_tokens,
                replica.is_serving,
            )
            for replica in self._replicas
        ]
        names = self._router.choose(work, states)
        if not names:
            raise EngineUnavailable(_NONE_SERVES)
        return self._by_name[names[0]]

    async def _prepare_retry(self, answer: OpenAnswer, error: EngineUnavailable) -> None:
        """Returns when the request can be sent again. Raises `error` if no engine has had the request."""
        while answer.is_sent:  # The connection is broken, but its end has not been read yet.
            await asyncio.sleep(_POLL_S)
        if answer.num_losses == 0 or self._resume_s == 0:
            raise error
        if answer.num_losses >= MAX_LOSSES:
            raise EngineUnavailable(
                f"{MAX_LOSSES} engines died while they processed this request, which may be the cause, so it is not "
                "sent to another one"
            ) from error
        _log.warning(
            "request %s lost its engine after %d tokens; another engine continues it",
            answer.request.request_id,
            answer.num_tokens,
        )
        try:
            async with asyncio.timeout(self._resume_s):
                while not self.ready:
                    self._has_serving.clear()
                    await self._has_serving.wait()
        except TimeoutError:
            raise EngineUnavailable(
                "the engine died while it processed this request, and no engine could continue it within "
                f"{self._resume_s:g} s (--resume-seconds); send the request again"
            ) from error
        if answer.refusal is not None:
            raise answer.refusal
        self.num_resumed += 1

    async def _watch(self) -> None:
        """Wakes the requests that wait for an engine."""
        while True:
            if self.ready:
                self._has_serving.set()
            await asyncio.sleep(_POLL_S)

    def _check_info(self, replica: _Replica) -> None:
        """Takes the facts of an engine that has connected, or refuses the engine if it differs from the others."""
        found = replica.client.info
        if self._info is None or len(self._replicas) == 1:
            self._info = found
            return
        difference = explain_difference(self._info, found)
        if difference is not None:
            _log.error("%s gets no requests: %s; restart the server", replica.name, difference)
        replica.mismatch = difference
        self._info = replace(self._info, num_pages=min(self._info.num_pages, found.num_pages))

    def _receive_usage(
        self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None
    ) -> None:
        """Receives the usage of one run. usage: None if the engine was lost. timing: None also if the engine never had
        the request, or refused it.
        """
        answer = self._answers.get(request_id)
        if answer is None or answer.is_settled:  # The usage of an earlier run has been reported.
            self.acknowledge_usage(request_id)
            return
        answer.is_sent = False
        answer.num_losses += usage is None
        if timing is not None or answer.is_closed:
            self._settle(answer, usage if timing is not None else None, timing)

    def _close(self, answer: OpenAnswer) -> None:
        """Called when no more tokens are wanted. An engine that still has the request reports its usage later."""
        answer.is_closed = True
        if answer.is_settled:
            self._drop(answer)
        elif not answer.is_sent:
            self._settle(answer, None, None)

    def _settle(self, answer: OpenAnswer, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        answer.is_settled = True
        if answer.is_closed:
            self._drop(answer)
        self._on_usage(answer.request.request_id, usage, timing)

    def _drop(self, answer: OpenAnswer) -> None:
        # A line of a batch may have been sent again with the same id.
        if self._answers.get(answer.request.request_id) is answer:
            del self._answers[answer.request.request_id]
