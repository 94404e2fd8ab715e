"""What the schemas of JSON bodies share: their configuration, the types of text, and checks of values."""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from slora_api.request_bounds import MAX_NAME_CHARS

__all__ = [
    "MAX_DEPTH",
    "STRICT",
    "Name",
    "Text",
    "check_depth",
    "check_length",
    "make_refusal",
    "refuse_surrogates",
]

# No field is ignored silently, and no value is converted.
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
# Levels of arrays and objects: deeper than any schema that OpenAI accepts.
MAX_DEPTH = 64


def make_refusal(text: str, **values: object) -> PydanticCustomError:
    """Returns the error of an invalid value. values: the placeholders of the text; `param` names another field."""
    return PydanticCustomError("invalid_value", text, values)


def refuse_surrogates(value: str) -> None:
    """Refuses half of a surrogate pair. JSON can contain one, but it is not a character, and tokenizers and databases
    fail on it.
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
    """Returns the value. Refuses arrays and objects nested more than `limit` levels deep. Writing JSON of 1,000 levels
    raises RecursionError.
    """
    if isinstance(value, dict | list) and _is_deeper(value, limit):
        raise make_refusal("it is nested more than {limit} levels deep; flatten it", limit=limit)
    return value


def _is_deeper(container: dict[str, Any] | list[Any], limit: int) -> bool:
    if not limit:
        return True
    items = container.values() if isinstance(container, dict) else container
    return any(isinstance(item, dict | list) and _is_deeper(item, limit - 1) for item in items)


def _check_text(value: str) -> str:
    refuse_surrogates(value)
    return value


def _check_name(value: str) -> str:
    refuse_surrogates(value)
    check_length(value, MAX_NAME_CHARS)
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Name = Annotated[str, AfterValidator(_check_name)]
