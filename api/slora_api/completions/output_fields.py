"""The fields of a request that set the form of its answers.

They are OpenAI's `response_format`, vLLM's `structured_outputs`, and the `guided_*` fields of older versions of vLLM.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from slora.core.errors import RequestRefused
from slora.core.sampling_params import StructuredOutput
from slora_adapters.peft.strict_json import explain_fault
from slora_api.http.field_types import RequestModel, check_depth, make_refusal
from slora_api.http.unsupported import Unsupported

_Schema = Annotated[dict[str, Any] | bool, AfterValidator(check_depth)]
_SchemaOrText = Annotated[dict[str, Any] | bool | str, AfterValidator(check_depth)]

_COMPACT = "Send `structured_outputs` with `disable_any_whitespace: true` for JSON without white space."


class JsonSchemaFormat(RequestModel):
    """OpenAI's object around a schema. name, description: no effect.

    strict: no effect. Every schema is enforced, and a schema that cannot be enforced is refused.
    """

    name: str
    description: str | None = None
    json_schema: Annotated[_Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's response_format. json_schema: only allowed with the type `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_the_type_needs_one(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise make_refusal("must have `json_schema` with the type `json_schema`, and with no other type")
        return self

    def read(self) -> StructuredOutput | None:
        """Returns the form of the answers; None allows any text."""
        if self.json_schema is not None:
            return StructuredOutput.json_schema(self.json_schema.json_schema, "response_format")
        return StructuredOutput.json_object("response_format") if self.type == "json_object" else None


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs: exactly one form.

    json: a JSON schema, as an object or as text. grammar: a grammar in Lark's syntax or GBNF.
    disable_any_whitespace: with `json` or `json_object`, JSON has no white space between its tokens.
    """

    json_form: Annotated[_SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, Unsupported()] = None
    disable_fallback: Annotated[Any, Unsupported(True, False)] = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[Any, Unsupported(False)] = None
    whitespace_pattern: Annotated[Any, Unsupported(instead=_COMPACT, refuses_empty=True)] = None

    @model_validator(mode="after")
    def _only_json_has_white_space(self) -> Self:
        if self.disable_any_whitespace and self.json_form is None and not self.json_object:
            raise make_refusal(
                "sets `disable_any_whitespace`, which needs `json` or `json_object`; other forms say themselves where "
                "white space may be"
            )
        return self


class OutputFields(RequestModel):
    """The fields that set the form of the answers. `structured_output` raises RequestRefused if several of them ask for
    a form.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Annotated[Any, Unsupported("auto")] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported(instead=_COMPACT, refuses_empty=True)] = None

    @cached_property
    def structured_output(self) -> StructuredOutput | None:
        """The form of the answers; None allows any text."""
        forms = list(self._read_forms())
        if len(forms) > 1:
            raise RequestRefused(
                f"{forms[0].param} and {forms[1].param} both set the form of the answer; send only one form",
                forms[1].param,
            )
        return forms[0] if forms else None

    def _read_forms(self) -> Iterator[StructuredOutput]:
        form = None if self.response_format is None else self.response_format.read()
        if form is not None:
            yield form
        sent = self.structured_outputs
        if sent is not None:
            param = "structured_outputs"
            is_compact = bool(sent.disable_any_whitespace)
            found = list(
                _make_forms(
                    sent.json_form, sent.regex, sent.choice, sent.grammar, param, is_compact=is_compact
                )
            )
            if sent.json_object and is_compact:
                found.append(StructuredOutput.json_schema({"type": "object"}, param, is_compact=True))
            elif sent.json_object:
                found.append(StructuredOutput.json_object(param))
            if not found:
                raise RequestRefused(
                    "structured_outputs has no form; give one of json, regex, choice, grammar or json_object",
                    param,
                )
            yield from found
        yield from _make_forms(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, None
        )


def _make_forms(
    schema: _SchemaOrText | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
    param: str | None,
    *,
    is_compact: bool = False,
) -> Iterator[StructuredOutput]:
    """Yields the forms that are requested. param: the field that holds all forms; None if each form has a field
    `guided_*` of its own.
    """
    if schema is not None:
        yield _read_schema(schema, param or "guided_json", is_compact=is_compact)
    if regex is not None:
        yield StructuredOutput.regex(regex, param or "guided_regex")
    if choices is not None:
        yield StructuredOutput.choice(choices, param or "guided_choice")
    if grammar is not None:
        yield StructuredOutput.grammar(grammar, param or "guided_grammar")


def _read_schema(sent: _SchemaOrText, param: str, *, is_compact: bool) -> StructuredOutput:
    if not isinstance(sent, str):
        return StructuredOutput.json_schema(sent, param, is_compact=is_compact)
    try:
        schema = check_depth(json.loads(sent))
    except PydanticCustomError as error:
        raise RequestRefused(f"{param}: {error}", param) from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(
            f"{param} is not JSON: {explain_fault(error)}; send a JSON schema", param
        ) from None
    return StructuredOutput.json_schema(schema, param, is_compact=is_compact)
