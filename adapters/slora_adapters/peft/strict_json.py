"""Parses JSON objects from untrusted files: unique keys, no NaN, no lone surrogates, and a limit on their length.

Python's own reader keeps the last of two equal keys, and other programs may keep the first. Python's reader
also accepts NaN and lone surrogates, which fail later when the value is written as JSON or UTF-8. This module raises
ValueError in each of these cases.
"""

import json
import re
import sys
from typing import NoReturn

from slora_adapters.errors import abbreviate

# Matches an escaped surrogate. UTF-8 cannot encode surrogates, so JSON can contain them only as such escapes.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes | memoryview, *, source: str, max_bytes: int) -> dict[str, object]:
    """Returns the JSON object in `raw`. Raises ValueError, which names `source`, if `raw` is not valid."""
    if len(raw) > max_bytes:
        raise ValueError(f"{source} is {len(raw)} bytes long; at most {max_bytes} are accepted")
    try:
        text = bytes(raw).decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(text):
            _refuse_lone_surrogates(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON: {explain_fault(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds the JSON value {abbreviate(value)}, not an object")
    return value


def explain_fault(error: ValueError | RecursionError) -> str:
    """Says in plain words why `json.loads` cannot read a text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} begins no character of UTF-8; save the text as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        has_mark = error.doc.startswith("\ufeff")
        return "it begins with a byte order mark; save it without one" if has_mark else str(error)
    if isinstance(error, _Refused):
        return str(error)
    # Python does not convert such a number, because that takes quadratic time.
    return f"a number has more than {sys.get_int_max_str_digits()} digits; shorten it"


class _Refused(ValueError):
    """JSON that Python's own reader accepts."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"key {key[:80]!r} appears twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number")


def _refuse_lone_surrogates(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone, before = ord(text[error.start]), text[max(0, error.start - 40) : error.start]
        raise _Refused(f"it contains the lone surrogate U+{lone:04X} after {before!r}; remove it") from None
