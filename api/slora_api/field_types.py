"""The types of text in JSON bodies."""

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from slora_api.request_bounds import MAX_NAME_CHARS

__all__ = ["Name", "Text", "refuse_surrogates"]


def refuse_surrogates(value: str) -> None:
    """Refuses half of a surrogate pair. JSON can contain one, but it is not a character, and tokenizers and databases
    fail on it.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "invalid_value",
            "character {position} is {half}, a lone surrogate and not a character; remove it",
            {"position": error.start, "half": f"U+{ord(value[error.start]):04X}"},
        ) from None


def _check_text(value: str) -> str:
    refuse_surrogates(value)
    return value


def _check_name(value: str) -> str:
    refuse_surrogates(value)
    if len(value) > MAX_NAME_CHARS:
        raise PydanticCustomError(
            "invalid_value",
            "it has {length} characters, and at most {limit} are accepted; shorten it",
            {"length": len(value), "limit": MAX_NAME_CHARS},
        )
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Name = Annotated[str, AfterValidator(_check_name)]
