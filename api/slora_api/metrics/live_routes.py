"""/v1/live for a tenant and /admin/live for the operator: the present state of the engine, as the console shows it."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from slora_api.core.errors import ErrorAnswer, ServerBusy, Stopping, TenantBusy
from slora_api.http.openapi import errors, event_stream
from slora_api.http.sse import EventStream
from slora_api.http.wiring import Wired
from slora_api.keys.api_key import BOOTSTRAP_KEY
from slora_api.keys.authentication import Operator, UsageReader
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.frame import FrameObject
from slora_api.metrics.live_feed import LiveFeed

router = APIRouter(tags=["usage"])

_ANSWERS = errors(TenantBusy, ServerBusy) | event_stream(
    FrameObject | None,
    "Server-sent events. The data of each is a JSON object, or null while no engine answers. An error ends the stream, "
    "as an event with the JSON of an error.",
)
# A console requests many frames in one stream. When it has received all of them, it opens another stream.
_NumFrames = Annotated[int, Query(ge=1, le=1_000_000)]


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
    return await _stream(_while_valid(shown, services, key.key_id, request), frames)


@router.get("/admin/live", response_class=Response, responses=_ANSWERS)
async def watch_all(
    request: Request, key: Operator, services: Wired[LiveServices], frames: _NumFrames = 1
) -> Response:
    """Streams the pages, the adapters and the traffic of all tenants, a few times a second.

    frames: the number of frames after which the stream ends.
    """
    shown = services.live.watch(None)
    # All other requests of operators are short, so they need no such check.
    return await _stream(
        shown if key is BOOTSTRAP_KEY else _while_valid(shown, services, key.key_id, request), frames
    )


async def _while_valid(
    shown: AsyncGenerator[bytes, None], services: LiveServices, key_id: str, request: Request
) -> AsyncGenerator[bytes, None]:
    """Ends the stream when its key is revoked or expires."""
    with services.running.track(key_id, request.scope["state"], ends_with_key=True):
        async with aclosing(shown):
            async for frame in shown:
                yield frame


async def _stream(shown: AsyncGenerator[bytes, None], num_frames: int) -> Response:
    try:
        first = await anext(shown)
    except StopAsyncIteration:
        raise Stopping() from None
    return EventStream(first, _take(shown, num_frames - 1), _failure, {})


async def _take(shown: AsyncGenerator[bytes, None], count: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(shown):
        while count:
            async for frame in shown:
                yield frame
                break
            else:
                return
            count -= 1


def _failure(answer: ErrorAnswer) -> Iterable[bytes]:
    yield f"data: {json.dumps(answer.body)}\n\n".encode()
