"""The lines of a batch: reading the input and writing the answers, in OpenAI's format.

An input line: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line that is not such an object, or whose body the endpoint refuses, fails without affecting the other lines.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slora_api.batches.batches import BatchProblem

__all__ = ["MAX_LINES", "BatchLine", "count_lines", "read_lines", "write_failure", "write_response"]

# The limits of OpenAI's API.
MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
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


def split_lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yields the number and the bytes of each line that is not blank. None stands for a line that is too long."""
    rest, number, is_long = b"", 0, False
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            if is_long or len(line) > MAX_LINE_BYTES:
                yield number, None
            elif line.strip():
                yield number, line
            is_long = False
        if len(rest) > MAX_LINE_BYTES:
            rest, is_long = b"", True
    if is_long or rest.strip():
        yield number + 1, None if is_long or len(rest) > MAX_LINE_BYTES else rest


def count_lines(pieces: Iterable[bytes]) -> tuple[int, list[BatchProblem]]:
    """Returns the number of lines, and the problems that make the whole batch fail."""
    count = 0
    for _ in split_lines(pieces):
        count += 1
        if count > MAX_LINES:
            message = f"The file has more than {MAX_LINES} lines; divide it into several batches."
            return count, [BatchProblem("too_many_lines", message)]
    return count, [] if count else [BatchProblem("empty_file", "The file has no lines.")]


def read_lines(pieces: Iterable[bytes], endpoint: str, skipped: Collection[int]) -> Iterator[BatchLine]:
    """Yields the lines of a file, except those whose number is in `skipped`."""
    # The digest of each custom_id -> the first line that has it.
    seen: dict[bytes, int] = {}
    for number, raw in split_lines(pieces):
        line = _read_line(number, raw, endpoint, seen)
        if number not in skipped:
            yield line


def _read_line(number: int, raw: bytes | None, endpoint: str, seen: dict[bytes, int]) -> BatchLine:
    custom_id = None
    try:
        fields = _read_object(raw)
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


def _read_object(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise _Invalid(
            "line_too_long",
            f"The line is longer than {MAX_LINE_BYTES} bytes, the limit of a line in a batch.",
        )
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
        raise _Invalid("invalid_json_line", f"The line is not JSON: {reason}.") from None
    if not isinstance(found, dict):
        raise _Invalid("invalid_json_line", "The line is not a JSON object.")
    return found


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
    return repr(value)[:_SHOWN_CHARS]
