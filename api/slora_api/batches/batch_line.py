"""The lines of a batch: reading the input and writing the answers, in OpenAI's format.

An input line: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line that is not such an object, or whose body the endpoint refuses, fails without affecting the other lines.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from slora_adapters.errors import abbreviate
from slora_api.batches.batches import BatchProblem
from slora_api.core.errors import BadRequest
from slora_api.http.json_body import JsonStructure
from slora_api.http.request_bounds import CHAT_VALUES, COMPLETION_VALUES, JsonBounds

_T = TypeVar("_T")

# The limits of OpenAI's API.
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
# The largest number of a line. Blank lines count, so that a file of blank lines is refused soon.
_MAX_NUMBER = 2 * MAX_LINES
# The number of lines that are read in one step. A step takes milliseconds, apart from the time for parsing long lines.
_LINES_AT_ONCE = 256
# The first byte of a line that is not blank, as `bytes.strip` defines it.
_INK = re.compile(rb"\S")
# The bound of the values of a line: those of a body, and those around it in the line.
_VALUES = {
    path: values + 16
    for path, values in (
        ("/v1/chat/completions", CHAT_VALUES),
        ("/v1/responses", CHAT_VALUES),
        ("/v1/completions", COMPLETION_VALUES),
        ("/v1/embeddings", COMPLETION_VALUES),
    )
}
# A line of this length is parsed in less than 2 ms, whatever its structure.
_SHORT_BYTES = 1 << 14
_PART_BYTES = 1 << 16
_MAX_ID_CHARS = 512
_SHOWN_CHARS = 64
# Fields that are removed from a body, because the answers of a batch are not streamed.
_STREAMING = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of an input file.

    number: the line number in the file, from 1. Blank lines count.
    custom_id: None if the line has no valid custom_id.
    body: the request as JSON.
    problem: the reason why the line can't be computed.
    """

    number: int
    custom_id: str | None
    body: bytes
    problem: BatchProblem | None = None


class _Invalid(ValueError):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def split_lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes | None] | None]:
    """Yields the number and the bytes of each line that is not blank. The bytes are None if the line is too long.

    Yields None after each piece, so that a caller can stop there: a piece may consist of blank lines. Blank lines take
    no step of Python each. Raises TooManyLines.
    """
    rest, number, is_long = b"", 0, False
    for piece in pieces:
        text, start = rest + piece, 0
        while number <= _MAX_NUMBER:
            if not is_long:
                # Count the blank lines before the next byte that is not blank.
                ink = _INK.search(text, start)
                blank_end = 1 + text.rfind(b"\n", start, ink.start() if ink else len(text))
                number += text.count(b"\n", start, blank_end)
                start = max(start, blank_end)
            end = text.find(b"\n", start)
            if end < 0:
                break
            number += 1
            yield number, None if is_long or end - start > MAX_LINE_BYTES else text[start:end]
            is_long, start = False, end + 1
        else:
            raise TooManyLines(f"{_MAX_NUMBER} lines, blank lines included")
        rest = b"" if is_long else text[start:]
        if len(rest) > MAX_LINE_BYTES:
            rest, is_long = b"", True
        yield None
    if is_long or rest.strip():
        yield number + 1, None if is_long else rest


