"""Definitions that the schemas of JSON bodies share: their configuration, the types of text, and checks of values."""

import json
from collections.abc import Set
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError, to_json

from slora_api.request_bounds import MAX_NAME_CHARS

__all__ = [
    "MAX_DEPTH",
    "STRICT",
    "Name",
    "Text",
    "check_depth",
    "check_length",
    "check_object",
    "join_text_parts",
    "make_refusal",
    "refuse_surrogates",
]

# No field is ignored silently, and no value is converted.
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
# Maximum nesting of arrays and objects. It is deeper than any schema that OpenAI accepts.
MAX_DEPTH = 64
_SHOWN_CHARS = 64


def make_refusal(text: str, **values: object) -> PydanticCustomError:
    """Returns the error of an invalid value. values: the values of the placeholders in the text. If they include
    `param`, the error names that field instead of the invalid one.
    """
    return PydanticCustomError("invalid_value", text, values)


def refuse_surrogates(value: str) -> None:
    """Refuses lone surrogates. JSON can contain them, but they are not characters, and tokenizers and databases fail on
    them.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise make_refusal(
            "character {position} is {half}, a lone surrogate and not a character; remove it",
            position=error.start,
            half=f"U+{ord(value[error.start]):04X}",
        ) from None


def check_length(value: str, limit: int) -> None:
    if len(value) > limit:
        raise make_refusal(
            "it has {length} characters, and at most {limit} are accepted; shorten it",
            length=len(value),
            limit=limit,
        )


def check_depth(value: Any, limit: int = MAX_DEPTH) -> Any:
    """Returns the value. Refuses arrays and objects nested more than `limit` levels deep, because writing JSON of 1,000
    levels raises RecursionError.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return value
        # Comparing types takes half the time of isinstance. Parsed JSON has no subclasses of these types.
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
    if level:
        raise make_refusal("it is nested more than {limit} levels deep; flatten it", limit=limit)
    return value


def check_object(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON object. Refuses an object that contains a lone surrogate or has more than `MAX_DEPTH` levels."""
    try:
        text = to_json(value)
    except ValueError:  # The value has a surrogate, or more levels than `to_json` accepts.
        refuse_surrogates(json.dumps(check_depth(value), ensure_ascii=False))
        raise
    # An object with at most `MAX_DEPTH` brackets cannot be nested too deeply. Most objects are this small, and counting
    # is faster than `check_depth`.
    return value if text.count(b"{") + text.count(b"[") <= MAX_DEPTH else check_depth(value)


def join_text_parts(value: Any, param: str, kinds: Set[str], ignored: Set[str] = frozenset()) -> Any:
    """Joins a list of text parts into one text. Any other kind of part is refused by name.

    kinds: the accepted values of `type`. ignored: fields of a part that have no effect.
    """
    if not isinstance(value, list):
        return value
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if (
            not isinstance(kind, str)
            or kind not in kinds
            or not isinstance(part.get("text"), str)
            or part.keys() - ignored != {"type", "text"}
        ):
            shown = repr(kind[:_SHOWN_CHARS]) if isinstance(kind, str) else "it is not a valid name"
            raise make_refusal(
                "`{param}`: a content part of type {kind} is not supported; this model reads text only.",
                param=param,
                kind=shown,
            )
    return "".join(part["text"] for part in value)


def _check_text(value: str) -> str:
    refuse_surrogates(value)
    return value


def _check_name(value: str) -> str:
    refuse_surrogates(value)
    check_length(value, MAX_NAME_CHARS)
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Name = Annotated[str, AfterValidator(_check_name)]
