"""The JSON of tools: the tools of a request, its tool choice, and the calls and results in its conversation.

The limits are OpenAI's. This module does not depend on the format in which a model writes calls.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails

from slora.core.sampling_params import OPTIONS_KEY
from slora_adapters.errors import abbreviate
from slora_api.chat.lark_regex import lark_to_regex
from slora_api.http.field_types import (
    Name,
    RequestModel,
    Text,
    check_length,
    check_object,
    make_refusal,
)

MAX_TOOLS = 128
# Of all tools of a request together. The event loop turns them into regular expressions, which takes up to 2 ms per
# 1,024 characters.
MAX_LARK_CHARS = 1 << 12
# The model sees a custom tool as a function with this parameter.
CUSTOM_INPUT = "input"
_MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def check_tool_name(name: str, limit: int = _MAX_NAME_CHARS) -> str:
    check_length(name, limit)
    if not _NAME.fullmatch(name):
        raise make_refusal(
            "it is {value}; the name of a function has letters, digits, `_` and `-` only",
            value=abbreviate(name),
        )
    return name


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object":
        raise make_refusal(
            "it has the type {value}; the parameters of a function are a JSON schema of the type 'object'",
            value=abbreviate(kind),
        )
    if not isinstance(properties := schema.get("properties", {}), dict):
        raise make_refusal(
            "its `properties` are {value}; they must be an object", value=abbreviate(properties)
        )
    if OPTIONS_KEY in schema:
        raise make_refusal("it has the key {key}, which is not supported; remove it", key=repr(OPTIONS_KEY))
    return check_object(schema)


class FunctionTool(RequestModel):
    """One function. parameters: the JSON schema of the parameters; without it, the function has none. cache_control: no
    effect.

    strict: if true for any tool, the arguments of every call follow the schema of its tool.
    """

    name: Annotated[str, AfterValidator(check_tool_name)]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = None
    strict: bool | None = None
    cache_control: Any = None


class TextFormat(RequestModel):
    type: Literal["text"]


class Grammar(RequestModel):
    """A grammar of texts. A grammar in Lark's syntax must not be recursive, because it becomes a regular expression."""

    syntax: Literal["regex", "lark"]
    definition: Text
    _regex: str = PrivateAttr()

    @model_validator(mode="after")
    def _write_regex(self) -> Self:
        self._regex = lark_to_regex(self.definition) if self.syntax == "lark" else self.definition
        return self

    @property
    def regex(self) -> str:
        """The regular expression of the texts."""
        return self._regex


class GrammarFormat(RequestModel):
    """A grammar for the input. syntax, definition: the form of the grammar in /v1/responses."""

    type: Literal["grammar"]
    grammar: Grammar

    @model_validator(mode="before")
    @classmethod
    def _nest_the_flat_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and "grammar" not in value:
            grammar = {name: item for name, item in value.items() if name != "type"}
            return {"type": value.get("type"), "grammar": grammar}
        return value


class CustomTool(RequestModel):
    """A tool whose input is a text. The model sees a function with one parameter. format: the form of the text."""

    name: Annotated[str, AfterValidator(check_tool_name)]
    description: Text | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None

    def to_function(self) -> FunctionTool:
        text: dict[str, Any] = {"type": "string"}
        is_constrained = isinstance(self.format, GrammarFormat)
        if isinstance(self.format, GrammarFormat):
            text["pattern"] = f"^(?:{self.format.grammar.regex})$"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return FunctionTool.model_construct(
            name=self.name, description=self.description, parameters=parameters, strict=is_constrained
        )


