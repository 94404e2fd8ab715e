"""Reads the JSON body of a generation request within bounds.

FastAPI would parse and validate a body of any structure in one go, which blocks the event loop. This module checks the
structure while the bytes arrive, and other requests can run between its steps.
"""

import asyncio
import json
from collections.abc import Callable
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from slora_api.core.errors import BadRequest
from slora_api.core.threads import tenant_thread
from slora_api.http.field_types import IgnoredFields
from slora_api.http.json_structure import JsonStructure
from slora_api.http.request_bounds import JsonBounds, RequestBounds

T = TypeVar("T")

_PART_BYTES = 1 << 16
# Validating and converting a value takes 1 to 4 microseconds. Bodies with more values are validated on a thread.
_MAX_VALUES_ON_LOOP = 1 << 11
_SHOWN_CHARS = 128


async def read_json(
    request: Request,
    validate: Callable[[dict[str, Any], IgnoredFields], T],
    bounds: RequestBounds,
    json_bounds: JsonBounds,
) -> T:
    """Reads and validates the body. Raises BadRequest or RequestValidationError.

    validate: makes the result from the body, and adds the fields that have no effect to the ignored fields.
    """
    structure, ignored = JsonStructure(json_bounds), request.state.ignored
    body = await _read_object(request, bounds, structure)
    try:
        if structure.num_values <= _MAX_VALUES_ON_LOOP:
            return validate(body, ignored)
        return await tenant_thread(request.state.caller.tenant, validate, body, ignored)
    except ValidationError as error:
        # The answer describes only the first error.
        raise RequestValidationError([_located(error.errors(include_url=False)[0], ignored)]) from None


async def _read_object(request: Request, bounds: RequestBounds, structure: JsonStructure) -> dict[str, Any]:
    """Reads the body as a JSON object, and checks how many items its lists and objects have. Raises BadRequest or
    RequestValidationError.
    """
    raw = await _read_bytes(request, structure)
    if not raw:
        raise _invalid("missing", "Field required")
    text = _decode(raw)
    # Each step takes milliseconds for a body of several megabytes. Other requests can run in between.
    await asyncio.sleep(0)
    body = _parse(text) if _is_json(request.headers.get("content-type", "")) else None
    await asyncio.sleep(0)
    if not isinstance(body, dict):
        raise _invalid("model_attributes_type", "Input should be an object")
    bounds.check_counts(body)
    return body


async def _read_bytes(request: Request, structure: JsonStructure) -> bytes:
    parts = []
    async for chunk in request.stream():
        for start in range(0, len(chunk), _PART_BYTES):
            structure.add(chunk[start : start + _PART_BYTES])
            await asyncio.sleep(0)
        parts.append(chunk)
    return b"".join(parts)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"The body is not UTF-8: no character starts at byte {error.start}. Encode the body as UTF-8."
        ) from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRequest("The body has arrays or objects nested too deeply to be read.") from None
    except json.JSONDecodeError as error:
        raise _invalid("json_invalid", "JSON decode error", {"error": error.msg}) from None


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type or "none/none"
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )


def _invalid(kind: str, text: str, context: dict[str, Any] | None = None) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": ("body",), "msg": text, "ctx": context or {}}])


def _located(error: Any, ignored: IgnoredFields) -> dict[str, Any]:
    """Shortens the field names in the error's location. A client may send names of any length, and the answer repeats
    them. The error of an unknown field gets the name of the field that was probably meant.
    """
    if error["type"] == "extra_forbidden":
        error = {**error, "ctx": {"meant": ignored.find_nearest(error["loc"][-1])}}
    location = [part[:_SHOWN_CHARS] if isinstance(part, str) else part for part in error["loc"]]
    return {**error, "loc": ("body", *location)}
