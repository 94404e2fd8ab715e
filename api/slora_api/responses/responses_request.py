"""The body of POST /v1/responses, and its conversion to a chat.

The request has those properties of `ChatRequest` that `add_conversation_answer` reads. Nothing is stored, so a field
that refers to an earlier answer is refused with an error that states the remedy.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from slora.core.sampling_params import StructuredOutput
from slora_adapters.errors import abbreviate
from slora_api.chat.tool_schemas import (
    AllowedChoice,
    AnyChoice,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    Mode,
    NamedChoice,
    NamedFunction,
    Tool,
    check_distinct_names,
    check_tool_choice,
    check_tool_sizes,
    read_allowed,
)
from slora_api.completions.schemas import ChatMessage, ConversationFields, ReasoningEffort
from slora_api.http.field_types import Name, RequestModel, Text, check_depth, make_refusal
from slora_api.http.unsupported import Unsupported
from slora_api.responses.responses_items import Input, make_messages

_LOGPROBS = "message.output_text.logprobs"
# The values that `include` accepts. Only the first value has an effect. Reasoning items have their text in `content`,
# which serves the same purpose as encrypted reasoning. The other values name items that answers never have.
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_NO_STATE = "This server stores nothing: send the whole conversation in `input`."
_CHAT_FORM = "Send `text.format`; the other forms are fields of /v1/chat/completions."


class ResponsesTool(FunctionTool):
    """A function, in the shape of this route.

    parameters: the JSON schema of the parameters; without it, the function has none.
    strict: if true for any tool, the arguments of every call follow the schema of its tool. By default, the arguments
    need not follow the schema.
    """

    type: Literal["function"]
    is_async: Annotated[Any, Field(alias="async"), Unsupported(False)] = None
    defer_loading: Annotated[Any, Unsupported(False)] = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None
    output_schema: Annotated[Any, Unsupported()] = None

    @property
    def sent(self) -> dict[str, Any]:
        """The tool in the form in which the answer repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def to_tool(self) -> Tool:
        """Returns the tool in the shape of /v1/chat/completions. Its values are not checked again, because a schema may
        be long.
        """
        function = FunctionTool.model_construct(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class ResponsesCustomTool(CustomTool):
    """A custom tool, in the shape of this route."""

    type: Literal["custom"]
    defer_loading: Annotated[Any, Unsupported(False)] = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None

    @property
    def sent(self) -> dict[str, Any]:
        """The tool in the form in which the answer repeats it."""
        form: dict[str, Any] = {"type": "text"}
        if isinstance(self.format, GrammarFormat):
            form = {"type": "grammar", **self.format.grammar.model_dump()}
        return {"type": "custom", "name": self.name, "description": self.description, "format": form}

    def to_tool(self) -> Tool:
        return Tool.model_construct(type="custom", function=self.to_function(), custom=self)


def _check_shapes(value: Any) -> Any:
    """Refuses tools that would run on the server, and tools in the shape of /v1/chat/completions. The error states a
    remedy.
    """
    for index, tool in enumerate(check_tool_sizes(value) if isinstance(value, list) else ()):
        if not isinstance(tool, dict):
            continue
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in ("function", "custom"):
            raise make_refusal(
                "`tools.{index}` has the type {kind}, which this server does not have; offer a tool of the type "
                "'function' and run it in the client",
                param="tools",
                index=index,
                kind=abbreviate(kind),
            )
        if "function" in tool:
            raise make_refusal(
                "`tools.{index}` has the field `function` of /v1/chat/completions; in /v1/responses, `name`, "
                "`description`, `parameters` and `strict` are fields of the tool itself",
                param="tools",
                index=index,
            )
    return value


_AnyTool = ResponsesTool | ResponsesCustomTool


def _read_tool(value: Any, info: ValidationInfo) -> _AnyTool:
    is_custom = isinstance(value, dict) and value.get("type") == "custom"
    return (ResponsesCustomTool if is_custom else ResponsesTool).model_validate(value, context=info.context)


def _check_names(tools: list[_AnyTool]) -> list[_AnyTool]:
    check_distinct_names([tool.name for tool in tools], "name")
    return tools


class FunctionChoice(RequestModel):
    """A choice of one function, which the model must call."""

    type: Literal["function"]
    name: Name


def _read_choice(value: Any) -> Any:
    """Returns the name of a mode, or a choice of tools in the shape of /v1/chat/completions."""
    if value is None or value in ("auto", "none", "required"):
        return value
    try:
        if (allowed := read_allowed(value)) is not None:
            return allowed
        is_custom = isinstance(value, dict) and value.get("type") == "custom"
        choice = FunctionChoice.model_validate({**value, "type": "function"} if is_custom else value)
    except ValidationError:
        raise make_refusal(
            "`tool_choice` is {value}; it must be 'auto', 'none', 'required' or {example}",
            param="tool_choice",
            example='{"type": "function", "name": "..."}',
            value=abbreviate(value),
        ) from None
    return NamedChoice(type="function", function=NamedFunction(name=choice.name))


class ResponsesCustomChoice(RequestModel):
    """A choice of one custom tool, which the model must call."""

    type: Literal["custom"]
    name: Name


class ToolsChoice(RequestModel):
    """A choice among some of the tools. mode: whether the model must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | ResponsesCustomChoice]


class ResponsesTextFormat(RequestModel):
    """The form of the answer. name, description: no effect. json_schema: only allowed with the type `json_schema`.

    strict: no effect. Every schema is enforced, and a schema that cannot be enforced is refused.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema"), AfterValidator(check_depth)] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_the_type_needs_one(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise make_refusal("must have `schema` with the type `json_schema`, and with no other type")
        if self.type == "json_schema" and self.name is None:
            raise make_refusal("must have `name` with the type `json_schema`")
        return self


class TextFields(RequestModel):
    hint_path = "text."

    format: ResponsesTextFormat | None = None


class ReasoningFields(RequestModel):
    """The options of reasoning. effort: as `reasoning_effort` in /v1/chat/completions. The server returns the reasoning
    as the model wrote it.
    """

    effort: ReasoningEffort | None = None
    summary: Annotated[
        Any, Unsupported("auto", instead="The answer has the reasoning itself, in `content`.")
    ] = None
    generate_summary: Annotated[
        Any, Unsupported("auto", instead="The answer has the reasoning itself, in `content`.")
    ] = None
    context: Annotated[Any, Unsupported("auto")] = None
    mode: Annotated[Any, Unsupported("standard")] = None


class ResponsesStreamOptions(RequestModel):
    """The options of a stream. The usage is always sent. include_obfuscation: padding of events against traffic
    analysis, which is not supported.
    """

    include_obfuscation: Annotated[Any, Unsupported(False)] = None


def _check_include(names: list[str]) -> list[str]:
    for name in names:
        if name not in _INCLUDABLE:
            raise make_refusal(
                "`include` has {name}, which this server does not know; omit it (accepted: {known})",
                param="include",
                known=", ".join(map(repr, _INCLUDABLE)),
                name=abbreviate(name),
            )
    return names


class ResponsesRequest(ConversationFields):
    """POST /v1/responses.

    input: a text, or the items of a conversation. Items are messages, reasoning, tool calls and results of tool calls.
    instructions: a system message before all items.
    tools: the functions that the model may call.
    text: the form of the answer.
    include: `message.output_text.logprobs` adds log-probabilities to the text. The other values have no effect:
        reasoning items have their text in `content`, and can be sent back as they are.
    max_tool_calls: no effect. It limits calls of the server's own tools, and this server has none.
    """

    messages_field: ClassVar[str] = "input"

    input: Input
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: (
        Annotated[
            list[Annotated[_AnyTool, PlainValidator(_read_tool, json_schema_input_type=_AnyTool)]],
            Field(fail_fast=True),
            BeforeValidator(_check_shapes, json_schema_input_type=list[_AnyTool]),
            AfterValidator(_check_names),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        AnyChoice,
        PlainValidator(_read_choice, json_schema_input_type=Mode | FunctionChoice | ToolsChoice | None),
    ] = None
    text: TextFields | None = None
    include: Annotated[list[str], AfterValidator(_check_include)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    reasoning: ReasoningFields | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: Annotated[Any, Unsupported(False, instead=_NO_STATE)] = None
    previous_response_id: Annotated[Any, Unsupported(instead=_NO_STATE)] = None
    conversation: Annotated[Any, Unsupported(instead=_NO_STATE)] = None
    prompt: Annotated[Any, Unsupported(instead="Send the texts in `instructions` and `input`.")] = None
    background: Annotated[
        Any, Unsupported(False, instead="Send `stream: true`, or a batch to /v1/batches.")
    ] = None
    background_options: Annotated[Any, Unsupported({})] = None
    truncation: Annotated[Any, Unsupported("disabled", instead="Leave out the oldest items of `input`.")] = (
        None
    )
    context_management: Annotated[Any, Unsupported([], instead="Leave out the oldest items of `input`.")] = (
        None
    )
    moderation: Annotated[Any, Unsupported()] = None
    # vLLM's fields.
    include_reasoning: Annotated[Any, Unsupported(True, instead="Skip the items of reasoning.")] = None
    enable_response_messages: Annotated[
        Any, Unsupported(False, instead="Send `return_token_ids` to /v1/chat/completions.")
    ] = None
    previous_input_messages: Annotated[Any, Unsupported(instead=_NO_STATE)] = None
    # Fields of /v1/chat/completions that have another name here.
    messages: Annotated[Any, Unsupported(instead="Send `input`.")] = None
    max_tokens: Annotated[Any, Unsupported(instead="Send `max_output_tokens`.")] = None
    max_completion_tokens: Annotated[Any, Unsupported(instead="Send `max_output_tokens`.")] = None
    n: Annotated[Any, Unsupported(1, instead="An answer has one choice: send several requests.")] = None
    logprobs: Annotated[Any, Unsupported(False, instead=f'Send `include: ["{_LOGPROBS}"]`.')] = None
    reasoning_effort: Annotated[Any, Unsupported(instead="Send `reasoning.effort`.")] = None
    response_format: Annotated[Any, Unsupported({"type": "text"}, instead="Send `text.format`.")] = None
    structured_outputs: Annotated[Any, Unsupported(instead=_CHAT_FORM)] = None

    @cached_property
    def chat_messages(self) -> Sequence[ChatMessage]:
        return make_messages(self.instructions, self.input)

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @property
    def answer_limit(self) -> tuple[int | None, str]:
        return self.max_output_tokens, "max_output_tokens"

    @property
    def effort(self) -> tuple[ReasoningEffort | None, str]:
        return None if self.reasoning is None else self.reasoning.effort, "reasoning.effort"

    @property
    def sent_tools(self) -> list[dict[str, Any]]:
        """The tools in the form in which the answer repeats them."""
        return [tool.sent for tool in self.tools or ()]

    @property
    def sent_choice(self) -> str | dict[str, Any]:
        """The tool choice in the form in which the answer repeats it."""
        kinds = {tool.name: tool.type for tool in self.tools or ()}
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return {"type": kinds[choice.function.name], "name": choice.function.name}
        if isinstance(choice, AllowedChoice):
            tools = [{"type": kinds[name], "name": name} for name in choice.names]
            return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
        return choice or "auto"

    @property
    def sent_format(self) -> dict[str, Any]:
        """The request's text format, as the JSON of the answer repeats it."""
        form = None if self.text is None else self.text.format
        if form is None:
            return {"type": "text"}
        sent = {
            "name": form.name,
            "description": form.description,
            "schema": form.json_schema,
            "strict": form.strict,
        }
        return {"type": form.type, **{name: value for name, value in sent.items() if value is not None}}

    @cached_property
    def structured_output(self) -> StructuredOutput | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.json_schema is None:
            return StructuredOutput.json_object("text.format")
        return StructuredOutput.json_schema(form.json_schema, "text.format")

    @cached_property
    def chat_tools(self) -> list[Tool]:
        return [tool.to_tool() for tool in self.tools or ()]

    @model_validator(mode="after")
    def _fields_that_depend_on_each_other(self) -> Self:
        if self.tool_choice != "auto":
            check_tool_choice(self.tool_choice, self.chat_tools)
        if self.top_logprobs and self.num_top_logprobs is None:
            raise make_refusal(
                '`top_logprobs` is only allowed with `include: ["{known}"]`.',
                param="top_logprobs",
                known=_LOGPROBS,
            )
        if self.stream_options is not None and not self.stream:
            raise make_refusal(
                "`stream_options` is only allowed with `stream: true`.", param="stream_options"
            )
        _ = self.chat_messages  # Making the messages raises a refusal for a call without a result.
        return self
