"""The count of a body's JSON values does not depend on how its bytes are split, and is never below the true number."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_api.core.errors import BadRequest
from slora_api.http.json_body import JsonStructure
from slora_api.http.request_bounds import JsonBounds

TEXTS = st.text(st.sampled_from('ab,:[]{}"\\\n é\U0001f600'), max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
WIDE = JsonBounds(10**6, members=10**6)


def num_values(value: Any) -> int:
    """The number of values as the reader counts them: items and brackets. A container's first item is counted with
    its bracket."""
    if isinstance(value, list | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        return 1 + sum(num_values(item) - 1 for item in items) + max(1, len(items))
    return 1


def num_members(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(num_members, value.values()))
    return sum(map(num_members, value)) if isinstance(value, list) else 0


def count(raw: bytes, size: int, bounds: JsonBounds = WIDE) -> JsonStructure:
    structure = JsonStructure(bounds)
    for start in range(0, len(raw), size):
        structure.add(raw[start : start + size])
    return structure


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_values_and_members_are_counted_outside_strings_only(value: Any, ascii_only: bool, size: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    parts, whole = count(raw, size), count(raw, len(raw))
    assert parts.num_values == whole.num_values == num_values(value)
    assert parts.num_members == whole.num_members == num_members(value)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b'{"model": "m", "stop": [1], "prompt": [' + b"1," * 200, "prompt", "more than 100 values"),
        (b'{"prompt": [[' + b'"a,\\",b",' * 200, "prompt", "more than 100 values"),
        (b"[" * 200, None, "more than 100 values"),
        (b'{"a": {' + b'"x":1' * 60, "a", "more than 50 fields"),
        (b'{"a": ' + b" " * 2000, None, "more than 1000 bytes outside strings"),
        (
            b'{"prompt": [1, 2], "seed": ' + b"1" * 70,
            None,
            "^The body contains a number of more than 64 char",
        ),
    ],
)
def test_a_body_over_a_bound_is_refused_with_the_field_and_the_limit(
    raw: bytes, size: int, param: str | None, words: str
) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        count(raw, size, JsonBounds(100, members=50, bare_bytes=1000))
    # A chunk may end before the field's first comma.
    assert caught.value.param in (param, None)


def test_commas_quotes_and_digits_of_a_text_are_not_counted() -> None:
    text = 'say "yes", \\ or no: [' + "1" * 500 + "\\"
    assert count(json.dumps([text] * 3).encode(), 5, JsonBounds(4)).num_values == 4
