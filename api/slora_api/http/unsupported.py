"""Fields of a request that this server does not honour: those that it refuses, and the hints that it ignores.

A refused field is declared with the values that have no effect, for example `modalities: Annotated[Any,
Unsupported(["text"])] = None`. It accepts these values, null and empty values. Any other value is refused with an error
that names the field and the value. So no field with an effect is ignored silently. The OpenAPI document lists the
accepted values.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from slora_adapters.errors import abbreviate

# The values with which clients fill fields that they do not use.
EMPTY_VALUES: list[Any] = [None, "", [], {}]

# The hints of OpenAI's and other APIs: fields that say how to reach an answer, or how long it should be. Without them,
# the answer is still an answer to the request. Each has the reason why it is ignored. The header `x-slora-ignored` of
# an answer names those that its request had.
IGNORED_HINTS: Mapping[str, str] = {
    "betas": "every feature that this server has is on.",
    "billing_policy": "usage is billed to the tenant of the key.",
    "cache_control": "prefixes of prompts are always cached.",
    "compaction": "no message is left out of a conversation.",
    "context_management": "no message is left out of a conversation.",
    "diagnostics": "answers have their timing.",
    "fallback_credit_token": "this server forwards no request.",
    "fallbacks": "this server forwards no request.",
    "inference_geo": "the model runs where this server runs.",
    "keep_alive": "the base model is always loaded.",
    "options": "the options of other servers; send sampling parameters as fields of the body.",
    "prediction": "drafts come from the prompt; see `prompt_lookup`.",
    "prompt_cache_retention": "cached prefixes stay until their memory is needed.",
    "provider": "this server forwards no request.",
    "speed": "there is one speed.",
    "text.verbosity": "the model has no such switch.",
    "usage": "answers always have their usage.",
    "user_profile_id": "usage is billed to the tenant of the key.",
    "verbosity": "the model has no such switch.",
    "workspace_id": "usage is billed to the tenant of the key.",
}


def is_empty(value: Any) -> bool:
    """Whether a value asks for nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


class Unsupported:
    """Marks a field as unsupported.

    neutral: the accepted values, besides null and empty values. instead: a sentence that says what to use in place of
    the field. refuses_empty: whether an empty value has an effect.
    """

    def __init__(self, *neutral: Any, instead: str = "", refuses_empty: bool = False) -> None:
        self._neutral = neutral
        self._instead = instead
        self._refuses_empty = refuses_empty

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        text = f"Not supported: only values that have no effect are accepted. {self._instead}".strip()
        accepted = [*self._neutral, None]
        if not self._refuses_empty:
            accepted += [value for value in EMPTY_VALUES if value not in accepted]
        return {"enum": accepted, "description": text}

    def _check(self, value: Any) -> Any:
        if value is None or (not self._refuses_empty and is_empty(value)):
            return None  # Code that reads a field of this name must not meet an empty value of another type.
        if any(_is_equal(value, one) for one in self._neutral):
            return value
        accepted = " or ".join([*map(abbreviate, self._neutral), "null"])
        # pydantic fills the placeholders in this order. The value comes last, because it may contain the name of a
        # placeholder.
        raise PydanticCustomError(
            "unsupported_parameter",
            "is not supported by this server with the value {value}; omit it (accepted: {accepted}).{instead}",
            {
                "accepted": accepted,
                "instead": f" {self._instead}" if self._instead else "",
                "value": abbreviate(value),
            },
        )


def _is_equal(value: Any, neutral: Any) -> bool:
    """Compares value and type, because 1 == True in Python: equality alone would accept `store: 0`."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
