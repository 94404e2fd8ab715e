"""Sends a line of a batch through the routes of this process, as if a client had sent its body.

So a line gets the same checks, quotas and answers as a request over HTTP. The state of the request carries the API key
of the batch and the id of the line. The engine and the usage ledger use this id.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from slora_api.core.errors import ApiError, TenantSuspended, describe_error
from slora_api.core.request_context import BACKGROUND_ID
from slora_api.keys.key_record import KeyRecord
from slora_api.keys.running_requests import RunningRequests

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LineResponse:
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @staticmethod
    def of(error: Exception) -> "LineResponse":
        answer = describe_error(error)
        return LineResponse(answer.status, answer.headers, bytearray(json.dumps(answer.body).encode()))


async def call_route(
    app: ASGIApp, running: RunningRequests, path: str, body: bytes, key: KeyRecord, line_id: str
) -> LineResponse:
    """Computes one line and returns the response. Cancelling the call aborts the request in the engine. Raises
    TenantSuspended if the tenant is suspended before or during the call.
    """
    response = LineResponse()
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "state": {"caller": key, "request_id": line_id, BACKGROUND_ID: line_id},
    }
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # This client never hangs up.
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            pairs = message.get("headers", [])
            response.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        else:
            response.body += message.get("body", b"")

    try:
        with running.track(key.key_id, scope["state"]):
            await app(scope, receive, send)
    except TenantSuspended:
        raise
    except ApiError as error:  # The key was revoked.
        return LineResponse.of(error)
    except Exception as error:  # A bug fails this line only, and is logged.
        logger.error("line %s failed", line_id, exc_info=error)
        return LineResponse.of(error)
    return response