def read_custom_input(arguments: str) -> str:
    """Returns the input of a custom tool from the arguments of its function, or the arguments if they have none."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class Tool(RequestModel):
    """A tool that the model may call. function: for a custom tool, the function that the model sees. cache_control: no
    effect.
    """

    type: Literal["function", "custom"]
    function: FunctionTool
    custom: CustomTool | None = None
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _show_a_custom_tool_as_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "custom":
            custom = CustomTool.model_validate(value.get("custom"))
            return {**value, "custom": custom, "function": custom.to_function()}
        return value

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": "function", "function": function}


def check_distinct_names(names: Sequence[str], field: str) -> None:
    """Raises a refusal if two tools have the same name. field: the path of the name within a tool."""
    seen = set()
    for index, name in enumerate(names):
        if name in seen:
            raise make_refusal(
                "`tools.{index}.{field}` is '{name}', which an earlier tool already has; give each function "
                "its own name",
                param="tools",
                index=index,
                field=field,
                name=name,
            )
        seen.add(name)


def _check_tools(tools: list[Tool]) -> list[Tool]:
    check_distinct_names([tool.function.name for tool in tools], "function.name")
    return tools


def check_tool_sizes(value: Any) -> Any:
    """Checks the number of tools and the length of their Lark grammars before the tools are validated."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_TOOLS:
        raise make_refusal(
            "`tools` has {count} tools; at most {limit} are accepted, so send fewer",
            param="tools",
            count=len(value),
            limit=MAX_TOOLS,
        )
    if (num_chars := sum(map(_count_lark_chars, value))) > MAX_LARK_CHARS:
        raise make_refusal(
            "`tools` has {count} characters of Lark grammars; at most {limit} are accepted, so shorten them, or use "
            "the syntax 'regex'",
            param="tools",
            count=num_chars,
            limit=MAX_LARK_CHARS,
        )
    return value


def _count_lark_chars(tool: Any) -> int:
    """Returns the length of the Lark grammar of a custom tool, in the shape of either route."""
    for name in ("custom", "format", "grammar"):
        if not isinstance(tool, dict):
            return 0
        tool = tool.get(name) or tool
    is_lark = isinstance(tool, dict) and tool.get("syntax") == "lark"
    return len(tool["definition"]) if is_lark and isinstance(tool.get("definition"), str) else 0


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    BeforeValidator(check_tool_sizes, json_schema_input_type=list[Tool]),
    AfterValidator(_check_tools),
]


class NamedFunction(RequestModel):
    """The function that a tool choice names. Clients may send the whole tool as the choice. description, parameters,
    strict: no effect.
    """

    name: Name
    description: Any = None
    parameters: Any = None
    strict: Any = None


class NamedChoice(RequestModel):
    """A choice of one function, which the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedChoice(RequestModel):
    """A choice among some of the tools. The model sees only these. mode: whether it must call one of them."""

    mode: Literal["auto", "required"]
    names: Annotated[list[Name], Field(min_length=1)]


def read_allowed(value: Any) -> AllowedChoice | None:
    """Returns a choice among some tools, in the shape of /v1/chat/completions or in that of /v1/responses, which nests
    less; None if `value` is another choice. Raises ValidationError.
    """
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return None
    allowed = value.get("allowed_tools", value)
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_find_name(tool) for tool in tools] if isinstance(tools, list) else None
    return AllowedChoice.model_validate({"mode": allowed.get("mode") if names else None, "names": names})


def _find_name(tool: Any) -> Any:
    """Returns the name in a reference to a function or a custom tool; None if it has none."""
    if not isinstance(tool, dict):
        return None
    named = tool.get("custom" if tool.get("type") == "custom" else "function", tool)
    return named.get("name") if isinstance(named, dict) else None


def _read_choice(value: Any) -> Any:
    """Returns the name of a mode, a NamedChoice or an AllowedChoice."""
    if value is None or value in _MODES:
        return value
    try:
        if (allowed := read_allowed(value)) is not None:
            return allowed
        is_custom = isinstance(value, dict) and value.get("type") == "custom"
        named = {"type": "function", "function": value.get("custom")} if is_custom else value
        return NamedChoice.model_validate(named)
    except ValidationError:
        raise make_refusal(
            "`tool_choice` is {value}; it must be 'auto', 'none', 'required' or {example}",
            param="tool_choice",
            example='{"type": "function", "function": {"name": "..."}}',
            value=abbreviate(value),
        ) from None


Mode = Literal["auto", "none", "required"]
_MODES = ("auto", "none", "required")
AnyChoice = Mode | NamedChoice | AllowedChoice | None


class CustomChoice(RequestModel):
    """A choice of one custom tool, which the model must call."""

    type: Literal["custom"]
    custom: NamedFunction


class AllowedTools(RequestModel):
    """Some of the tools. mode: whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice | CustomChoice]