class TooManyLines(ValueError):
    """The file has more lines than a batch may have."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"The file has more than {limit}; divide it into several batches.")


def take_lines(lines: Iterator[_T | None]) -> list[_T] | None:
    """Returns the lines until the next None, and at most `_LINES_AT_ONCE` of them; None at the end."""
    taken: list[_T] = []
    for line in lines:
        if line is None:
            return taken
        taken.append(line)
        if len(taken) == _LINES_AT_ONCE:
            return taken
    return taken or None


def read_lines(
    pieces: Iterable[bytes], endpoint: str, skipped: Collection[int]
) -> Iterator[BatchLine | None]:
    """Yields the lines of a file, except those whose number is in `skipped`. Yields None between lines; see
    `split_lines`.
    """
    # The digest of each custom_id -> the first line that has it.
    seen: dict[bytes, int] = {}
    for found in split_lines(pieces):
        if found is None:
            yield None
            continue
        number, raw = found
        line = _read_line(number, raw, endpoint, seen)
        if number not in skipped:
            yield line


def _read_line(number: int, raw: bytes | None, endpoint: str, seen: dict[bytes, int]) -> BatchLine:
    custom_id = None
    try:
        fields = _read_object(raw, endpoint)
        custom_id = _read_custom_id(fields, number, seen)
        body = _read_body(fields, endpoint)
    except _Invalid as error:
        return BatchLine(number, custom_id, b"", BatchProblem(error.code, error.message, number, error.param))
    kept = {name: value for name, value in body.items() if name not in _STREAMING}
    return BatchLine(number, custom_id, json.dumps(kept, separators=(",", ":")).encode())


def write_response(line: BatchLine, answer_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Returns the line of an answer file for an HTTP response. body: JSON."""
    response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (
        status,
        json.dumps(request_id).encode(),
        body.replace(b"\n", b""),
    )
    return b'{"id":%s,"custom_id":%s,"line":%d,"response":%s,"error":null}\n' % (
        json.dumps(answer_id).encode(),
        json.dumps(line.custom_id).encode(),
        line.number,
        response,
    )


def write_failure(line: BatchLine, answer_id: str, problem: BatchProblem) -> bytes:
    """Returns the line of the error file for an input line without an HTTP response."""
    values = {
        "id": answer_id,
        "custom_id": line.custom_id,
        "line": line.number,
        "response": None,
        "error": {"code": problem.code, "message": problem.message, "param": problem.param},
    }
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _read_object(raw: bytes | None, endpoint: str) -> dict[str, Any]:
    if raw is None:
        raise _Invalid(
            "line_too_long",
            f"The line is longer than {MAX_LINE_BYTES} bytes, the limit of a line in a batch.",
        )
    _check_structure(raw, endpoint)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
        raise _Invalid("invalid_json_line", f"The line is not JSON: {reason}.") from None
    if not isinstance(found, dict):
        raise _Invalid("invalid_json_line", "The line is not a JSON object.")
    return found


def _check_structure(raw: bytes, endpoint: str) -> None:
    """Applies the bounds of a body of `endpoint` to a line, because parsing holds the interpreter lock."""
    if len(raw) <= _SHORT_BYTES:
        return
    structure = JsonStructure(JsonBounds(_VALUES[endpoint]))
    try:
        for start in range(0, len(raw), _PART_BYTES):
            structure.add(raw[start : start + _PART_BYTES])
    except BadRequest as error:
        raise _Invalid("invalid_request", str(error), error.param) from None


def _read_custom_id(fields: dict[str, Any], number: int, seen: dict[bytes, int]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS or not _is_text(custom_id):
        raise _Invalid(
            "invalid_custom_id",
            f"`custom_id` must be a text of 1 to {_MAX_ID_CHARS} characters.",
            "custom_id",
        )
    first = seen.setdefault(hashlib.blake2b(custom_id.encode(), digest_size=16).digest(), number)
    if first != number:
        raise _Invalid(
            "duplicate_custom_id",
            f"`custom_id` is {custom_id[:_SHOWN_CHARS]!r} in line {first} and in line {number}; give each line its "
            "own.",
            "custom_id",
        )
    return custom_id


def _read_body(fields: dict[str, Any], endpoint: str) -> dict[str, Any]:
    method, url, body = (fields.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise _Invalid("invalid_method", f"`method` is {_show(method)}; it must be POST.", "method")
    if url != endpoint:
        raise _Invalid(
            "invalid_url", f"`url` is {_show(url)}; the endpoint of this batch is {endpoint}.", "url"
        )
    if not isinstance(body, dict):
        raise _Invalid("invalid_body", "`body` must be a JSON object.", "body")
    if body.get("stream"):
        raise _Invalid(
            "invalid_request",
            "`stream` is true, but the answers of a batch are not streamed; omit it.",
            "stream",
        )
    if body.get("deadline_ms") is not None:
        raise _Invalid(
            "invalid_request",
            "`deadline_ms` is set, but the lines of a batch wait for idle capacity; omit it.",
            "deadline_ms",
        )
    return body


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # The text has an unpaired surrogate.
        return False
    return True


def _show(value: Any) -> str:
    return abbreviate(value)[:_SHOWN_CHARS]
