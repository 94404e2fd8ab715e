"""The JSON of tools: the tools of a request, its tool choice, and the calls and results in its conversation.

The limits are OpenAI's. This module does not depend on the format in which a model writes calls.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
)

from slora.structured_output import OPTIONS_KEY
from slora_adapters.abbreviation import abbreviate
from slora_api.field_types import (
    STRICT,
    Name,
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
    "check_tool_choice",
    "check_tool_count",
    "check_tool_messages",
    "find_forced_tools",
]

MAX_TOOLS = 128
_MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def _check_tool_name(name: str) -> str:
    check_length(name, _MAX_NAME_CHARS)
    if not _NAME.fullmatch(name):
        raise make_refusal(
            "it is {value}; the name of a function has letters, digits, `_` and `-` only",
            value=abbreviate(name),
        )
    return name


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
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


class FunctionTool(BaseModel):
    """One function. parameters: the JSON schema of the parameters; without it, the function has none.

    strict: if true for any tool, the arguments of every call follow the schema of its tool.
    """

    model_config = STRICT
    name: Annotated[str, AfterValidator(_check_tool_name)]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = STRICT
    type: Literal["function"]
    function: FunctionTool

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


class NamedFunction(BaseModel):
    """The function that a tool choice names. Clients may send the whole tool as the choice. description, parameters,
    strict: no effect.
    """

    model_config = STRICT
    name: Name
    description: Any = None
    parameters: Any = None
    strict: Any = None


class NamedChoice(BaseModel):
    """A choice of one function, which the model must call."""

    model_config = STRICT
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


class SentFunction(BaseModel):
    """The function of a call. arguments: JSON, as the model wrote it; it may be invalid. parsed_arguments: added by the
    openai SDK; no effect.
    """

    model_config = STRICT
    name: Name
    arguments: Text
    parsed_arguments: Any = None


class SentCall(BaseModel):
    """A tool call in an earlier message of the assistant. index: added by streams; no effect."""

    model_config = STRICT
    id: Name
    type: Literal["function"] = "function"
    function: SentFunction
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect, with the arguments as JSON text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


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
