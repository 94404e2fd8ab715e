"""Parses JSON objects from untrusted files: unique keys, no NaN, no lone surrogates, and a limit on their length.

Python's own reader keeps the last of two equal keys, and other programs may keep the first. Python's reader
also accepts NaN and lone surrogates, which fail later when the value is written as JSON or UTF-8. This module raises
ValueError in each of these cases.
"""

import json
import re
from typing import NoReturn

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
        raise ValueError(f"{source} is not valid JSON: {error or 'nested too deeply'}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} appears twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_lone_surrogates(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone, before = ord(text[error.start]), text[max(0, error.start - 40) : error.start]
        raise ValueError(f"it contains the lone surrogate U+{lone:04X} after {before!r}; remove it") from None
