"""/v1/fanout: one prompt for several models.

Each model's answer is computed as if it were a separate request: it has its own permits, its own quota charges, its own
records in the usage ledger, and its own error. When the client hangs up, all answers are aborted.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from starlette.types import Message

from slora_adapters.errors import SloraError, StoreUnavailable
from slora_api.errors import BadRequest, ErrorAnswer, Starting, describe_error
from slora_api.fanout.fanout_format import AnswerEnvelope, FanoutEvent, FanoutObject, join_answers
from slora_api.fanout.fanout_request import (
    ChatFanoutRequest,
    CompletionFanoutRequest,
    FanoutRequest,
    split_request,
)
from slora_api.generation.answering import AnswerResponse, take_first
from slora_api.generation.completion_stream import merge_streams
from slora_api.generation.json_slices import encode_ascii
from slora_api.generation.parted_response import PartedResponse
from slora_api.generation.sse import EventStream, unless_disconnected
from slora_api.http.json_body import read_object, validate_object
from slora_api.request_bounds import JsonBounds
from slora_api.request_context import current_request
from slora_api.routes.completions import answer_chat, answer_completion
from slora_api.routes.openapi import errors, event_stream, json_body
from slora_api.routes.services import Services, Wired, open_meter
from slora_api.tenants.authentication import InferenceKey
from slora_api.tenants.key_record import KeyRecord

__all__ = ["router"]

logger = logging.getLogger(__name__)

router = APIRouter(tags=["completions"])

_EVENTS = (
    "Server-sent events. The data of each is a JSON object that names the answer it belongs to, and `data: [DONE]` "
    "ends the stream. If the whole call fails, an event with the JSON of an error ends the stream."
)


@router.post(
    "/v1/fanout",
    response_model=FanoutObject,
    responses=event_stream(FanoutEvent, _EVENTS) | errors(Starting),
    openapi_extra=json_body(ChatFanoutRequest, CompletionFanoutRequest),
)
async def fan_out(request: Request, key: InferenceKey, services: Wired) -> Response:
    """Sends one prompt to several models and returns their answers side by side.

    Each answer has a status of its own. The status of the whole call is 200 even if answers failed.
    """
    await open_meter(request, key, services)
    body = await _read(request, services)
    call_id: str = request.state.request_id
    calls = [
        _Call(request, index, one, key, services, f"{call_id}-{index}")
        for index, one in enumerate(split_request(body))
    ]
    if not body.stream:
        answers = await unless_disconnected(request.receive, _answer_all(calls))
        return PartedResponse(join_answers(call_id, answers), {})
    events = _merge(calls)
    return EventStream(await unless_disconnected(request.receive, take_first(events)), events, _failure, {})


async def _read(request: Request, services: Services) -> FanoutRequest:
    bounds = services.bounds()
    sent = await read_object(request, bounds, JsonBounds(bounds.chat_values))
    if ("messages" in sent) == ("prompt" in sent):
        raise BadRequest("Send either `messages` or `prompt`.", "messages")
    if "messages" in sent:
        return await validate_object(ChatFanoutRequest, sent)
    return await validate_object(CompletionFanoutRequest, sent)


class _Call:
    """The request for one model's answer, as a part of the whole call."""

    def __init__(
        self,
        request: Request,
        index: int,
        body: FanoutRequest,
        key: KeyRecord,
        services: Services,
        request_id: str,
    ) -> None:
        state = {**request.scope["state"], "request_id": request_id}
        self._request = Request({**request.scope, "state": state}, _wait_for_ever)
        self._body = body
        self._key = key
        self._services = services
        self._request_id = request_id
        self._envelope = AnswerEnvelope(index, body.model, request_id)

    async def whole(self) -> list[bytes]:
        """Returns the parts of the JSON of one complete answer."""
        answered = await self._answer()
        if isinstance(answered, ErrorAnswer):
            body: Sequence[bytes] = [json.dumps(answered.body).encode()]
            return self._envelope.whole(answered.status, answered.headers, body)
        assert isinstance(answered, PartedResponse), "the request asks for no stream"
        return self._envelope.whole(answered.status_code, answered.headers, answered.parts)

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Yields the events of the answer."""
        answered = await self._answer()
        if isinstance(answered, ErrorAnswer):
            yield [self._envelope.opening(answered.status, answered.headers)]
            yield [self._envelope.chunk(encode_ascii(answered.body).encode())]
        else:
            assert isinstance(answered, EventStream), "the request asks for a stream"
            async with aclosing(answered), aclosing(answered.parts(self._request_id)) as parts:
                yield [self._envelope.opening(answered.status_code, answered.headers)]
                async for part in parts:
                    yield [self._envelope.chunks(part)]
        yield [self._envelope.closing()]

    async def _answer(self) -> AnswerResponse | ErrorAnswer:
        # Each answer runs in its own task, so this changes the context of this answer only.
        if (context := current_request.get()) is not None:
            current_request.set(replace(context, request_id=self._request_id))
        try:
            meter = await open_meter(self._request, self._key, self._services)
            if isinstance(self._body, ChatFanoutRequest):
                return await answer_chat(self._request, self._body, self._key, meter, self._services)
            return await answer_completion(self._request, self._body, self._key, meter, self._services)
        except Exception as error:  # An error ends this answer only.
            if isinstance(error, StoreUnavailable):  # The client's answer leaves out the details.
                logger.warning("request %s: %s", self._request_id, error)
            elif not isinstance(error, SloraError):
                logger.error("request %s failed", self._request_id, exc_info=error)
            return describe_error(error)


async def _wait_for_ever() -> Message:
    """The ASGI `receive` of one model's request. It never returns, because the fan-out itself notices when the client
    hangs up.
    """
    await asyncio.Event().wait()
    raise AssertionError


async def _answer_all(calls: Sequence[_Call]) -> list[list[bytes]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call.whole()) for call in calls]
    return [task.result() for task in tasks]


async def _merge(calls: Sequence[_Call]) -> AsyncGenerator[bytes, None]:
    async with aclosing(merge_streams([call.events() for call in calls])) as merged:
        async for events in merged:
            yield b"".join(events)
    yield b"data: [DONE]\n\n"


def _failure(error: ErrorAnswer) -> list[bytes]:
    return [f"data: {encode_ascii(error.body)}\n\n".encode("ascii")]
