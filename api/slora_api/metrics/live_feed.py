"""/v1/live for a tenant and /admin/live for the operator: the present state of the engine, as the console shows it.

One task observes the engine a few times a second while a console watches.

All viewers of this process share its observations, and viewers with the same rights share the JSON of a frame. A viewer
that reads slowly skips frames and gets the newest one. It delays no other viewer, and no frames are kept for it.
Without viewers, nothing is observed, and the engine records nothing.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from slora.client.client import EngineClient
from slora.core.engine_state import LiveState
from slora.core.errors import EngineUnavailable
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import ErrorAnswer, ServerBusy, Stopping, TenantBusy
from slora_api.http.openapi import errors, event_stream
from slora_api.http.sse import EventStream
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator, UsageReader
from slora_api.keys.key_record import BOOTSTRAP_KEY
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.frame import FrameMaker, FrameObject, Names
from slora_api.metrics.names import ServerNames

logger = logging.getLogger(__name__)

router = APIRouter(tags=["usage"])

_ANSWERS = errors(TenantBusy, ServerBusy) | event_stream(
    FrameObject | None,
    "Server-sent events. The data of each is a JSON object, or null while no engine answers. An error ends the stream, "
    "as an event with the JSON of an error.",
)
# A console requests many frames in one stream. When it has received all of them, it opens another stream.
_NumFrames = Annotated[int, Query(ge=1, le=1_000_000)]

_INTERVAL_S = 0.4
# The interval between two observations is at least this time multiplied by the number of watching tenants. Each tenant
# has a frame of its own, which takes half a millisecond on the event loop.
_TENANT_INTERVAL_S = 0.015
# The engine stops recording if it is not observed for five seconds.
_MAX_INTERVAL_S = 4.0
# How long an observation may take. The engine answers between two steps. After this time, viewers get null instead of a
# frame.
_PATIENCE_S = 5.0
# The maximum numbers of viewers in one process: of all tenants, and of one tenant. The operators together count as one
# tenant.
_MAX_VIEWERS, _MAX_VIEWERS_OF_TENANT = 512, 64


class LiveFeed:
    """Observes the engine for the viewers of this process.

    is_stopping: whether the server is shutting down, which ends all feeds.
    """

    def __init__(
        self,
        client: EngineClient,
        names: ServerNames,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._names = names
        self._is_stopping = is_stopping
        self._viewers: Counter[str | None] = Counter()
        self._sampling: asyncio.Task[None] | None = None
        self._maker: FrameMaker | None = None
        self._texts: dict[str | None, bytes] = {}
        self._number = 0
        self._changed = asyncio.Event()
        self.num_observations = 0

    async def watch(self, tenant: str | None) -> AsyncGenerator[bytes, None]:
        """Yields frames as server-sent events, until the server stops. A frame is null while no engine answers.

        tenant: the id of the viewer's tenant; None for an operator. Raises TenantBusy or ServerBusy.
        """
        self._admit(tenant)
        self._viewers[tenant] += 1
        try:
            # The first frame must come from an observation that includes this viewer's tenant.
            seen = self._number
            if self._sampling is None or self._sampling.done():
                # The feed belongs to no tenant, not even to that of its first viewer.
                self._sampling = asyncio.create_task(self._sample(), context=Context())
            while not self._is_stopping():
                if self._number == seen:
                    await self._changed.wait()
                    continue
                seen = self._number
                yield self._encode(tenant)
        finally:
            self._viewers[tenant] -= 1
            if not self._viewers[tenant]:
                del self._viewers[tenant]

    def _admit(self, tenant: str | None) -> None:
        if self._viewers[tenant] >= _MAX_VIEWERS_OF_TENANT:
            raise TenantBusy(
                f"{_MAX_VIEWERS_OF_TENANT} consoles watch with keys of the same tenant already. Close one of them."
            )
        if self._viewers.total() >= _MAX_VIEWERS:
            raise ServerBusy(f"{_MAX_VIEWERS} consoles watch this server already. Try again later.")

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while self._viewers:
            begun_at = loop.time()
            try:
                await self._observe()
            except Exception:
                # The viewers get null, so that a bug does not leave them waiting forever.
                logger.exception("the live feed failed to observe the engine")
                self._publish(None)
            interval_s = min(max(_INTERVAL_S, _TENANT_INTERVAL_S * len(self._viewers)), _MAX_INTERVAL_S)
            await asyncio.sleep(max(interval_s / 4, begun_at + interval_s - loop.time()))

    async def _observe(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                stats = await self._client.stats({one for one in self._viewers if one is not None})
        except (EngineUnavailable, TimeoutError):
            self._publish(None)
            return
        assert stats.live is not None
        names = await self._look_up_names(stats.live)
        self.num_observations += 1
        self._publish(FrameMaker(stats, names))

    async def _look_up_names(self, live: LiveState) -> Names:
        """Looks up the names of the tenants and adapters that a viewer may see."""
        shown = {(owner.tenant, owner.digest) for owner in live.page_map.owners}
        shown |= {(work.tenant, work.digest) for work in live.adapters}
        shown |= {(event.tenant, event.digest) for event in live.events}
        tenants = {tenant for tenant, _ in shown} | live.tenants.keys()
        if None not in self._viewers:
            tenants &= self._viewers.keys()
        versions = {
            AdapterVersion(tenant, digest) for tenant, digest in shown if digest and tenant in tenants
        }
        return Names(
            await self._names.adapters.find(versions), await self._names.tenants.find(tenants - {""})
        )

    def _publish(self, maker: FrameMaker | None) -> None:
        self._maker, self._texts = maker, {}
        self._number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _encode(self, tenant: str | None) -> bytes:
        text = self._texts.get(tenant)
        if text is None:
            frame = None if self._maker is None else self._maker.make(tenant)
            text = self._texts[tenant] = f"data: {json.dumps(frame, separators=(',', ':'))}\n\n".encode()
        return text


@dataclass(frozen=True, slots=True)
class LiveServices:
    """What the routes of live frames use."""

    live: LiveFeed
    running: RunningRequests


@router.get("/v1/live", response_class=Response, responses=_ANSWERS)
async def watch_own(
    request: Request, key: UsageReader, services: Wired[LiveServices], frames: _NumFrames = 1
) -> Response:
    """Streams the pages, the adapters and the traffic of the tenant, a few times a second. Other tenants appear only as
    sums.

    frames: the number of frames after which the stream ends.
    """
    shown = services.live.watch(key.tenant)
    shown = _while_valid(shown, services, key.key_id, request)
    return EventStream(_take(shown, frames), _failure, {})


@router.get("/admin/live", response_class=Response, responses=_ANSWERS)
async def watch_all(
    request: Request, key: Operator, services: Wired[LiveServices], frames: _NumFrames = 1
) -> Response:
    """Streams the pages, the adapters and the traffic of all tenants, a few times a second.

    frames: the number of frames after which the stream ends.
    """
    shown = services.live.watch(None)
    # All other requests of operators are short, so they need no such check.
    if key is not BOOTSTRAP_KEY:
        shown = _while_valid(shown, services, key.key_id, request)
    return EventStream(_take(shown, frames), _failure, {})


async def _while_valid(
    shown: AsyncGenerator[bytes, None], services: LiveServices, key_id: str, request: Request
) -> AsyncGenerator[bytes, None]:
    """Ends the stream when its key is revoked or expires."""
    with services.running.track(key_id, request.scope["state"], ends_with_key=True):
        async with aclosing(shown):
            async for frame in shown:
                yield frame


async def _take(shown: AsyncGenerator[bytes, None], num_frames: int) -> AsyncGenerator[bytes, None]:
    num_taken = 0
    async with aclosing(shown):
        async for frame in shown:
            yield frame
            num_taken += 1
            if num_taken == num_frames:
                return
    if not num_taken:
        raise Stopping()


def _failure(answer: ErrorAnswer) -> Iterable[bytes]:
    yield f"data: {json.dumps(answer.body)}\n\n".encode()
