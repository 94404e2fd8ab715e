"""JSON from untrusted files: an object whose keys are unique, with no NaN, at most as long as its caller
allows.

Python's reader keeps the last of two equal keys and accepts NaN, so that two programs can read two different
things out of one file. Here both are errors.
"""

import json
from typing import NoReturn


def parse_object(raw: bytes | memoryview, *, source: str, max_bytes: int) -> dict[str, object]:
    """The JSON object in `raw`. Raises ValueError, with `source` named in the message, if it is not exactly
    one.
    """
    if len(raw) > max_bytes:
        raise ValueError(f"{source} is {len(raw)} bytes long; at most {max_bytes} are accepted")
    try:
        value = json.loads(
            bytes(raw).decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
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
