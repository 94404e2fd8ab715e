"""The bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API, and their conversion to a chat.

The request is answered as the chat that `chat` returns. Several text blocks of a turn are joined with line breaks, and
consecutive turns of the same role become one message, because many chat templates refuse them otherwise.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from slora_adapters.errors import abbreviate
from slora_api.chat.tool_schemas import (
    FunctionTool,
    SentCall,
    Tool,
    check_schema,
    check_tool_name,
    check_tool_sizes,
    make_call,
)
from slora_api.completions.schemas import ChatMessage, ChatRequest, ReasoningEffort, Thinking, make_message
from slora_api.http.field_types import (
    IgnoredFields,
    Name,
    RequestModel,
    Text,
    check_depth,
    check_object,
    make_refusal,
    note_ignored,
)
from slora_api.http.request_bounds import MAX_NAME_CHARS
from slora_api.http.unsupported import Unsupported

_MAX_TOOL_NAME_CHARS = 128
_encode = json.JSONEncoder(ensure_ascii=False).encode


class MessagesChat(ChatRequest):
    """The chat as which a request to /v1/messages is answered. effort_field: the field that sets the effort."""

    caps_answer = True
    is_effort_hint = True

    effort_field: str = ""

    @property
    def effort(self) -> tuple[ReasoningEffort | None, str]:
        return self.reasoning_effort, self.effort_field


class TextBlock(RequestModel):
    """A text. cache_control, citations, parsed_output: no effect."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None
    citations: Any = None
    parsed_output: Any = None


class TextSource(RequestModel):
    """The text of a document. media_type: no effect."""

    type: Literal["text"]
    data: Text
    media_type: Any = None


class DocumentBlock(RequestModel):
    """A document that is a text. title, context: shown to the model before it. cache_control, citations: no effect."""

    type: Literal["document"]
    source: TextSource
    title: Text | None = None
    context: Text | None = None
    cache_control: Any = None
    citations: Any = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class SearchResultBlock(RequestModel):
    """A result of a search. cache_control, citations: no effect."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: list[TextBlock]
    cache_control: Any = None
    citations: Any = None

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolUseBlock(RequestModel):
    """A tool call of an earlier answer. cache_control, caller, toolset_name: no effect."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Annotated[dict[str, Any], AfterValidator(check_object)]
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None

    def to_call(self) -> SentCall:
        return make_call(self.id, self.name, _encode(self.input))


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer. The chat template decides whether the model sees it. signature: no effect."""

    type: Literal["thinking"]
    thinking: Text
    signature: Any = None
    cache_control: Any = None


# Blocks of text in a turn of the user, in a result of a tool, and in the system prompt.
_TextLike = TextBlock | DocumentBlock | SearchResultBlock
_TEXT_KINDS = ("text", "document", "search_result")


def _read_texts(value: Any) -> Any:
    return _read_blocks(value, _TEXT_KINDS)


_Texts = Annotated[
    list[Annotated[_TextLike, Field(discriminator="type")]],
    Field(fail_fast=True),
    BeforeValidator(_read_texts, json_schema_input_type=str | list[_TextLike]),
]


class ToolResultBlock(RequestModel):
    """The result of a tool call. is_error: marks the result as an error for the model. cache_control, toolset_name: no
    effect.
    """

    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Texts | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None

    def to_message(self) -> ChatMessage:
        text = "\n".join(block.text for block in self.content or ())
        return make_message(
            "tool", f"Error: {text}" if self.is_error else text, tool_call_id=self.tool_use_id
        )


class SkippedBlock(BaseModel):
    """A block of an earlier answer that the model cannot see: encrypted reasoning, or what one of Anthropic's own tools
    left.
    """

    model_config = ConfigDict(frozen=True)
    type: Name

    @model_validator(mode="after")
    def _note_it(self, info: ValidationInfo) -> Self:
        note_ignored(info, f"messages.{self.type}")
        return self


# What Anthropic's API leaves in an answer, besides texts, calls and reasoning.
_SKIPPED = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_result",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "compaction",
        "fallback",
    }
)
_KINDS = (*_TEXT_KINDS, "tool_use", "tool_result", "thinking")


def _read_blocks(value: Any, kinds: tuple[str, ...]) -> Any:
    """Returns the blocks. A text becomes one block. Raises a refusal for a block that is not among `kinds`."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, dict) and kind not in kinds and not (kinds is _KINDS and kind in _SKIPPED):
            raise make_refusal(
                "it has a block of the type {kind}, which is not supported here; this model reads text only "
                "(accepted: {known})",
                known=", ".join(map(repr, kinds)),
                kind=abbreviate(kind),
            )
    return value