class AllowedToolsChoice(RequestModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    AnyChoice,
    PlainValidator(
        _read_choice, json_schema_input_type=Mode | NamedChoice | CustomChoice | AllowedToolsChoice | None
    ),
]


def check_tool_choice(choice: AnyChoice, tools: Sequence[Tool] | None) -> None:
    """Raises a refusal for a choice that these tools do not allow."""
    if choice in (None, "none"):
        return
    if not tools:
        raise make_refusal("`tool_choice` is only allowed when `tools` are sent.", param="tool_choice")
    chosen = choice.names if isinstance(choice, AllowedChoice) else []
    chosen = [choice.function.name] if isinstance(choice, NamedChoice) else chosen
    names = [tool.function.name for tool in tools]
    for name in chosen:
        if name not in names:
            raise make_refusal(
                "`tool_choice` names the function {name}, which is not in `tools`; choose one of them: {known}",
                param="tool_choice",
                known=abbreviate(names),
                name=abbreviate(name),
            )


def find_shown_tools(choice: AnyChoice, tools: list[Tool]) -> list[Tool]:
    """Returns the tools that the model sees."""
    if isinstance(choice, AllowedChoice):
        return [tool for tool in tools if tool.function.name in choice.names]
    return [] if choice == "none" else tools


def find_forced_tools(choice: AnyChoice, shown: list[Tool]) -> list[Tool]:
    """Returns the tools from which the model must call one; empty if no call is required. shown: the tools that the
    model sees.
    """
    if isinstance(choice, NamedChoice):
        return [tool for tool in shown if tool.function.name == choice.function.name]
    is_required = choice.mode == "required" if isinstance(choice, AllowedChoice) else choice == "required"
    return shown if is_required else []


class SentFunction(RequestModel):
    """The function of a call. arguments: JSON, as the model wrote it; it may be invalid. parsed_arguments: added by the
    openai SDK; no effect.
    """

    name: Name
    arguments: Text
    parsed_arguments: Any = None


class SentCustom(RequestModel):
    """The call of a custom tool, whose input is free text."""

    name: Name
    input: Text


class SentCall(RequestModel):
    """A tool call in an earlier message of the assistant. cache_control, provider_specific_fields: no effect. index:
    added by streams; no effect.
    """

    id: Name
    type: Literal["function", "custom"] = "function"
    function: SentFunction | None = None
    custom: SentCustom | None = None
    index: int | None = None
    cache_control: Any = None
    provider_specific_fields: Any = None

    @property
    def num_chars(self) -> int:
        name, arguments = self._read()
        return len(self.id) + len(name) + len(arguments)

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect, with the arguments as JSON text."""
        name, arguments = self._read()
        return {"id": self.id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _read(self) -> tuple[str, str]:
        """Returns the name of the tool, and the arguments as JSON. The model sees a custom tool as a function."""
        if self.custom is not None:
            return self.custom.name, json.dumps({CUSTOM_INPUT: self.custom.input}, ensure_ascii=False)
        assert self.function is not None
        return self.function.name, self.function.arguments

    @model_validator(mode="after")
    def _the_object_of_its_type(self) -> Self:
        if getattr(self, self.type) is None:
            missing = InitErrorDetails(type="missing", loc=(self.type,), input={})
            raise ValidationError.from_exception_data("SentCall", [missing])
        if self.function is not None and self.custom is not None:
            raise make_refusal("has both `function` and `custom`; send the one that its `type` names")
        return self


# Calls are copies of these templates. Copying takes a tenth of the time of model_construct. It also avoids a second
# check of the texts, which may be long.
_FUNCTION = SentFunction(name="", arguments="")
_CALL = SentCall(id="", function=_FUNCTION)


def make_call(call_id: str, name: str, arguments: str) -> SentCall:
    """Returns the call of a function. The texts are already checked."""
    function = _FUNCTION.model_copy(update={"name": name, "arguments": arguments})
    return _CALL.model_copy(update={"id": call_id, "function": function})
