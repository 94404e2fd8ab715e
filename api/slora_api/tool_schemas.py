"""The JSON of tools: the tools of a request, its tool choice, and the calls and results in its conversation.

The limits are OpenAI's. This module does not depend on the format in which a model writes calls.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails

from slora.structured_output import OPTIONS_KEY
from slora_adapters.abbreviation import abbreviate
from slora_api.field_types import (
    Name,
    RequestModel,
    Text,
    check_length,
    check_object,
    make_refusal,
)

__all__ = [
    "MAX_TOOLS",
    "FunctionTool",
    "Mode",
    "NamedChoice",
    "NamedFunction",
    "SentCall",
    "SentFunction",
    "Tool",
    "ToolChoice",
    "Tools",
    "check_distinct_names",
    "check_schema",
    "check_tool_choice",
    "check_tool_count",
    "check_tool_messages",
    "check_tool_name",
    "find_forced_tools",
]

MAX_TOOLS = 128
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


class Tool(RequestModel):
    """A tool that the model may call. cache_control: no effect."""

    type: Literal["function"]
    function: FunctionTool
    cache_control: Any = None

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


def check_tool_count(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise make_refusal(
            "`tools` has {count} tools; at most {limit} are accepted, so send fewer",
            param="tools",
            count=len(value),
            limit=MAX_TOOLS,
        )
    return value


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    BeforeValidator(check_tool_count, json_schema_input_type=list[Tool]),
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


def _read_choice(value: Any) -> Any:
    """Returns the name of a mode, or a NamedChoice."""
    if value is None or value in _MODES:
        return value
    try:
        return NamedChoice.model_validate(value)
    except ValidationError:
        raise make_refusal(
            "`tool_choice` is {value}; it must be 'auto', 'none', 'required' or {example}",
            param="tool_choice",
            example='{"type": "function", "function": {"name": "..."}}',
            value=abbreviate(value),
        ) from None


Mode = Literal["auto", "none", "required"]
_MODES = ("auto", "none", "required")
ToolChoice = Annotated[
    Mode | NamedChoice | None,
    PlainValidator(_read_choice, json_schema_input_type=Mode | NamedChoice | None),
]


def check_tool_choice(choice: str | NamedChoice | None, tools: Sequence[Tool] | None) -> None:
    """Raises a refusal for a choice that these tools do not allow."""
    if choice in (None, "none"):
        return
    if not tools:
        raise make_refusal("`tool_choice` is only allowed when `tools` are sent.", param="tool_choice")
    if isinstance(choice, NamedChoice):
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            raise make_refusal(
                "`tool_choice` names the function {name}, which is not in `tools`; choose one of them: {known}",
                param="tool_choice",
                known=abbreviate(names),
                name=abbreviate(choice.function.name),
            )


def find_forced_tools(choice: str | NamedChoice | None, shown: list[Tool]) -> list[Tool]:
    """Returns the tools from which the model must call one; empty if no call is required. shown: the tools that the
    model sees.
    """
    if isinstance(choice, NamedChoice):
        return [tool for tool in shown if tool.function.name == choice.function.name]
    return shown if choice == "required" else []


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


class _Message(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[SentCall] | None: ...
    @property
    def tool_call_id(self) -> str | None: ...


def check_tool_messages(messages: Sequence[_Message]) -> None:
    """Raises a refusal unless each message with tool calls is followed by exactly the results of its calls."""
    waiting: dict[str, None] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise make_refusal(
                    "`messages.{index}.tool_call_id` is {value}, which matches no unanswered tool call of the "
                    "preceding assistant message{known}",
                    param="messages",
                    index=index,
                    known=f"; these do: {abbreviate(list(waiting))}" if waiting else "",
                    value=abbreviate(message.tool_call_id),
                )
            del waiting[message.tool_call_id]
            continue
        if waiting:
            break
        for call in message.tool_calls or ():
            if call.id in waiting:
                raise make_refusal(
                    "`messages.{index}.tool_calls` has the id {value} twice; give each call an id of its own",
                    param="messages",
                    index=index,
                    value=abbreviate(call.id),
                )
            waiting[call.id] = None
    if waiting:
        raise make_refusal(
            "`messages` has no tool result for the calls {value}; after the assistant message, add one message with "
            "the role 'tool' for each call",
            param="messages",
            value=abbreviate(list(waiting)),
        )