def _read_content(value: Any) -> Any:
    return _read_blocks(value, _KINDS)


def _find_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return "skipped" if kind in _SKIPPED else kind


_Content = (
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | SkippedBlock
)
_Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[SkippedBlock, Tag("skipped")],
    Discriminator(
        _find_tag, custom_error_type="invalid_value", custom_error_message="a block must be an object"
    ),
]


class Turn(RequestModel):
    """One turn of a conversation. The other fields are those of an answer that is sent back; they have no effect."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[_Block],
        Field(fail_fast=True),
        BeforeValidator(_read_content, json_schema_input_type=str | list[_Content]),
    ]
    id: Any = None
    type: Any = None
    model: Any = None
    stop_reason: Any = None
    stop_sequence: Any = None
    usage: Any = None
    parsed_output: Any = None

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> Self:
        allowed = {"user": ToolResultBlock, "assistant": ToolUseBlock | ThinkingBlock}.get(self.role, ())
        for block in self.content:
            if isinstance(block, ToolUseBlock | ToolResultBlock | ThinkingBlock) and not isinstance(
                block, allowed
            ):
                raise make_refusal(
                    "has the role `{role}`, which cannot have a block of the type '{kind}'",
                    role=self.role,
                    kind=block.type,
                )
        return self

    def to_messages(self) -> list[ChatMessage]:
        """Returns the messages of this turn. Results of tools come before the text of the user, as Anthropic's API
        requires.
        """
        made = [block.to_message() for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block.text for block in self.content if isinstance(block, _TextLike)]
        if self.role != "assistant":
            text = "\n".join(texts)
            return [*made, make_message(self.role, text)] if texts or not made else made
        calls = [block.to_call() for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        return [
            make_message(
                "assistant",
                "".join(texts),
                tool_calls=calls or None,
                reasoning="\n".join(thoughts) or None,
            )
        ]


class ClientTool(RequestModel):
    """A tool that the model may call, and that the client runs.

    strict: if true for any tool, the arguments of every call follow the schema of its tool.
    allowed_callers, cache_control, defer_loading, eager_input_streaming, input_examples: no effect.
    """

    type: Literal["custom"] | None = None
    name: Annotated[str, AfterValidator(partial(check_tool_name, limit=_MAX_TOOL_NAME_CHARS))]
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_schema)]
    strict: bool | None = None
    allowed_callers: Any = None
    cache_control: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None

    def to_tool(self) -> Tool:
        """Returns the tool of a chat. Its values are not checked again, because a schema may be long."""
        function = FunctionTool.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


def _check_tools(value: Any) -> Any:
    """Refuses the tools of Anthropic's servers and clients, which have no schema. The error states a remedy."""
    for index, tool in enumerate(check_tool_sizes(value) if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise make_refusal(
                "`tools.{index}` has the type {kind}, which this server does not have; offer a tool with `name`, "
                "`description` and `input_schema`, and run it in the client",
                param="tools",
                index=index,
                kind=abbreviate(kind),
            )
    return value


class ToolChoice(RequestModel):
    """Whether the model must call a tool. name: only with the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_where_the_type_needs_one(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise make_refusal("must have `name` with the type `tool`, and with no other type")
        return self

    @property
    def of_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(RequestModel):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema"), BeforeValidator(check_depth)]


class OutputConfig(RequestModel):
    """effort: as `reasoning_effort` in /v1/chat/completions. format: the form of the answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(RequestModel):
    """user_id: as the field `user` of the other routes."""

    user_id: Text | None = None


class MessagesFields(RequestModel):
    """The fields that both routes share.

    system: a text, or a list of blocks.
    tool_choice: `any` or the name of a tool forces a call, with arguments that follow the tool's schema.
    thinking: switches the reasoning of a model whose template has a switch. `disabled` also leaves it out of the
        answer.
    output_config: the effort of the reasoning, and the form of the answer. output_format: the same form.
    """

    hint_path = ""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: _Texts | None = None
    tools: (
        Annotated[
            list[ClientTool],
            Field(fail_fast=True),
            BeforeValidator(_check_tools, json_schema_input_type=list[ClientTool]),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    container: Annotated[Any, Unsupported()] = None
    mcp_servers: Annotated[Any, Unsupported(instead="Run the tools in the client.")] = None
    thread: Annotated[Any, Unsupported(instead="Send the whole conversation in `messages`.")] = None

    @classmethod
    def read_chat(cls, body: dict[str, Any], ignored: IgnoredFields) -> MessagesChat:
        """Returns the chat as which the body is answered."""
        return MessagesChat.read_body(cls.read_body(body, ignored).chat(), ignored)

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat, for `MessagesChat`."""
        made: list[ChatMessage] = []
        if self.system:
            made.append(make_message("system", "\n".join(block.text for block in self.system)))
        made += _merge_turns([message for turn in self.messages for message in turn.to_messages()])
        body: dict[str, Any] = {"model": self.model, "messages": made}
        if made[-1].role == "assistant" and made[-1].content and not made[-1].tool_calls:
            body["continue_final_message"] = True
        if self.tools:
            body["tools"] = [tool.to_tool() for tool in self.tools]
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.of_chat
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return body | self._reasoning_fields() | self._form_fields()

    def _reasoning_fields(self) -> dict[str, Any]:
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is not None and (effort is None or self.thinking.type == "disabled"):
            is_off = self.thinking.type == "disabled"
            return {
                "reasoning_effort": self.thinking.effort,
                "effort_field": "thinking",
                "include_reasoning": not is_off,
            }
        return {"reasoning_effort": effort, "effort_field": "output_config.effort"}

    def _form_fields(self) -> dict[str, Any]:
        form = self.output_format
        if form is None and self.output_config is not None:
            form = self.output_config.format
        if form is None:
            return {}
        schema = {"name": "answer", "schema": form.json_schema}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _merge_turns(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields the messages. Consecutive messages of the same role become one, except results of tools. A message with
    calls is the last one of its turn.
    """
    for role, run in groupby(messages, key=lambda message: message.role):
        turn: list[ChatMessage] = []
        for message in run:
            turn.append(message)
            if role == "tool" or message.tool_calls:
                yield _join_turn(turn)
                turn = []
        if turn:
            yield _join_turn(turn)


def _join_turn(turn: Sequence[ChatMessage]) -> ChatMessage:
    if len(turn) == 1:
        return turn[0]
    mark = "" if turn[-1].role == "assistant" else "\n"
    content = mark.join(message.content for message in turn if message.content)
    reasoning = "\n".join(message.reasoning for message in turn if message.reasoning) or None
    return turn[-1].model_copy(update={"content": content, "reasoning": reasoning})


class CountTokensRequest(MessagesFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesFields):
    """POST /v1/messages.

    max_tokens: the maximum number of tokens of the answer. An answer that the context cuts off has the stop reason
        `model_context_window_exceeded`.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Unsupported("auto", "standard_only")] = None

    def chat(self) -> dict[str, Any]:
        user = None if self.metadata is None else self.metadata.user_id
        return super().chat() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": user and user[:MAX_NAME_CHARS],
        }
