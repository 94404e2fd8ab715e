"""Marks fields of a request that this server knows but does not support.

Such a field is declared with the values that have no effect, for example `functions: Annotated[Any, Unsupported([])] =
None`. It accepts these values and null. Any other value is refused with an error that names the field and the value. So
no field with an effect is ignored silently. The OpenAPI document lists the accepted values.
"""

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from slora_adapters.abbreviation import abbreviate

__all__ = ["Unsupported"]


class Unsupported:
    """Marks a field as unsupported.

    neutral: the accepted values, besides null. instead: a sentence that says what to use in place of the field.
    """

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        self._neutral = neutral
        self._instead = instead

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        text = f"Not supported: only values that have no effect are accepted. {self._instead}".strip()
        return {"enum": [*self._neutral, None], "description": text}

    def _check(self, value: Any) -> Any:
        if value is None or any(_is_equal(value, one) for one in self._neutral):
            return value
        accepted = " or ".join([*map(repr, self._neutral), "null"])
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
