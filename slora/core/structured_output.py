"""The form that an answer must have.

A form is a JSON schema, any JSON object, a regular expression, a choice of strings, or a grammar. It is a plain value.
`slora.grammar` compiles it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slora.core.errors import RequestRefused
from slora.core.surrogate import refuse_surrogate

__all__ = [
    "MAX_CACHED_FORMS",
    "MAX_CACHED_FORMS_OF_TENANT",
    "MAX_FORM_CHARS",
    "MISSING_LIBRARY",
    "OPTIONS_KEY",
    "OutputKind",
    "StructuredOutput",
]

MAX_FORM_CHARS = 65_536
# The most compiled grammars that the engine keeps, for all tenants together and for one tenant. A typical grammar takes
# 50 KB, and the largest that a server accepts takes 10 MB. The API remembers the same numbers of forms, so that a form
# that the engine compiles again is also charged again. Tenants never share a grammar: a fast first token would reveal
# that another tenant uses it.
MAX_CACHED_FORMS = 512
MAX_CACHED_FORMS_OF_TENANT = 64
MISSING_LIBRARY = (
    "structured output needs the package llguidance, which is not installed: pip install 'slora[serve]'"
)
# The key of a schema in which the grammar library looks for options. It is no keyword of JSON Schema.
OPTIONS_KEY = "x-guidance"


class OutputKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer. Raises RequestRefused, which names `param`, for a form that is too long.

    text: the JSON schema, the regular expression in Rust's syntax, a JSON list of choices, or the grammar in Lark's
        syntax or GBNF. Empty for JSON_OBJECT.
    param: the field of the request that holds the form. Errors name it.

    An answer that ends with finish_reason `stop` has this form, unless a stop string has cut it off.
    """

    kind: OutputKind
    text: str
    param: str = "structured_output"

    def __post_init__(self) -> None:
        refuse_surrogate(self.text, self.param, self.param)
        if len(self.text) > MAX_FORM_CHARS:
            raise RequestRefused(
                f"{self.param} has {len(self.text)} characters; at most {MAX_FORM_CHARS} are accepted, so "
                "shorten it",
                self.param,
            )

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool, param: str = "structured_output") -> "StructuredOutput":
        if isinstance(schema, Mapping) and OPTIONS_KEY in schema:
            raise RequestRefused(
                f"{param} has the key {OPTIONS_KEY!r}, which is not supported; remove it", param
            )
        return StructuredOutput(OutputKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":")), param)

    @staticmethod
    def json_object(param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.JSON_OBJECT, "", param)

    @staticmethod
    def regex(pattern: str, param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.REGEX, pattern, param)

    @staticmethod
    def choice(choices: Sequence[str], param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.CHOICE, json.dumps(list(choices)), param)

    @staticmethod
    def grammar(text: str, param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.GRAMMAR, text, param)
