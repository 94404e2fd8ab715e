"""Reads the JSON body of a generation request within bounds.

FastAPI would parse and validate a body of any structure in one go, which blocks the event loop. This module counts the
values of a body while its bytes arrive, and other requests can run between its steps.

Parsing holds the interpreter lock until it ends, even on another thread. The time that parsing takes depends on the
number of values and on the length of numbers, so both are bounded here. Strings are cheap: parsing 4 MB of strings
takes 10 ms.

Worked example: `{"a": [1, "x,y"]}` counts as 4 values: one for each opening bracket, one for each comma outside
strings, and one for the whole body.
"""

import asyncio
import json
import re
from collections.abc import Callable
from email.message import Message
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from slora.core.errors import describe_context
from slora_api.core.errors import BadRequest
from slora_api.core.threads import tenant_thread
from slora_api.http.field_types import IgnoredFields
from slora_api.http.request_bounds import JsonBounds, RequestBounds

T = TypeVar("T")

# The pattern also matches an unterminated string at the end of the searched bytes. Otherwise, the search would try the
# pattern again at each later quote.
_TOKEN = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)(?:"|\\?\Z)|[][{},]', re.DOTALL)
# The search for the name of the largest field covers this many bytes from the start of a body. It takes 1 ms.
_NAMING_BYTES = 1 << 14
_SHOWN_BYTES = 128
_PART_BYTES = 1 << 16
# Validating and converting a value takes 1 to 4 microseconds. Bodies with more values are validated on a thread.
_MAX_VALUES_ON_LOOP = 1 << 11
_SHOWN_CHARS = 128
# The fields that hold a prompt.
_PROMPTS = ("prompt", "input", "messages")


class JsonStructure:
    """The counts of one body. num_bare_bytes: bytes outside strings."""

    def __init__(self, bounds: JsonBounds) -> None:
        self.num_values = 1
        self.num_members = 0
        self.num_bare_bytes = 0
        self._bounds = bounds
        self._long_number = re.compile(rb"[0-9.eE+-]{%d}" % (bounds.number_chars + 1))
        self._begin = b""
        self._in_string = False
        # A backslash at the end of a part, which may escape the first byte of the next part.
        self._held = b""
        # The end of the previous part. A number may continue in the next part.
        self._tail = b""

    def add(self, part: bytes) -> None:
        """Counts the values in the next part of the body. A part should have at most 64 KiB, which takes 1.5 ms. Raises
        BadRequest.
        """
        if len(self._begin) < _NAMING_BYTES:
            self._begin += part[: _NAMING_BYTES - len(self._begin)]
        bare = self._outside_strings(part)
        self.num_values += bare.count(b",") + bare.count(b"[") + bare.count(b"{")
        self.num_members += bare.count(b":")
        self.num_bare_bytes += len(bare)
        if self.num_values > self._bounds.values:
            raise self._refusal(
                f"has more than {self._bounds.values} values (strings, numbers, arrays and objects), this server's "
                "limit. Send fewer items, and a long prompt as text instead of token ids"
            )
        if self.num_members > self._bounds.members:
            raise self._refusal(
                f"has objects with more than {self._bounds.members} fields in all, this server's limit. Send fewer "
                "items"
            )
        if self.num_bare_bytes > self._bounds.bare_bytes:
            raise self._refusal(
                f"has more than {self._bounds.bare_bytes} bytes outside strings, this server's limit. Send fewer "
                "items, and less white space between them"
            )
        tail = self._tail + bare
        if self._long_number.search(tail):
            # The field with the most values need not be the one that holds the number.
            raise BadRequest(
                f"The body contains a number of more than {self._bounds.number_chars} characters, this server's "
                "limit. Round the number."
            )
        self._tail = b"" if self._in_string else tail[-self._bounds.number_chars :]

    def _outside_strings(self, part: bytes) -> bytes:
        part = self._held + part
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        self._held = part[len(part) - num_backslashes % 2 :]
        part = part[: len(part) - num_backslashes % 2]
        if b"\\" in part:  # This check takes a hundredth of the time of the replacements.
            # Remove escaped backslashes, then escaped quotes. Each remaining quote begins or ends a string.
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        bare = b'"'.join(pieces[int(self._in_string) :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        return bare

    def _refusal(self, reason: str) -> BadRequest:
        param, context, code = self._largest_field(), "", None
        if param in _PROMPTS and self._bounds.max_model_len is not None:
            # Clients look for this code, and then shorten the prompt.
            context, code = f" {describe_context(self._bounds.max_model_len)}", "context_length_exceeded"
        return BadRequest(f"{f'`{param}`' if param else 'The body'} {reason}.{context}", param, code)

    def _largest_field(self) -> str | None:
        """Returns the top-level field with the most values in the first `_NAMING_BYTES` of the body."""
        counts: dict[bytes, int] = {}
        depth, field = 0, b""
        for match in _TOKEN.finditer(self._begin):
            token = match[0]
            if token[:1] == b'"':
                field = match[1] if depth == 1 else field
            elif token in b"[{":
                depth += 1
            elif token in b"]}":
                depth -= 1
            elif depth > 1:
                counts[field] = counts.get(field, 0) + 1
        largest = max(counts, key=lambda name: counts[name], default=b"")
        return largest[:_SHOWN_BYTES].decode(errors="replace") or None


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
    # Each step takes milliseconds for a body of several megabytes. Other requests can run in between.
    is_long = len(raw) > _PART_BYTES
    text = _decode(raw)
    if is_long:
        await asyncio.sleep(0)
    body = _parse(text) if _is_json(request.headers.get("content-type", "")) else None
    if is_long:
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
            if start + _PART_BYTES < len(chunk):
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


@lru_cache(maxsize=16)
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
